"""A draft model beside an engine, for its plug-ins: greedy chains for several requests at once.

The keys and values of what the model has read lie in pages of one cache of a fixed size, as in vLLM
(arXiv 2309.06180). A text is known by its tokens: pages whose tokens begin it go on, so a request
may be paused, moved or dropped unseen, and the pages that were unused longest are taken for others.

Legend: B requests that draft, W tokens of one forward pass, P pages of a request, C its rows, R all
    rows of the cache, H heads, D width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from data_gen.engines.steps import NAME, log_once
from data_gen.engines.text import CACHE_GIB
from data_gen.models.checkpoints import load_model, positions, text_config
from data_gen.models.distilled import is_distilled
from data_gen.models.gguf import resolved
from data_gen.models.masks import TreeMasks
from data_gen.models.pair import DTYPES, ModelPair, scored, shared_tokenizer
from data_gen.models.prepack import prepack
from selector.schema import InputError

SHORT = 8  # at most so many unread tokens of a text are passed with those of others
BLOCK = 256  # else they are passed in such blocks
READ = 2048  # tokens of long texts that a step reads, so that other requests do not wait for one
PAGE = 64  # rows
GIB = 1 << 30


@dataclass(eq=False)
class _Slot:
    """What the cache holds of one text."""

    tokens: list[int] = field(default_factory=list)  # whose keys and values it has
    pages: list[int] = field(default_factory=list)

    def begins(self, text: list[int]) -> bool:
        length = len(self.tokens)
        # the newest tokens rarely agree, and need no copy of the text
        return self.tokens[-1:] == text[length - 1 : length] and self.tokens == text[:length]


@dataclass(eq=False)
class _Chain:
    """What is drafted after one text."""

    text: list[int]
    length: int  # that is asked for
    tokens: list[int]  # that are drafted so far
    slot: _Slot

    @property
    def unread(self) -> int:
        return len(self.text) - len(self.slot.tokens)


class CachedDrafter:
    """Drafts the most probable tokens after each request's text.

    Nothing is drafted after a text beyond the model's positions, one that is still being read, and
    one for which the cache has no room.

    Args:
        vocabulary: tokens that the target scores; no other one is drafted. None: all that the draft
            scores.
        cache_gib: the size of the KV cache in GiB, which is allocated at once. InputError where it
            holds no page, or where the model's config does not say how many positions it has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: int | None = None,
        cache_gib: float = CACHE_GIB,
    ) -> None:
        self.model = model
        self._vocabulary = scored(model) if vocabulary is None else vocabulary
        embeddings: Any = model.get_input_embeddings()
        self._inputs = int(embeddings.weight.shape[0])
        self._positions = positions(model.config, str(model.name_or_path))
        self._masks = TreeMasks(model.config)
        self._pages = _Pages(model, cache_gib)
        self._slots: list[_Slot] = []  # the longest unused one first

    @classmethod
    def load(
        cls,
        draft: str,
        target: str,
        device: str = "cpu",
        dtype: str = "float32",
        cache_gib: float = CACHE_GIB,
    ) -> CachedDrafter:
        """The draft of a pair, whose names and InputErrors are those of `ModelPair.load`, with its
        cache. For a distilled draft, which has the target's tables, the target is loaded, too, and
        let go."""
        folder = resolved(draft, "draft")
        target_folder = resolved(target, "target")
        if is_distilled(folder):
            model = ModelPair.load(target, folder, device, dtype).draft
        else:
            shared_tokenizer(target_folder, folder)  # or it raises
            model = load_model(folder, "draft", DTYPES[dtype], torch.device(device))
            prepack(model)
        drafter = cls(model, text_config(target_folder, "target").vocab_size, cache_gib)
        rows = drafter._pages.count * PAGE
        # as a warning, since an engine's log shows no less of others
        logging.getLogger(NAME).warning(
            f"the draft's KV cache: {cache_gib:g} GiB, for {rows:,} tokens of all requests together"
        )
        return drafter

    @torch.inference_mode()
    def chains(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Chains of at most so many tokens after some texts of token ids; none for a length of
        0."""
        drafted: list[list[int]] = [[] for _ in texts]
        chains: list[_Chain] = []
        try:
            for ids, length, tokens in zip(texts, lengths, drafted, strict=True):
                # its last token is drafted and never read
                length = min(length, self._positions + 1 - len(ids))
                if length > 0:
                    text = list(ids)
                    chains.append(_Chain(text, length, tokens, self._slot_of(text)))
            self._draft([chain for chain in chains if self._has_room(chain)])
        finally:  # also where a pass fails
            self._slots += [chain.slot for chain in chains if chain.slot.pages]
        return drafted

    def _slot_of(self, text: list[int]) -> _Slot:
        """The slot that has most of a text's beginning, which is taken out; else a new one."""
        fitting = [slot for slot in self._slots if slot.begins(text)]
        if not fitting:
            return _Slot()
        slot = max(fitting, key=lambda slot: len(slot.tokens))
        self._slots.remove(slot)
        return slot

    def _has_room(self, chain: _Chain) -> bool:
        """Whether a chain's slot has pages for all its tokens now; else it has none."""
        slot = chain.slot
        free = self._pages.free
        missing = _pages_of(len(chain.text) + chain.length - 1) - len(slot.pages)
        if missing > len(free) + sum(len(unused.pages) for unused in self._slots):
            free += slot.pages  # so that others have room
            slot.pages = []
            log_once("the draft's KV cache is too small for all requests: some draft nothing")
            return False
        while missing > len(free):
            free += self._slots.pop(0).pages
        for _ in range(missing):
            slot.pages.append(self._pages.take())
        return True

    def _draft(self, chains: list[_Chain]) -> None:
        if not chains:
            return
        most_together = min(SHORT, *(len(chain.text) for chain in chains))
        self._read(chains, most_together)
        chains = [chain for chain in chains if chain.unread <= most_together]
        chains.sort(key=lambda chain: -chain.length)  # the longest ones are first
        width = max((chain.unread for chain in chains), default=0)
        # the keys and values of tokens that are passed again stay the same
        fed = [chain.text[-max(width, 1) :] for chain in chains]
        while chains:
            ends = [len(chain.text) + len(chain.tokens) for chain in chains]
            newest = self._pass([chain.slot for chain in chains], fed, ends)
            for chain, token in zip(chains, newest, strict=True):
                chain.slot.tokens = chain.text
                chain.tokens.append(token)
            chains = [chain for chain in chains if len(chain.tokens) < chain.length]
            fed = [chain.tokens[-1:] for chain in chains]

    def _read(self, chains: Sequence[_Chain], most_together: int) -> None:
        """Pass what the slots lack of long texts, but the last token, as far as a step reads."""
        left = READ
        for chain in chains:
            if chain.unread > most_together:
                begin = len(chain.slot.tokens)
                last = min(len(chain.text) - 1, begin + left)
                for start in range(begin, last, BLOCK):
                    end = min(start + BLOCK, last)
                    self._pass([chain.slot], [chain.text[start:end]], [end])
                    chain.slot.tokens = chain.text[:end]
                left -= last - begin

    def _pass(self, slots: list[_Slot], fed: list[list[int]], ends: list[int]) -> list[int]:
        """The most probable tokens after equally many tokens of some slots, the last ones before
        `ends`."""
        device = self.model.device
        fed_BW = torch.tensor(fed, device=device)
        before_W = torch.arange(-len(fed[0]), 0, device=device)
        places_BW = torch.tensor(ends, device=device).unsqueeze(-1) + before_W
        self._pages.turn_to([slot.pages for slot in slots], places_BW, max(ends))
        masks: Any = self._masks.causal(places_BW, max(ends), self.model.dtype)
        output = self.model(
            fed_BW.clamp(0, self._inputs - 1),  # a target may have more tokens, of images for one
            attention_mask=masks,
            position_ids=places_BW,
            past_key_values=self._pages.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens: list[int] = output.logits[:, -1, : self._vocabulary].argmax(-1).tolist()
        return tokens


class _Pages:
    """The pages of all layers, and which of them a forward pass writes and reads."""

    written_BW: Tensor  # rows of its tokens
    read_BC: Tensor  # rows of its texts, as many for each

    def __init__(self, model: PreTrainedModel, gib: float) -> None:
        with torch.inference_mode():
            token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            layers = model(token, use_cache=True).past_key_values.layers
        states = [state for layer in layers for state in (layer.keys, layer.values)]
        row_bytes = sum(state.numel() * state.element_size() for state in states)
        self.count = int(gib * GIB) // (row_bytes * PAGE)
        if self.count < 1:
            raise InputError(
                f"{NAME}: draft_cache_gib={gib:g} has no room for {PAGE} tokens of "
                f"{row_bytes:,} bytes"
            )
        self.free = list(range(self.count))
        self._layers = [_Layer(self, layer.keys, layer.values) for layer in layers]
        self.cache = Cache(layers=list(self._layers))

    def take(self) -> int:
        """A free page, emptied: masked rows count nothing if they are finite."""
        page = self.free.pop()
        for layer in self._layers:
            layer.empty(page)
        return page

    def turn_to(self, pages: Sequence[list[int]], places_BW: Tensor, length: int) -> None:
        """The next pass writes at some places of texts with these pages, and reads so many rows of
        each."""
        count = _pages_of(length)
        filled = []
        for of_text in pages:
            missing = count - len(of_text)
            filled.append(of_text[:count] + of_text[-1:] * missing)
        first_BP1 = torch.tensor(filled, device=places_BW.device).unsqueeze(-1) * PAGE
        rows_BC = (first_BP1 + torch.arange(PAGE, device=places_BW.device)).flatten(1)
        self.written_BW = rows_BC.gather(1, places_BW)
        self.read_BC = rows_BC[:, :length]


class _Layer(StaticLayer):
    """The keys and values of one layer, [R, H, D] each."""

    keys: Tensor
    values: Tensor

    def __init__(self, pages: _Pages, key_states: Tensor, value_states: Tensor) -> None:
        super().__init__(max_cache_len=0)
        self._pages = pages
        self.keys = _empty_rows(pages.count * PAGE, key_states)
        self.values = _empty_rows(pages.count * PAGE, value_states)
        self.is_initialized = True

    def empty(self, page: int) -> None:
        rows = slice(page * PAGE, (page + 1) * PAGE)
        self.keys[rows] = 0
        self.values[rows] = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        pages = self._pages
        self.keys[pages.written_BW] = key_states.transpose(1, 2)
        self.values[pages.written_BW] = value_states.transpose(1, 2)
        keys_BCHD = self.keys[pages.read_BC]
        values_BCHD = self.values[pages.read_BC]
        return keys_BCHD.transpose(1, 2), values_BCHD.transpose(1, 2)


@torch.inference_mode()
def _empty_rows(count: int, states_1H1D: Tensor) -> Tensor:
    states_HD = states_1H1D[0, :, 0]
    return states_HD.new_empty(count, *states_HD.shape)


def _pages_of(rows: int) -> int:
    return -(-rows // PAGE)
