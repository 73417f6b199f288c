"""A draft model beside an engine, for its plug-ins: greedy chains for several requests at once.

What the model has seen of a text stays in a slot of one KV cache. A text is known by its tokens: a
slot whose tokens begin it goes on, so a request may be paused, moved or dropped unseen.

Legend: B requests that draft, W tokens of one forward pass, S slots, H heads, C rows of a slot, D
    width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from data_gen.models.checkpoints import load_model
from data_gen.models.distilled import is_distilled
from data_gen.models.gguf import resolved
from data_gen.models.masks import TreeMasks
from data_gen.models.pair import DTYPES, ModelPair, shared_tokenizer
from data_gen.models.prepack import prepack

SHORT = 8  # at most so many unseen tokens of a text are passed with those of others
BLOCK = 256  # else they are passed in such blocks


class CachedDrafter:
    """Drafts the most probable tokens after each request's text."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._masks = TreeMasks(model.config)
        self._rows = _Rows()
        layer_count = model.config.get_text_config().num_hidden_layers
        self._cache = Cache(layers=[_Slots(self._rows) for _ in range(layer_count)])
        self._seen: list[list[int]] = []  # by slot, the tokens whose keys and values it has
        self._order: list[int] = []  # slots, the longest unused one first

    @classmethod
    def load(
        cls, draft: str, target: str, device: str = "cpu", dtype: str = "float32"
    ) -> CachedDrafter:
        """The draft of a pair, whose names and InputErrors are those of `ModelPair.load`. For a
        distilled draft, which has the target's tables, the target is loaded, too, and let go."""
        folder = resolved(draft, "draft")
        if is_distilled(folder):
            return cls(ModelPair.load(target, folder, device, dtype).draft)
        shared_tokenizer(resolved(target, "target"), folder)  # or it raises
        model = load_model(folder, "draft", DTYPES[dtype], torch.device(device))
        prepack(model)
        return cls(model)

    @torch.inference_mode()
    def chains(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Chains of so many tokens after some texts of token ids; none for a length of 0."""
        chains: list[list[int]] = [[] for _ in texts]
        rows = [row for row, length in enumerate(lengths) if length > 0]
        rows.sort(key=lambda row: -lengths[row])  # the longest chains are first
        if not rows:
            return chains
        row_texts = [list(texts[row]) for row in rows]
        slots = self._slots_of(row_texts, 2 * len(texts))
        width = self._pass_most(row_texts, slots)
        # the keys and values of tokens that are passed again stay the same
        fed = [text[-width:] for text in row_texts]
        ends = [len(text) for text in row_texts]
        while rows:
            newest = self._pass(slots, fed, ends)
            for slot, text, end in zip(slots, row_texts, ends, strict=False):
                self._seen[slot] = text[:end]
            for row, token in zip(rows, newest, strict=True):
                chains[row].append(token)
            remaining = sum(len(chains[row]) < lengths[row] for row in rows)
            rows = rows[:remaining]
            slots = slots[:remaining]
            fed = [[token] for token in newest[:remaining]]
            ends = [end + 1 for end in ends[:remaining]]
        return chains

    def _pass_most(self, texts: Sequence[list[int]], slots: Sequence[int]) -> int:
        """Pass what the slots lack of long texts, but the last token; the number of last tokens
        that are left of some text, to be passed together."""
        most_together = min(SHORT, *map(len, texts))
        most_left = 1
        for text, slot in zip(texts, slots, strict=True):
            begin = len(self._seen[slot])
            last = len(text) - 1
            if len(text) - begin > most_together:
                for start in range(begin, last, BLOCK):
                    end = min(start + BLOCK, last)
                    self._pass([slot], [text[start:end]], [end])
                begin = last
            most_left = max(most_left, len(text) - begin)
        return most_left

    def _slots_of(self, texts: Sequence[list[int]], most: int) -> list[int]:
        """A slot for each text: the one that has most of its beginning, a new one while there are
        fewer than `most`, or the one that was unused longest."""
        slots: list[int] = []
        for text in texts:
            free = [slot for slot in self._order if slot not in slots]
            fitting = [slot for slot in free if self._seen[slot] == text[: len(self._seen[slot])]]
            if fitting:
                slot = max(fitting, key=lambda number: len(self._seen[number]))
            elif len(self._seen) < most:
                slot = len(self._seen)
                self._seen.append([])
            else:
                slot = free[0]
                self._seen[slot] = []
            self._order = [number for number in self._order if number != slot] + [slot]
            slots.append(slot)
        return slots

    def _pass(self, slots: list[int], fed: list[list[int]], ends: list[int]) -> list[int]:
        """The most probable tokens after equally many tokens of some slots, the last ones before
        `ends`."""
        device = self.model.device
        fed_BW = torch.tensor(fed, device=device)
        before_W = torch.arange(-len(fed[0]), 0, device=device)
        places_BW = torch.tensor(ends, device=device).unsqueeze(-1) + before_W
        self._rows.slots_B = torch.tensor(slots, device=device)
        self._rows.places_BW = places_BW
        self._rows.slots = len(self._seen)
        self._rows.length = max(ends)
        masks: Any = self._masks.causal(places_BW, max(ends), self.model.dtype)
        output = self.model(
            fed_BW,
            attention_mask=masks,
            position_ids=places_BW,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens: list[int] = output.logits[:, -1].argmax(-1).tolist()
        return tokens


class _Rows:
    """Where a forward pass writes and reads, for all layers."""

    slots_B: Tensor  # of its requests
    places_BW: Tensor  # of its tokens in their slots
    slots: int  # of the cache
    length: int  # of the longest of its texts


class _Slots(StaticLayer):
    """Keys and values [S, H, C, D], which grow; transformers' own layer appends to all slots
    alike."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__(max_cache_len=0)
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows = self._rows
        if not self.is_initialized:
            self.lazy_initialization(key_states[:0], value_states[:0])
        assert self.keys is not None and self.values is not None
        whole_blocks = -(-rows.length // BLOCK) * BLOCK
        missing_slots = max(0, rows.slots - len(self.keys))
        missing_rows = max(0, whole_blocks - self.keys.shape[2])
        if missing_slots > 0 or missing_rows > 0:
            padding = 0, 0, 0, missing_rows, 0, 0, 0, missing_slots  # the last axis comes first
            self.keys = pad(self.keys, padding)
            self.values = pad(self.values, padding)
        slots_B1 = rows.slots_B.unsqueeze(-1)
        self.keys[slots_B1, :, rows.places_BW] = key_states.transpose(1, 2)
        self.values[slots_B1, :, rows.places_BW] = value_states.transpose(1, 2)
        texts = rows.slots_B, slice(None), slice(rows.length)
        return self.keys[texts], self.values[texts]
