"""Plug-ins of vLLM: a proposer that copies as a selector decides, and a scheduler that chooses one length for a batch.

Read in vLLM 0.33.0 (`v1/spec_decode/custom_class_proposer.py`, `v1/worker/gpu_model_runner.py`,
`v1/core/sched/scheduler.py`, `v1/core/sched/async_scheduler.py`). vLLM calls both interfaces experimental.

    --speculative-config '{"method": "custom_class", "model": "data_gen.engines.vllm.Proposer",
                           "num_speculative_tokens": 20}'
    --additional-config '{"espalier": {"selector": "runs/mine/selector", "temperature": 0.0}}'
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.engines.text import Text, TextSelector
from selector.schema import InputError

NAME = "espalier"  # of our entry in vLLM's `additional_config`


def selector_of(vllm_config: Any) -> TextSelector:
    """The selector that `--additional-config` names."""
    options = vllm_config.additional_config
    return TextSelector.of(options.get(NAME) if isinstance(options, dict) else None)


class Proposer:
    """Lookups whose length is chosen for each request, so that the rows of a batch differ in length.

    Args:
        vllm_config: with our entry in its `additional_config`.

    Raises:
        InputError: the entry is missing, or the selector also chooses chains of a drafter.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._selector = selector_of(vllm_config).of_copies()
        self._longest = vllm_config.speculative_config.num_speculative_tokens
        self._room = vllm_config.model_config.max_model_len
        self._texts: list[Text] = []  # of the last step, in the order of its rows

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Tokens to verify for each row of the batch.

        Args:
            sampled_token_ids: of this step, by row; none where a row's prompt is not finished.
            num_tokens_no_spec: tokens of each row, these included.
            token_ids_cpu: token ids [rows, positions].
        """
        counts = [int(count) for count in num_tokens_no_spec[: len(sampled_token_ids)]]
        rows = [row for row, new in enumerate(sampled_token_ids) if new and counts[row] < self._room]
        before, self._texts = self._texts, []
        for row in rows:
            ids_N = token_ids_cpu[row, : counts[row]]
            self._texts.append(self._text(ids_N, len(sampled_token_ids[row]), before))
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if rows:
            most = [min(self._longest, self._room - counts[row] - 1) for row in rows]
            for row, copied in zip(rows, self._selector.copies(self._texts, most), strict=True):
                drafts[row] = copied
        return drafts

    def _text(self, ids_N: NDArray[Any], new: int, before: list[Text]) -> Text:
        """The text of a row. vLLM does not name the row's request and may move it, so it is found by its tokens."""
        for at, text in enumerate(before):
            if text.grow(ids_N):
                return before.pop(at)
        return self._selector.text(ids_N, len(ids_N) - new)


class Lengths:
    """One chain length for all requests that a step decodes, for `data_gen.engines.vllm_scheduler`.

    The lengths are those of the schedule `num_speculative_tokens_per_batch_size`, for which vLLM captures CUDA graphs.
    """

    def __init__(self, vllm_config: Any) -> None:
        schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        if not schedule:
            raise InputError("espalier: --speculative-config needs num_speculative_tokens_per_batch_size")
        self._lengths = tuple(sorted({int(length) for _, _, length in schedule}))
        self._selector, self._texts = selector_of(vllm_config).of_chains(self._lengths), dict[str, Text]()

    def choose(self, requests: dict[str, Any]) -> int:
        """The length after a step of some requests of vLLM, by id; their tokens are known up to the step before."""
        kept = {name: self._texts.get(name) or self._new(request) for name, request in requests.items()}
        for name, request in requests.items():
            kept[name].known.committed(list(request.all_token_ids[len(kept[name]) :]))
        self._texts = kept
        return self._selector.length(list(kept.values()), self._lengths)

    def _new(self, request: Any) -> Text:
        return self._selector.text(list(request.all_token_ids), request.num_prompt_tokens)
