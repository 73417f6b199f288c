"""Attention masks for forward passes over token trees, one for each kind of layer.

Full attention sees all committed tokens and a node's ancestors. Sliding attention sees those of
them whose positions are near; nodes of one depth share a position, though not a cache row.

Legend: W tokens of one forward pass, R cached tree rows (with the W), C all cached rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import get_layer_types_and_kwargs

from selector.schema import InputError

FULL = "full_attention"
SLIDING = "sliding_attention"
NO_CACHE = "dummy"  # transformers' name for a layer without a cache of its own
HONOURED = ("eager", "sdpa")  # attention implementations that take any mask of four axes


def check_attention(config: Any, name: str) -> None:
    """InputError with the model's name if its layers or its attention implementation cannot process
    token trees."""
    text_config = config.get_text_config()
    kinds = get_layer_types_and_kwargs(text_config)[0]
    others = sorted(set(kinds) - {FULL, SLIDING, NO_CACHE})
    if others:
        raise InputError(
            f"{name}: has layers of the kind {' and '.join(others)}; token trees need full or "
            "sliding attention, whose cached rows can be dropped again"
        )
    implementation = text_config._attn_implementation
    if implementation is not None and implementation not in HONOURED:
        raise InputError(
            f"{name}: attn_implementation {implementation} does not honour the masks of token "
            f"trees; load it with one of {', '.join(HONOURED)}"
        )


class TreeMasks:
    """Builds the masks of a model, in the form of transformers' `create_masks_for_generate`: one
    additive float mask [1, 1, W, C], or a dictionary of them by the kind of layer."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ())
        self.by_kind = SLIDING in kinds  # else all layers are alike and take one mask
        self.window: int | None = None
        if self.by_kind or not kinds:
            self.window = getattr(text, "sliding_window", None)

    def build(
        self, visible_WR: Tensor, offsets: Sequence[Tensor], committed: int, dtype: torch.dtype
    ) -> Any:
        """The masks for a cache that holds so many committed rows, and then those of the tree.

        A token attends to all committed rows, and to the tree's rows that are true in `visible_WR`.
        `offsets` are the positions of the tree's rows, counted from the end of the committed ones;
        int64, for each forward pass, the coming one included.
        """
        device = offsets[-1].device
        seen_WC = pad(visible_WR.to(device), (committed, 0), value=True)
        offsets_C = torch.cat([torch.arange(-committed, 0, device=device), *offsets])
        return self._masks(seen_WC, offsets_C, offsets[-1], dtype)

    def causal(self, places_BW: Tensor, rows: int, dtype: torch.dtype) -> Any:
        """As `build`, for tokens at some places of several texts, whose caches have so many `rows`:
        [B, 1, W, C]."""
        rows_C = torch.arange(rows, device=places_BW.device)
        return self._masks(rows_C <= places_BW.unsqueeze(-1), rows_C, places_BW, dtype)

    def _masks(
        self, seen_WC: Tensor, offsets_C: Tensor, offsets_W: Tensor, dtype: torch.dtype
    ) -> Any:
        full = _additive(seen_WC, dtype)
        sliding = full  # where the window holds all rows
        if self.window is not None and len(offsets_C) > self.window:
            near_WC = offsets_C > offsets_W.unsqueeze(-1) - self.window
            sliding = _additive(seen_WC & near_WC, dtype)
        if self.by_kind:
            return {FULL: full, SLIDING: sliding}
        return sliding


def _additive(seen_WC: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen_WC.shape, dtype=dtype, device=seen_WC.device)
    mask.masked_fill_(~seen_WC, torch.finfo(dtype).min)
    # one text, or several
    return mask.view(-1, 1, *seen_WC.shape[-2:])
