"""A proposer of vLLM whose tokens are nearly always wrong, to time steps by verified tokens and
draft passes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from data_gen.engines.vllm import chains_of

# the environment's variable with the file of two numbers: proposed tokens, and draft passes
COUNT = "ESPALIER_WRONG"


class WrongTokens:
    """Drafts chains of so many tokens as the file says, and proposes wrong ones instead, as many as
    it says on average. Of several requests every other one is given twice as many, or every fourth
    four times as many: they rarely draft alike, and vLLM's CPU build takes longer then."""

    def __init__(self, vllm_config: Any) -> None:
        self._file = Path(os.environ[COUNT])
        self._context = vllm_config.model_config.max_model_len
        self._chains = chains_of(vllm_config, vllm_config.additional_config["draft"])

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        *args: Any,
        **kwargs: Any,
    ) -> list[list[int]]:
        mean, passes = map(float, self._file.read_text().split())
        requests = len(sampled_token_ids)
        lengths = [int(length) for length in num_tokens_no_spec[:requests]]
        texts = []
        for ids, length in zip(token_ids_cpu, lengths, strict=False):
            texts.append(ids[:length].tolist())
        self._chains(texts, [int(passes)] * requests)
        proposals = []
        for row, length in enumerate(lengths):
            count = 0
            if sampled_token_ids[row]:
                room = self._context - length - 1
                count = min(int(_count_of(row, requests, mean)), room)
            proposals.append([0] * count)
        return proposals


def _count_of(row: int, requests: int, mean: float) -> float:
    """The proposed tokens of one request among so many."""
    if requests == 1:
        return mean
    apart = 2 if mean >= 0.5 else 4
    return apart * mean if row % apart == 1 else 0
