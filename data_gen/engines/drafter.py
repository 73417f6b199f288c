"""A draft model beside an engine, for its plug-ins: greedy chains for several requests at once.

It keeps nothing between steps: each step begins with one forward pass over the newest tokens of every request that
drafts, a window of them, so a request may be paused, moved or dropped unseen. The draft's positions begin with the
window, which only models with absolute positions notice.

Legend: B requests that draft, W tokens of the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from data_gen.models.pair import ModelPair

WINDOW = 32  # tokens


class WindowDrafter:
    """Drafts the most probable tokens after the last `window` tokens of each request."""

    def __init__(self, model: PreTrainedModel, window: int = WINDOW) -> None:
        self.model, self.window = model, window

    @classmethod
    def load(cls, draft: str, target: str, device: str = "cpu", dtype: str = "float32") -> WindowDrafter:
        """The draft of a pair, whose names and InputErrors are those of `ModelPair.load`. The target is loaded, too, as
        a distilled draft has its tables, and is let go."""
        return cls(ModelPair.load(target, draft, device, dtype).draft)

    @torch.inference_mode()
    def chains(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Chains of so many tokens after some texts of token ids; none for a length of 0."""
        found: list[list[int]] = [[] for _ in texts]
        rows = sorted((row for row, length in enumerate(lengths) if length > 0), key=lambda row: -lengths[row])
        if not rows:
            return found
        device, cache = self.model.device, DynamicCache()
        newest = [list(texts[row][-self.window :]) for row in rows]
        width = max(map(len, newest))
        fed_BW = torch.tensor([[0] * (width - len(own)) + own for own in newest], device=device)
        seen_BW = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in newest], device=device)
        while rows:
            places_BW = (seen_BW.cumsum(-1) - 1).clamp(min=0)[:, -fed_BW.shape[1] :]
            given = {"attention_mask": seen_BW, "position_ids": places_BW, "past_key_values": cache}
            logits_BV = self.model(fed_BW, **given, use_cache=True, logits_to_keep=1).logits[:, -1]
            for row, token in zip(rows, logits_BV.argmax(-1).tolist(), strict=True):
                found[row].append(token)
            going = sum(len(found[row]) < lengths[row] for row in rows)  # the longest chains are first
            if going < len(rows):
                rows, seen_BW = rows[:going], seen_BW[:going]
                cache.batch_select_indices(torch.arange(going, device=device))
            fed_BW = torch.tensor([[found[row][-1]] for row in rows], device=device)
            seen_BW = torch.cat([seen_BW, torch.ones_like(seen_BW[:, :1])], dim=-1)
        return found
