"""Features of the models' rows along a text: entropies, and the histories of the target's and the draft's rows.

Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from data_gen.drafting.lookup import copied
from data_gen.features.text import RunningMeans, TextHistory
from data_gen.models.sampling import Sampling
from selector.schema import DECAYS, LONGEST_LOOKUP, LONGEST_MATCH, SOURCE_LENGTHS

LEAST_LOGIT = -1e4  # replaces minus infinity, the logit of a masked token, whose probability is 0
USUAL = DECAYS.index(0.8)  # of the running means, replaces unknown entropies


def entropies(logits_NV: Tensor) -> list[float]:
    """The entropy of each row at temperature 1, in nats."""
    below_NV = logits_NV.float().clamp(min=LEAST_LOGIT)
    below_NV = below_NV - below_NV.amax(-1, keepdim=True)
    shares_NV = below_NV.exp()
    total_N = shares_NV.sum(-1)
    found: list[float] = (total_N.log() - (shares_NV * below_NV).sum(-1) / total_N).tolist()
    return found


class TargetHistory:
    """The target's rows along the text, from the last prompt token on."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._entropies = [0.0] * text.start  # before each token; the prompt's are not known
        self._known = [0] * text.start
        self._means = RunningMeans()

    def add(self, entropies: Sequence[float]) -> None:
        """Add the target's entropy before each new committed token."""
        for entropy in entropies:
            self._entropies.append(entropy)
            self._known.append(1)
            self._means.add(entropy)

    def scalars(self, sampling: Sampling, batch: int = 1) -> list[float]:
        """The early scalars at the newest token, which are the text's and then the target's; arguments as those of
        `TextHistory.scalars`. At least one token must have been added."""
        means, source = self._means.values(), self.text.index.source
        there = copied(self._entropies, source, LONGEST_LOOKUP)
        known = copied(self._known, source, LONGEST_LOOKUP)
        of_source = [
            sum(there[:length]) / count if (count := sum(known[:length])) else means[USUAL] for length in SOURCE_LENGTHS
        ]
        of_text, share = self.text.scalars(sampling, batch), sum(known[: SOURCE_LENGTHS[-1]]) / LONGEST_LOOKUP
        return [*of_text, self._entropies[-1], *means, *of_source, share]


class DraftHistory:
    """The draft's rows along the text, from the last prompt token on."""

    def __init__(self) -> None:
        self._entropies: list[float] = []  # before each token, and after the newest one
        self._accepted, self._means = RunningMeans(), RunningMeans()
        self._count = self._agreed = 0  # tokens; the latest ones in a row with q >= p

    @property
    def knows_root(self) -> bool:
        return len(self._entropies) > self._count

    def add(self, p: Sequence[float], q: Sequence[float], entropies: Sequence[float]) -> None:
        """Add, for each new committed token, its probabilities by the target and by the draft, and the draft's entropy
        before it; finally the entropy after the newest one."""
        self._entropies += entropies
        for of_target, of_draft in zip(p, q, strict=True):
            agreed = of_draft >= of_target
            self._accepted.add(1.0 if agreed else of_draft / of_target)
            self._means.add(self._entropies[self._count])
            self._agreed = self._agreed + 1 if agreed else 0
            self._count += 1

    def scalars(self) -> list[float]:
        """The draft's scalars at the newest token, in the order of `DRAFT_SCALARS`."""
        before, after = self._entropies[self._count - 1 : self._count + 1]
        means = *self._accepted.values(), *self._means.values()
        return [before, after, *means, min(self._agreed, LONGEST_MATCH)]
