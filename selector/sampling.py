"""The sampling setting: the target's, which determines the law of the text, and the draft's own
temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from selector.schema import InputError

# largest distances in temperature, top-p, 1 / top-k and min-p to a trained setting
FAR = 0.1, 0.05, 0.02, 0.02


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `top_p` 1, `top_k` 0 and `min_p` 0 keep the whole vocabulary. Raises
    InputError where a number is out of range."""

    temperature: float = 1.0  # 0 is greedy decoding
    # mass of the nucleus, the smallest set of most probable tokens that reaches it
    top_p: float = 1.0
    # the number of most probable tokens that are kept, with those that tie with the last of them
    top_k: int = 0
    # a kept token has at least this share of the most probable token's probability
    min_p: float = 0.0
    # None for the target's; it does not change the law of the text
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        draft_temperature = self.draft_temperature or 0.0
        valid_temperatures = 0 <= self.temperature < math.inf and 0 <= draft_temperature < math.inf
        if not (
            valid_temperatures
            and 0 < self.top_p <= 1
            and type(self.top_k) is int
            and self.top_k >= 0
            and 0 <= self.min_p <= 1
        ):
            raise InputError(f"{self}: no sampling setting")

    @property
    def draft(self) -> Sampling:
        """The setting of the draft's own distribution."""
        if self.draft_temperature is None:
            return self
        return replace(self, temperature=self.draft_temperature, draft_temperature=None)

    @property
    def law(self) -> Sampling:
        """The part that determines the law of the text."""
        return replace(self, draft_temperature=None)

    @property
    def cuts_nothing(self) -> bool:
        """Whether only the temperature changes probabilities."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0

    def covers(self, asked: Sampling) -> bool:
        """Whether what was learnt under this setting may decide under another one.

        Temperatures may differ by 0.1, top-p by 0.05, 1 / top-k (0 for the whole vocabulary) and
        min-p by 0.02: so a top-k from 50 on counts as none. At temperature 0 the other three change
        nothing. Farther away, drafted tokens are accepted at rates that the network has not seen.
        The distances are a judgement, not a fit.
        """
        differences = zip(self._coordinates, asked._coordinates, FAR, strict=True)
        near = [abs(trained - other) <= far + 1e-6 for trained, other, far in differences]
        if asked.temperature == 0:
            return near[0]
        return all(near)

    @property
    def _coordinates(self) -> tuple[float, float, float, float]:
        inverse_top_k = 1 / self.top_k if self.top_k else 0.0
        return self.temperature, self.top_p, inverse_top_k, self.min_p

    def __str__(self) -> str:
        parts = [f"T={self.temperature:g}"]
        if self.top_k:
            parts.append(f"top-k={self.top_k}")
        if self.top_p != 1:
            parts.append(f"top-p={self.top_p:g}")
        if self.min_p:
            parts.append(f"min-p={self.min_p:g}")
        if self.draft_temperature is not None:
            parts.append(f"draft T={self.draft_temperature:g}")
        return ", ".join(parts)
