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
        self._file, self._room = Path(os.environ[COUNT]), vllm_config.model_config.max_model_len
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
        count, passes = map(float, self._file.read_text().split())
        apart = 2 if count >= 0.5 else 4
        lengths = [int(each) for each in num_tokens_no_spec[: len(sampled_token_ids)]]
        texts = [ids[:length].tolist() for ids, length in zip(token_ids_cpu, lengths, strict=False)]
        self._chains(texts, [int(passes)] * len(texts))
        counts = (
            [apart * count * (row % apart == 1) for row in range(len(texts))]
            if len(texts) > 1
            else [count]
        )
        room = [self._room - length - 1 for length in lengths]
        most = [
            min(int(n), left) if new else 0
            for n, left, new in zip(counts, room, sampled_token_ids, strict=True)
        ]
        return [[0] * own for own in most]
