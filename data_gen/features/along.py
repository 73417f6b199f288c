"""The features of a finished text, computed from the numbers that its trace holds.

Legend: R roots, F scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from data_gen.drafting.lookup import LookupIndex
from data_gen.features.rows import DraftHistory, TargetHistory, entropies
from data_gen.features.text import TextHistory
from data_gen.models.pair import ModelRows
from data_gen.models.sampling import Sampling
from selector.schema import PAIR

ROW_NUMBERS = ("target_entropy", "draft_entropy", "target_prob", "draft_prob")  # of a root, as traces hold them


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
