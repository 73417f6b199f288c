"""The scheduler class of vLLM: `--scheduler-cls data_gen.engines.vllm_scheduler.SelectedLength`. Experimental."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from data_gen.engines.vllm import Lengths


class SelectedLength(AsyncScheduler):
    """Drafts chains of a length that is chosen at every step, the same for all requests.

    The decision for the chains after a step is made when the step is scheduled, so it does not see the step's tokens.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._selected = Lengths(vllm_config)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        decoded = {}
        for name, new in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            if request.num_computed_tokens + new >= request.num_prompt_tokens:
                decoded[name] = request
        if decoded:
            scheduler_output.num_spec_tokens_to_schedule = self._selected.choose(decoded)
        super()._update_after_schedule(scheduler_output)
