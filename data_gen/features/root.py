"""The features at a root, before anything is drafted; `selector.schema` has their names and meanings.

They depend on the committed text and both models' rows along it, so decoding and one teacher-forced pass over the
finished text give the same numbers. *Early* features need the target's rows alone. For the others the draft first
passes the committed tokens that it has not seen, at least the root token.

Legend: F scalars, J keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_gen.features.rows import DraftHistory, TargetHistory, entropies
from data_gen.features.text import HitHistory, TextHistory
from data_gen.models.sampling import Sampling
from selector.runtime.tokens import TokenStatistics
from selector.schema import EARLY, FULL, HIDDEN_STATES, LIGHT, LOG, MATCH, SCALARS_KEY, TOKEN_SCALARS

if TYPE_CHECKING:  # engines that have no transformers use the features of token ids
    from data_gen.models.pair import ModelRow, ModelRows

BLOCK = 64  # whole rows of the draft that are kept at once


class Accepted:
    """The target's rows at a step's root and accepted nodes, read only when a history needs them: entropies after the
    nodes, probabilities of the tokens that follow them, and the last hidden state."""

    def __init__(self, rows: ModelRows, nodes: Sequence[int]) -> None:
        self._rows, self._nodes = rows, list(nodes)

    def entropies(self) -> list[float]:
        return entropies(self._rows.logits_NV[self._nodes])

    def of_next(self, tokens: Sequence[int]) -> list[float]:
        found: list[float] = self._rows.probs_NV[self._nodes, list(tokens)].tolist()
        return found

    def hidden_D(self) -> Tensor:
        return self._rows.hidden_ND[self._nodes[-1]]


class RootKnowledge:
    """The features at a decoder's roots, updated step by step. The prompt's last token is the first root, the sampling
    is the target's, and the levels that are needed are of `schema.FEATURES`, or the match."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, feature_levels: Sequence[str]) -> None:
        self.sampling = sampling
        self._match_alone, self.needs_draft = set(feature_levels) <= {MATCH}, bool({LIGHT, FULL} & set(feature_levels))
        self.text, self._of_draft = TextHistory(prompt), DraftHistory()
        self._of_target = TargetHistory(self.text)
        self._step: Accepted | None = None  # the last one
        self._following: list[int] = []  # the last step's tokens that are not in the histories yet
        self._next: list[int] = []  # the tokens that the draft's history lacks
        self._p: list[float] = []  # their probabilities
        self._draft: list[ModelRow] = []  # the draft before each of them, and after the root token
        self._early: list[float] = []  # scalars at the root, once they are computed

    def keep_match_alone(self) -> None:
        """From now on give the match alone, which takes less time."""
        self._match_alone, self.needs_draft = True, False
        self._next, self._p, self._draft = [], [], []

    def committed(self, step: Accepted, tokens: Sequence[int]) -> None:
        """Add a step's tokens, which follow its root and its accepted nodes."""
        self._digest()
        self._step, self._following, self._early = step, list(tokens), []

    def passed(self, draft: Iterable[ModelRow]) -> None:
        """Add the draft's rows after further tokens. Where many wait for a decision, the older ones are digested."""
        if self.needs_draft:
            if len(self._draft) >= BLOCK:
                self._digest()
                self._digest_draft()
            self._draft += draft

    def features(self, level: str) -> dict[str, Tensor] | None:
        """The features of a level at the root; None at the first root. `light` and `full` need the draft's row."""
        if self._step is None:
            return None
        self._digest()
        if level == MATCH:
            return {MATCH: torch.tensor(float(self.text.index.match))}
        self._early = self._early or self._of_target.scalars(self.sampling)
        if level == EARLY:
            return {SCALARS_KEY: torch.tensor(self._early, dtype=torch.float32)}
        states = [row.hidden_D for row in self._draft[-2:]]
        self._digest_draft()
        scalars = self._early + self._of_draft.scalars()
        result = {SCALARS_KEY: torch.tensor(scalars, dtype=torch.float32)}
        if level == FULL:
            states.insert(0, self._step.hidden_D())
            result |= {name: state.float().cpu() for name, state in zip(HIDDEN_STATES, states, strict=True)}
        return result

    def _digest_draft(self) -> None:
        """Add the draft's rows to its history; the last one stays, because its next token is not known."""
        fresh = self._draft[1:] if self._of_draft.knows_root else self._draft
        count = len(self._draft) - 1
        q = [float(row.probs_V[token]) for row, token in zip(self._draft[:-1], self._next[:count], strict=True)]
        self._of_draft.add(self._p[:count], q, entropies(torch.stack([row.logits_V for row in fresh])))
        self._next, self._p, self._draft = self._next[count:], self._p[count:], self._draft[-1:]

    def _digest(self) -> None:
        if self._step is None or not self._following:
            return
        self.text.add(self._following)
        if not self._match_alone:
            self._of_target.add(self._step.entropies())
        if self.needs_draft:
            self._next += self._following
            self._p += self._step.of_next(self._following)
        self._following = []


class DrafterKnowledge:
    """The features at the roots of an engine that has its own drafter, updated step by step.

    `text` features need only token ids. `drafter` features also need, for every committed token, whether the drafter's
    first token there was the text's. The prompt's last token is the first root, `tokens` are `Selector.tokens`, and
    `batch` requests are decoded together.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, tokens: TokenStatistics, batch: int = 1) -> None:
        self.sampling, self.batch, self.tokens = sampling, batch, tokens
        self.text = TextHistory(prompt)
        self._of_drafter = HitHistory(self.text)

    def committed(self, tokens: Sequence[int], hits: Sequence[float] = ()) -> None:
        """Add tokens of the text and, for `drafter` features, whether the drafter predicted each, 1 or 0."""
        self.text.add(tokens)
        self._of_drafter.add(hits)

    def scalars(self, level: str) -> NDArray[np.float32]:
        """The scalars of a level of `schema.LOG` at the newest token, float32 [F]."""
        of_text = self.text.scalars(self.sampling, self.batch)
        by_key = self.tokens.of(self.keys()).tolist()
        known = of_text + by_key[: len(TOKEN_SCALARS)]
        if level == LOG.levels[1]:
            known += self._of_drafter.scalars() + by_key[len(TOKEN_SCALARS) :]
        return np.array(known, np.float32)

    def keys(self) -> NDArray[np.int64]:
        """The keys that group training roots, int64 [J]; the last one also depends on the drafter's hits."""
        return np.array([*self.text.keys(), self._of_drafter.key])

    def features(self, level: str) -> dict[str, Tensor]:
        """The scalars as a selector's input."""
        return {SCALARS_KEY: torch.from_numpy(self.scalars(level))}
