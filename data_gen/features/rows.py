"""Features of the models' rows along a text: while it is decoded, and of a finished one from the numbers in its trace.

Legend: N tokens, V vocabulary, R roots, F scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_gen.drafting.lookup import LookupIndex, copied
from data_gen.features.text import RunningMeans, TextHistory
from data_gen.models.sampling import Sampling
from selector.schema import DECAYS, LONGEST_LOOKUP, LONGEST_MATCH, PAIR, SOURCE_LENGTHS

if TYPE_CHECKING:  # engines have no transformers
    from data_gen.models.pair import ModelRows

ROW_NUMBERS = ("target_entropy", "draft_entropy", "target_prob", "draft_prob")  # of a root, as traces hold them
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


def row_numbers(target: ModelRows, draft: ModelRows, next_tokens: Sequence[int]) -> dict[str, list[float]]:
    """The `ROW_NUMBERS` of some consecutive rows: both models' entropies at temperature 1, in nats, and the
    probabilities that they give to the next tokens, of which the last one may be missing."""
    next_N1 = torch.tensor(next_tokens, dtype=torch.int64, device=target.probs_NV.device).unsqueeze(-1)
    probs = [model.probs_NV[: len(next_N1)].gather(-1, next_N1)[:, 0].tolist() for model in (target, draft)]
    found = entropies(target.logits_NV), entropies(draft.logits_NV), *probs
    return dict(zip(ROW_NUMBERS, found, strict=True))


def scalars_along(
    tokens: Sequence[int], start: int, sampling: Sampling, numbers: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """The scalars of `schema.PAIR` at the roots of a text, float32 [R, F]; zeros at the first one.

    Args:
        start: the position of the first root, the last prompt token.
        numbers: by name of `ROW_NUMBERS`, of each root, [R]. The last root's probabilities are not read.
    """
    of_target, of_draft, p, q = (numbers[name].tolist() for name in ROW_NUMBERS)
    found_RF = np.zeros((len(of_target), len(PAIR.scalars)), np.float32)
    text, draft = TextHistory(tokens[: start + 1]), DraftHistory()
    target = TargetHistory(text)
    draft.add([], [], of_draft[:1])
    for root in range(1, len(of_target)):
        text.add([tokens[start + root]])
        target.add([of_target[root - 1]])
        draft.add([p[root - 1]], [q[root - 1]], [of_draft[root]])
        found_RF[root] = target.scalars(sampling) + draft.scalars()
    return found_RF


def foretold(tokens: Sequence[int], start: int, roots: int, most: int) -> torch.Tensor:
    """How many tokens of a lookup are right, at most `most`, at each root of a text from `start` on; uint8 [roots]."""
    index = LookupIndex(tokens[: start + 1])
    right = []
    for at in range(start + 1, start + 1 + roots):
        right.append(index.agreement(tokens[at : at + most]))
        index.extend(tokens[at : at + 1])
    return torch.tensor(right, dtype=torch.uint8)
