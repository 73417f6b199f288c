"""From logits to the distribution that is really sampled: temperature, then nucleus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy decoding; `top_p` 1 keeps the whole vocabulary.

    `draft_temperature` is the draft's own, None for the target's. It moves block efficiency, never the law of the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    draft_temperature: float | None = None

    @property
    def draft(self) -> Sampling:
        """What the draft is sampled with."""
        return self if self.draft_temperature is None else Sampling(self.draft_temperature, self.top_p)

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Distributions of the rows [..., V] of logits, on their device; float64 for float64 logits, else float32.

        The nucleus is the smallest set of most probable tokens whose mass reaches `top_p`.
        """
        dtype = torch.promote_types(logits_V.dtype, torch.float32)
        if self.temperature == 0:
            best = logits_V.argmax(-1, keepdim=True)
            return torch.zeros_like(logits_V, dtype=dtype).scatter_(-1, best, 1.0)
        probs_V = (logits_V.to(dtype) / self.temperature if self.temperature != 1 else logits_V).softmax(-1, dtype)
        if self.top_p < 1:
            sorted_V, order_V = probs_V.sort(dim=-1, descending=True, stable=True)
            before_V = sorted_V.cumsum(-1, dtype=torch.float64) - sorted_V
            kept_V = torch.where(before_V < self.top_p, sorted_V, 0.0)
            probs_V = torch.zeros_like(probs_V).scatter_(-1, order_V, kept_V / kept_V.sum(-1, keepdim=True))
        return probs_V

    def after(self, texts: Callable[[], list[list[int]]], logits_NV: Tensor) -> Tensor:
        """Distributions after some texts, [N, V], from the logits there: here they follow from the logits alone.

        Args:
            texts: gives the tokens up to and including each place; asked only where the distribution depends on them.
        """
        return self.probabilities(logits_NV)

    def __str__(self) -> str:
        nucleus = f", top-p={self.top_p:g}" if self.top_p < 1 else ""
        draft = "" if self.draft_temperature is None else f", draft T={self.draft_temperature:g}"
        return f"T={self.temperature:g}{nucleus}{draft}"
