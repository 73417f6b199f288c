"""What the models' rows along a text say at a root: the target's, and the draft's.

Legend: N tokens, F scalars, D decays of running means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.features.runs import Numbers, averaged
from data_gen.features.source import source_entropies
from data_gen.features.text import TextHistory
from selector.schema import DECAYS, LONGEST_MATCH, SOURCE_LENGTHS, TARGET_SCALARS

Array = NDArray[Any]
_DECAYS_D, _SOURCES = np.array(DECAYS), np.array(SOURCE_LENGTHS)
USUAL = DECAYS.index(0.8)  # the running mean that stands for entropies that are not known


class TargetHistory:
    """What the target's rows along the text say, from the last prompt token on."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._entropies = Numbers()  # of the target before each token after the prompt
        self._sums_2D, self._done = np.zeros((2, len(DECAYS))), 0

    def add(self, entropies: Sequence[float]) -> None:
        """More committed tokens: the target's entropy before each."""
        self._entropies.add(entropies)

    def scalars(self) -> Array:
        """The target's scalars at the newest token, float64 [F]. At least one token has been added."""
        found_F, entropies_N = np.empty(len(TARGET_SCALARS)), self._entropies.array_N
        means_D = averaged(self._sums_2D, _DECAYS_D, entropies_N[self._done :])
        self._done = len(entropies_N)
        found_F[0], found_F[1 : 1 + len(means_D)] = entropies_N[-1], means_D
        place = self.text.start, self.text.index.source, 1 + len(means_D)
        source_entropies(found_F, entropies_N, place, _SOURCES, means_D[USUAL])
        return found_F


class DraftHistory:
    """What the draft's rows along the text say, from the last prompt token on."""

    def __init__(self) -> None:
        self._sums_2D = np.zeros((2, 2, len(DECAYS)))
        self._means: list[float] = []
        self._agreed = 0
        self._newest_entropy = 0.0

    def add(self, accepted: Sequence[float], draft_entropies: Sequence[float]) -> None:
        """More committed tokens: what the rows before each say, `min(1, q/p)` of it and the draft's entropy."""
        pairs = zip(self._sums_2D, (accepted, draft_entropies), strict=True)
        means = [averaged(sums_2D, _DECAYS_D, np.array(values)) for sums_2D, values in pairs]
        self._means = np.concatenate(means).tolist()
        for share in accepted:
            self._agreed = self._agreed + 1 if share >= 1 else 0
        self._newest_entropy = draft_entropies[-1]

    def scalars(self, draft_entropy_root: float) -> list[float]:
        """The scalars that the draft is needed for, at the newest token."""
        return [self._newest_entropy, draft_entropy_root, *self._means, min(self._agreed, LONGEST_MATCH)]
