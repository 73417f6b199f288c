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

# a text's unseen tokens are passed with those of others if they are few, else in such blocks
SHORT, BLOCK = 8, 256


class CachedDrafter:
    """Drafts the most probable tokens after each request's text."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self._masks = model, TreeMasks(model.config)
        self._place: dict[str, Any] = {}  # of a forward pass
        layers = [
            _Slots(self._place) for _ in range(model.config.get_text_config().num_hidden_layers)
        ]
        self._cache = Cache(layers=[*layers])
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
        rows = sorted(
            (row for row, length in enumerate(lengths) if length > 0), key=lambda row: -lengths[row]
        )
        if not rows:
            return chains
        row_texts = [list(texts[row]) for row in rows]
        slots = self._slots_of(row_texts, 2 * len(texts))
        most_together = min(SHORT, *map(len, row_texts))
        unseen = [1]
        for text, slot in zip(row_texts, slots, strict=True):
            begin, last = len(self._seen[slot]), len(text) - 1
            if len(text) - begin > most_together:
                for start in range(begin, last, BLOCK):
                    end = min(start + BLOCK, last)
                    self._pass([slot], [text[start:end]], [end])
                begin = last
            unseen.append(len(text) - begin)
        width = max(unseen)  # the keys and values of tokens that are passed again stay the same
        fed, ends = [text[-width:] for text in row_texts], [*map(len, row_texts)]
        while rows:
            newest = self._pass(slots, fed, ends)
            for slot, text, end in zip(slots, row_texts, ends, strict=False):
                self._seen[slot] = text[:end]
            for row, token in zip(rows, newest, strict=True):
                chains[row].append(token)
            # the longest chains are first
            remaining = sum(len(chains[row]) < lengths[row] for row in rows)
            rows, slots = rows[:remaining], slots[:remaining]
            fed, ends = (
                [[token] for token in newest[:remaining]],
                [end + 1 for end in ends[:remaining]],
            )
        return chains

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
        places = [
            [*range(end - len(row_tokens), end)] for row_tokens, end in zip(fed, ends, strict=True)
        ]
        fed_BW, places_BW, slots_B = (
            torch.tensor(numbers, device=self.model.device) for numbers in (fed, places, slots)
        )
        self._place |= {
            "slots_B": slots_B,
            "places_BW": places_BW,
            "sizes": (len(self._seen), max(ends)),
        }
        masks: Any = self._masks.causal(places_BW, max(ends), self.model.dtype)
        inputs = {
            "attention_mask": masks,
            "position_ids": places_BW,
            "past_key_values": self._cache,
        }
        output = self.model(fed_BW, **inputs, use_cache=True, logits_to_keep=1)
        tokens: list[int] = output.logits[:, -1].argmax(-1).tolist()
        return tokens


class _Slots(StaticLayer):
    """Keys and values [S, H, C, D], which grow; transformers' own layer appends to all slots
    alike."""

    def __init__(self, place: dict[str, Any]) -> None:
        super().__init__(max_cache_len=0)
        self._place = place

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        slots_B, places_BW = self._place["slots_B"], self._place["places_BW"]
        slots, length = self._place["sizes"]
        if not self.is_initialized:
            self.lazy_initialization(key_states[:0], value_states[:0])
        assert self.keys is not None and self.values is not None
        missing = (
            max(0, slots - len(self.keys)),
            max(0, -(-length // BLOCK) * BLOCK - self.keys.shape[2]),
        )
        if any(missing):
            padding = 0, 0, 0, missing[1], 0, 0, 0, missing[0]
            self.keys, self.values = pad(self.keys, padding), pad(self.values, padding)
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored[slots_B.unsqueeze(-1), :, places_BW] = new.transpose(1, 2)
        return self.keys[slots_B, :, :length], self.values[slots_B, :, :length]
