"""A plug-in of SGLang: the adaptive number of draft steps, chosen by a selector at every step of a batch.

Read in SGLang 0.5.23 (`srt/plugins/__init__.py`, `srt/plugins/hook_registry.py`,
`srt/speculative/adaptive_runtime_state.py`, `srt/speculative/adaptive_spec_params.py`,
`srt/speculative/eagle_worker_v2.py`). SGLang finds it by the entry point `sglang.srt.plugins`. It changes nothing
unless the file of `--speculative-adaptive-config` has our key, which SGLang itself does not read:

    {"1": {"candidate_steps": [1, 3, 5]}, "16": {"candidate_steps": [0, 1, 3]},
     "espalier": {"selector": "runs/mine/selector", "temperature": 0.0}}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

from data_gen.engines.text import NAME, TextSelector
from data_gen.features.root import DrafterKnowledge

REPLACED = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
FORWARD = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation"


class SelectedSteps(AdaptiveSpeculativeParams):
    """SGLang's `AdaptiveSpecPolicy`: the same candidates and CUDA graphs, but a selector chooses among the candidates.

    Without our entry in the file it is SGLang's own policy. The policy is asked with the number of requests alone, so
    the requests are seen when the worker begins a step. Where SGLang overlaps steps, their last step's tokens are not
    known yet.
    """

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        super().__init__(initial_steps, cfg_path)
        options = json.loads(Path(cfg_path).read_text()).get(NAME) if cfg_path else None
        self.selector = None if options is None else TextSelector.of(options, self.candidate_steps)
        self.texts: list[DrafterKnowledge] = []  # of the next step's requests
        if self.selector is not None:
            HookRegistry.register(FORWARD, before_forward, HookType.BEFORE)
            HookRegistry.apply_hooks()

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The steps for the requests that were seen."""
        if self.selector is None or not self.texts:
            return int(super().get_steps_for_batch(batch_size))
        return self.selector.length(self.texts, self._route(batch_size).candidate_steps)

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """None: what was accepted does not change the steps, because the next step is decided anew."""
        if self.selector is not None:
            return None
        changed: int | None = super().on_verify_complete(num_correct_drafts_per_req, batch_size)
        return changed


def before_forward(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Shows the policy the requests of a decoding step, SGLang's `Req`."""
    policy = getattr(worker.adaptive_controller, "params", None)
    if isinstance(policy, SelectedSteps) and policy.selector is not None and not batch.forward_mode.is_extend():
        policy.texts = policy.selector.follow(
            {each.rid: (each.origin_input_ids, each.output_ids) for each in batch.reqs}
        )


def register() -> None:
    """The plug-in's entry point."""
    HookRegistry.register(REPLACED, SelectedSteps, HookType.REPLACE)
