"""Attention masks for passes over token trees, one for each kind of layer.

Full attention sees all committed tokens and a node's ancestors. Sliding attention sees those of them whose positions
are near; nodes of one depth share a position, though not a cache row.

Legend: B sequences, W tokens of one pass, R cached tree rows (with those of the pass), C all cached rows, S tree slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import get_layer_types_and_kwargs

from selector.schema import InputError

FULL, SLIDING = "full_attention", "sliding_attention"
NO_CACHE = "dummy"  # transformers' name for a layer without a cache of its own
HONOURED = ("eager", "sdpa")  # attention implementations that take any mask of four axes


def check_attention(config: Any, name: str) -> None:
    """InputError with the model's name if its layers or its attention implementation cannot pass token trees."""
    others = sorted({*get_layer_types_and_kwargs(config.get_text_config())[0]} - {FULL, SLIDING, NO_CACHE})
    if others:
        raise InputError(
            f"{name}: has layers of the kind {' and '.join(others)}; token trees need full or sliding attention, "
            "whose cached rows can be dropped again"
        )
    implementation = config.get_text_config()._attn_implementation
    if implementation not in (None, *HONOURED):
        raise InputError(
            f"{name}: attn_implementation {implementation} does not honour the masks of token trees; "
            f"load it with one of {', '.join(HONOURED)}"
        )


class TreeMasks:
    """Builds the masks of a model, in the form of transformers' `create_masks_for_generate`."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ())
        self.window = getattr(text, "sliding_window", None)
        self.by_kind = SLIDING in kinds  # else all layers are alike and take one mask
        if kinds and not self.by_kind:
            self.window = None

    def build(
        self, visible: Tensor, offsets: Sequence[Tensor], committed: int, dtype: torch.dtype
    ) -> Tensor | dict[str, Tensor]:
        """One additive float mask, [1 or B, 1, W, C], or a dictionary of them by the kind of layer.

        Args:
            visible: bool [W, R] or [B, W, R]: the tree rows that each token attends to; all attend to committed rows.
            offsets: positions of the tree's rows, counted from the end of the committed ones; int64 [1 or B, ..] for
                each pass, the coming one included.
            committed: number of cached rows before the tree's.
        """
        device = offsets[-1].device
        visible_BWR = visible.to(device) if visible.dim() == 3 else visible.to(device).unsqueeze(0)
        seen_BWC = pad(visible_BWR, (committed, 0), value=True)
        full = sliding = _additive(seen_BWC, dtype)
        if self.window is not None and seen_BWC.shape[-1] > self.window:  # else the window holds all rows
            batch = max(map(len, offsets))
            own_BC = torch.arange(-committed, 0, device=device).expand(batch, -1)
            offsets_BC = torch.cat([own_BC, *(each.expand(batch, -1) for each in offsets)], dim=1)
            near_BWC = offsets_BC.unsqueeze(1) > offsets[-1].unsqueeze(2) - self.window
            sliding = _additive(seen_BWC & near_BWC, dtype)
        return {FULL: full, SLIDING: sliding} if self.by_kind else sliding

    def preallocated(
        self, visible_WS: Tensor, depths_S: Tensor, positions_W: Tensor, base: Tensor, rows: int, dtype: torch.dtype
    ) -> Tensor | dict[str, Tensor]:
        """As `build`, for a preallocated cache of so many `rows`, where slot `s` of a tree is in row `base + s`.

        Args:
            visible_WS: the slots that each token attends to; all attend to the rows before the base.
            depths_S: positions of the slots, counted from the base, which is int64 [] on the device.
            positions_W: positions of the pass's tokens.
        """
        slots_C = torch.arange(rows, device=base.device) - base
        place_C = slots_C.clamp(0, len(depths_S) - 1)
        in_tree_C = (slots_C >= 0) & (slots_C < len(depths_S))
        seen_WC = (visible_WS[:, place_C] & in_tree_C) | (slots_C < 0)
        full = sliding = _additive(seen_WC.unsqueeze(0), dtype)
        if self.window is not None and rows > self.window:
            offsets_C = torch.where(slots_C < 0, slots_C, depths_S[place_C])
            near_WC = base + offsets_C > positions_W.unsqueeze(1) - self.window
            sliding = _additive((seen_WC & near_WC).unsqueeze(0), dtype)
        return {FULL: full, SLIDING: sliding} if self.by_kind else sliding


def _additive(seen_BWC: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen_BWC.shape, dtype=dtype, device=seen_BWC.device)
    return mask.masked_fill_(~seen_BWC, torch.finfo(dtype).min).unsqueeze(1)
