"""A proposer of vLLM whose tokens are nearly always wrong: with it steps are timed by the tokens that they verify."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

COUNT = "ESPALIER_WRONG"  # the environment's variable with the file that holds how many tokens are proposed


class WrongTokens:
    """Proposes the newest token again, as often as the file says."""

    def __init__(self, vllm_config: Any) -> None:
        self._file, self._room = Path(os.environ[COUNT]), vllm_config.model_config.max_model_len

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        count = int(self._file.read_text())
        room = [self._room - int(each) - 1 for each in num_tokens_no_spec[: len(sampled_token_ids)]]
        return [[0] * min(count, left) if new else [] for new, left in zip(sampled_token_ids, room, strict=True)]
