"""The scheduler class of vLLM: `--scheduler-cls data_gen.engines.vllm_scheduler.SelectedLength`. Experimental.

Read in vLLM 0.33.0 (`v1/core/sched/scheduler.py`, `v1/core/sched/async_scheduler.py`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from data_gen.engines.text import NAME, TextSelector
from selector.schema import InputError


class SelectedLength(AsyncScheduler):
    """Drafts chains of a length that is chosen at every step, the same for all requests, among those of the schedule
    `num_speculative_tokens_per_batch_size`, for which vLLM captures CUDA graphs.

    The decision for the chains after a step is made when the step is scheduled, so it does not see the step's tokens.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        if not schedule:
            raise InputError(f"{NAME}: --speculative-config needs num_speculative_tokens_per_batch_size")
        self._lengths = sorted({int(length) for _, _, length in schedule})
        self._selector = TextSelector.of((vllm_config.additional_config or {}).get(NAME), self._lengths)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        decoded = {}
        for name, new in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            if request.num_computed_tokens + new >= request.num_prompt_tokens:
                decoded[name] = request.prompt_token_ids, request.output_token_ids
        if decoded:
            length = self._selector.length(self._selector.follow(decoded), self._lengths)
            scheduler_output.num_spec_tokens_to_schedule = length
        super()._update_after_schedule(scheduler_output)
