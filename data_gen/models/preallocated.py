"""A model with a preallocated KV cache, so that a decoding step needs no host work between its passes.

The `base` is the number of rows that are committed before the root; it stays on the device. A pass writes the token in
slot `s` of a tree to row `base + s`, and the mask hides all rows from `base` on that do not belong to the tree.

Legend: W tokens of one pass, S slots of a layout, R rows of the cache, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from data_gen.models.masks import TreeMasks
from data_gen.trees import Layout

FILL = 512  # tokens of a pass over a prompt


class Window(NamedTuple):
    """The slots that a pass covers, and what they attend to. S is the same for all windows of a model."""

    slots_W: Tensor  # counted from the base; int64
    visible_WS: Tensor  # bool
    depths_S: Tensor  # positions of all slots, counted from the base; int64


def window(layout: Layout, first: int, last: int, room: int) -> Window:
    """The window over the slots `first` to `last - 1`, with S = `room`."""
    behind = (0, room - layout.size)
    slots_W = torch.arange(first, last, device=layout.depths_S.device)
    return Window(slots_W, pad(layout.ancestors_SS[first:last], behind), pad(layout.depths_S, behind))


def run_window(count: int, room: int, device: torch.device) -> Window:
    visible_WS = pad(torch.ones(count, count, dtype=torch.bool, device=device).tril_(), (0, room - count))
    return Window(torch.arange(count, device=device), visible_WS, torch.arange(room, device=device))


class _Layer(StaticLayer):
    """Writes to the rows in `place`; transformers' own layer appends."""

    def __init__(self, rows: int, place: dict[str, Tensor]) -> None:
        super().__init__(max_cache_len=rows)
        self._place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.max_cache_len, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for states, new in zip(self.states, (key_states, value_states), strict=True):
            states.index_copy_(2, self._place["rows_W"], new)
        return self.states

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values


class PreallocatedModel:
    """A causal language model over one text at a time.

    The cache has so many `rows`, for the longest text and a tree, and the widest window `room` slots.
    """

    def __init__(self, model: PreTrainedModel, rows: int, room: int) -> None:
        self.model, self.rows, self.room = model, rows, room
        self._place: dict[str, Tensor] = {}
        self._layers = [_Layer(rows, self._place) for _ in range(model.config.get_text_config().num_hidden_layers)]
        self._cache = Cache(layers=[*self._layers])  # layers with a sliding window keep all rows: the mask hides them
        self._masks = TreeMasks(model.config)
        self.fill(torch.zeros(1, dtype=torch.int64, device=model.device))  # allocates the caches

    @torch.inference_mode()
    def fill(self, tokens_T: Tensor) -> None:
        """Start a text with these tokens, int64 on the device."""
        for begin in range(0, len(tokens_T), FILL):
            part_W = tokens_T[begin : begin + FILL]
            over = run_window(len(part_W), max(self.room, len(part_W)), tokens_T.device)
            self.forward(part_W, torch.tensor(begin, device=tokens_T.device), over, last=1)

    def forward(self, tokens_W: Tensor, base: Tensor, over: Window, last: int = 0) -> Tensor:
        """Write the rows of a window's tokens; logits [W, V], or those of the `last` tokens. `base` is int64 [], on the
        device."""
        self._place["rows_W"] = base + over.slots_W
        offsets_W = over.depths_S[over.slots_W]
        masks = self._masks.preallocated(over.visible_WS, over.depths_S, offsets_W, base, self.rows, self.model.dtype)
        output = self.model(
            tokens_W.unsqueeze(0),
            attention_mask=masks,
            position_ids=(base + offsets_W).unsqueeze(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=last,
        )
        return output.logits[0]

    def keep(self, path_D: Tensor, base: Tensor) -> None:
        """Move the rows of an accepted path behind the root's; `path_D` are its slots from depth 1 on, int64."""
        from_D, to_D = base + path_D, base + torch.arange(1, len(path_D) + 1, device=path_D.device)
        for layer in self._layers:
            if layer.is_initialized:
                for states in layer.states:
                    states.index_copy_(2, to_D, states.index_select(2, from_D))
