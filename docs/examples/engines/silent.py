"""The plug-in of vLLM, which works as always, but whose drafts are not proposed: what a step takes
beside a drafter that drafts nothing."""

from __future__ import annotations

from typing import Any

from data_gen.engines.vllm import Proposer


class Silent(Proposer):
    """Drafts for nobody."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **named: Any) -> Any:
        super().propose(sampled_token_ids, *args, **named)
        return [[] for _ in sampled_token_ids]
