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

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.engines.requests import Requests
from data_gen.engines.text import CACHE_GIB, NAME, Chains, TextSelector, no_harm


class Proposer:
    """Lookups and chains whose length is chosen for each request, so that the rows of a batch
    differ in length. `vllm_config` has our entry in its `additional_config`; InputError as
    `TextSelector.of`."""

    def __init__(self, vllm_config: Any) -> None:
        additional = vllm_config.additional_config or {}
        self._config = vllm_config
        self._load: Callable[[], Chains] | None = None  # where a model drafts
        self._selector = TextSelector.of(additional.get(NAME), self._loaded_later)
        self._longest = vllm_config.speculative_config.num_speculative_tokens
        self._room = vllm_config.model_config.max_model_len
        self._requests = Requests(partial(self._selector.text, ()))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the draft with its cache. Runners call this where they load the target, and leave
        what memory it takes out of that for their own cache. InputError as `CachedDrafter.load`."""
        if self._load is not None:
            self._chains = self._load()

    def _loaded_later(self, draft: str, cache_gib: float) -> Chains:
        self._load = partial(chains_of, self._config, draft, cache_gib)
        return lambda texts, lengths: self._chains(texts, lengths)

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
        lengths: dict[int, int] = {}  # by row that decodes, the tokens of its text
        for row, new in enumerate(sampled_token_ids):
            if new and num_tokens_no_spec[row] < self._room:
                lengths[row] = int(num_tokens_no_spec[row])
        if not lengths:
            return drafts
        with no_harm():
            ids = [token_ids_cpu[row, :length] for row, length in lengths.items()]
            texts = self._requests.step(ids, [len(sampled_token_ids[row]) for row in lengths])
            read = {row: text for row, text in zip(lengths, texts, strict=True) if text is not None}
            if read:
                most = [min(self._longest, self._room - lengths[row] - 1) for row in read]
                alone = len(read) == len(sampled_token_ids)
                drafted = self._selector.drafts(list(read.values()), most, alone)
                for row, draft in zip(read, drafted, strict=True):
                    drafts[row] = draft
        return drafts


def chains_of(vllm_config: Any, draft: str, cache_gib: float = CACHE_GIB) -> Chains:
    """The chains of a draft for the engine's target, on its device in its dtype; InputError as
    `CachedDrafter.load`."""
    from data_gen.engines.drafter import CachedDrafter  # copies need no transformers

    model = vllm_config.model_config
    device = vllm_config.device_config.device_type
    dtype = str(model.dtype).removeprefix("torch.")
    return CachedDrafter.load(draft, model.model, device, dtype, cache_gib).chains
