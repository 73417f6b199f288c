"""A plug-in of vLLM: a proposer that copies, or drafts with a model of its own, as a selector
decides.

Read and run in vLLM 0.32.0 (`v1/spec_decode/custom_class_proposer.py`,
`v1/worker/gpu_model_runner.py` and `cpu_model_runner.py`). vLLM calls the interface experimental.

    --speculative-config '{"method": "custom_class", "model": "data_gen.engines.vllm.Proposer",
                           "num_speculative_tokens": 20}'
    --additional-config '{"espalier": {"selector": "runs/mine/selector", "temperature": 0.0,
    "draft": "DRAFT"}}'
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.engines.text import NAME, Chains, TextSelector, grow, no_harm
from data_gen.features.root import DrafterKnowledge


class Proposer:
    """Lookups and chains whose length is chosen for each request, so that the rows of a batch
    differ in length. `vllm_config` has our entry in its `additional_config`; InputError as
    `TextSelector.of`."""

    def __init__(self, vllm_config: Any) -> None:
        additional = vllm_config.additional_config or {}
        self._selector = TextSelector.of(
            additional.get(NAME), lambda draft: chains_of(vllm_config, draft)
        )
        self._longest = vllm_config.speculative_config.num_speculative_tokens
        self._room = vllm_config.model_config.max_model_len
        self._texts: list[DrafterKnowledge] = []  # of the last step, in the order of its rows

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Runners hand over the target; there is nothing left to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Tokens to verify for each row of the batch, from this step's tokens (none where a row's
        prompt is not finished), the number of all tokens of each row, and the token ids [rows,
        positions]."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rooms: dict[int, int] = {}  # by row, the tokens that there is room for
        for row, new in enumerate(sampled_token_ids):
            if new:
                room = self._room - int(num_tokens_no_spec[row])
                if room > 0:
                    rooms[row] = room
        before = self._texts
        self._texts = []
        if not rooms:
            return drafts
        with no_harm():
            for row in rooms:
                ids_N = token_ids_cpu[row, : num_tokens_no_spec[row]]
                self._texts.append(self._text(ids_N, len(sampled_token_ids[row]), before))
            most = [min(self._longest, room - 1) for room in rooms.values()]
            reads_prompts = len(rooms) < len(sampled_token_ids)
            drafted = self._selector.drafts(self._texts, most, alone=not reads_prompts)
            for row, draft in zip(rooms, drafted, strict=True):
                drafts[row] = draft
        return drafts

    def _text(
        self, ids_N: NDArray[Any], new: int, before: list[DrafterKnowledge]
    ) -> DrafterKnowledge:
        for at, text in enumerate(before):
            if grow(text, ids_N):
                return before.pop(at)
        return self._selector.text(ids_N, len(ids_N) - new)


def chains_of(vllm_config: Any, draft: str) -> Chains:
    """The chains of a draft for the engine's target, on its device in its dtype; InputError as
    `CachedDrafter.load`."""
    from data_gen.engines.drafter import CachedDrafter  # copies need no transformers

    model = vllm_config.model_config
    device = vllm_config.device_config.device_type
    dtype = str(model.dtype).removeprefix("torch.")
    return CachedDrafter.load(draft, model.model, device, dtype).chains
