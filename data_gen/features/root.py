"""The features at a root, before anything is drafted; `selector.schema` has their names and
meanings.

They depend on the committed text and both models' distributions along it, so decoding and the trace
of a finished text give the same. *Early* features need the token ids alone. The others also need
the draft's forward pass over the committed tokens that its KV cache lacks, at least the root.

Legend: F scalars, J keys, N tokens, V vocabulary, R roots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_gen.features.text import HitHistory, RunningMeans, TextHistory, TextState, TextStates
from data_gen.models.rows import ModelRow, ModelRows
from data_gen.models.sampling import Sampling
from selector import schema
from selector.files import Array
from selector.runtime.tokens import TokenStatistics

BLOCK = 64  # distributions of the draft that are kept at once
# of a root, as traces hold them
ROW_NUMBERS = ("draft_entropy", "target_prob", "draft_prob")
LEAST_LOGIT = -1e4  # replaces minus infinity, the logit of a masked token, whose probability is 0


def entropies(logits_NV: Tensor) -> list[float]:
    """The entropies of N distributions at temperature 1, in nats."""
    below_NV = logits_NV.float().clamp(min=LEAST_LOGIT)
    below_NV = below_NV - below_NV.amax(-1, keepdim=True)
    shares_NV = below_NV.exp()
    total_N = shares_NV.sum(-1)
    nats: list[float] = (total_N.log() - (shares_NV * below_NV).sum(-1) / total_N).tolist()
    return nats


class DraftHistory:
    """The draft's entropies and acceptance along the text, from the last prompt token on."""

    def __init__(self) -> None:
        self._entropies: list[float] = []  # before each token, and after the newest one
        self._accepted = RunningMeans()
        self._means = RunningMeans()
        self._count = 0  # tokens
        self._agreed = 0  # the latest ones in a row with q >= p

    @property
    def knows_root(self) -> bool:
        return len(self._entropies) > self._count

    def add(self, p: Sequence[float], q: Sequence[float], entropies: Sequence[float]) -> None:
        """Add, for each new committed token, its probabilities by the target and by the draft, and
        the draft's entropy before it; finally the entropy after the newest one."""
        self._entropies += entropies
        for of_target, of_draft in zip(p, q, strict=True):
            if of_draft >= of_target:
                self._accepted.add(1.0)
                self._agreed += 1
            else:
                self._accepted.add(of_draft / of_target)
                self._agreed = 0
            self._means.add(self._entropies[self._count])
            self._count += 1

    def scalars(self) -> list[float]:
        """The draft's scalars at the newest token, in the order of `DRAFT_SCALARS`."""
        before, after = self._entropies[self._count - 1 : self._count + 1]
        return [
            before,
            after,
            *self._accepted.values(),
            *self._means.values(),
            min(self._agreed, schema.LONGEST_MATCH),
        ]


def row_numbers(
    target: ModelRows, draft: ModelRows, next_tokens: Sequence[int]
) -> dict[str, list[float]]:
    """The `ROW_NUMBERS` after some consecutive tokens: the draft's entropies at temperature 1, in
    nats, and the probabilities that both models give to the next tokens, of which the last one may
    be missing."""
    next_N = torch.tensor(next_tokens, dtype=torch.int64, device=target.probs_NV.device)
    numbers = (
        entropies(draft.logits_NV),
        _probs_of(target, next_N),
        _probs_of(draft, next_N),
    )
    return dict(zip(ROW_NUMBERS, numbers, strict=True))


def _probs_of(model: ModelRows, next_N: Tensor) -> list[float]:
    probs_N1 = model.probs_NV[: len(next_N)].gather(-1, next_N.unsqueeze(-1))
    probs: list[float] = probs_N1[:, 0].tolist()
    return probs


def scalars_along(
    tokens: Sequence[int],
    start: int,
    sampling: Sampling,
    numbers: Mapping[str, NDArray[np.float32]],
) -> NDArray[np.float32]:
    """The scalars of `schema.PAIR` at the roots of a text, float32 [R, F]; zeros at the first one,
    the last prompt token, which is at `start`. `numbers` are the `ROW_NUMBERS` of each root, [R];
    the last probabilities are unread."""
    of_draft, p, q = (numbers[name].tolist() for name in ROW_NUMBERS)
    scalars_RF = np.zeros((len(of_draft), len(schema.PAIR.scalars)), np.float32)
    text = TextHistory(tokens[: start + 1])
    draft = DraftHistory()
    draft.add([], [], of_draft[:1])
    states: list[TextState] = []
    draft_scalars: list[list[float]] = []
    for root in range(1, len(of_draft)):
        text.index.extend([tokens[start + root]])
        draft.add([p[root - 1]], [q[root - 1]], [of_draft[root]])
        states.append(text.state(sampling))
        draft_scalars.append(draft.scalars())
    if states:
        first = schema.PAIR.first
        scalars_RF[1:, :first] = TextStates(states).scalars()
        scalars_RF[1:, first:] = draft_scalars
    return scalars_RF


class RootKnowledge:
    """The features at a decoder's roots, updated step by step.

    Args:
        prompt: token ids, of which the last one is the first root.
        sampling: the target's.
        feature_levels: those that will be asked for: of `schema.FEATURES`, or the match.
    """

    def __init__(
        self, prompt: Sequence[int], sampling: Sampling, feature_levels: Sequence[str]
    ) -> None:
        self.sampling = sampling
        self.needs_draft = bool({schema.LIGHT, schema.FULL} & set(feature_levels))
        self.text = TextHistory(prompt)
        self._of_draft = DraftHistory()
        # of the last step; its rows are read only where a history needs them
        self._target: ModelRows | None = None
        self._nodes: list[int] = []
        self._following: list[int] = []  # the last step's tokens that are not in the histories yet
        self._next: list[int] = []  # the tokens that the draft's history lacks
        self._p: list[float] = []  # their probabilities
        # the draft's outputs before each of them, and after the root
        self._draft: list[ModelRow] = []
        self._early: Tensor | None = None  # scalars at the root, once they are computed

    def keep_match_alone(self) -> None:
        """From now on give the match alone, which takes less time."""
        self.needs_draft = False
        self._next = []
        self._p = []
        self._draft = []

    def committed(self, target: ModelRows, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a step: the target's outputs, the places in them of the root and of the accepted
        nodes, and the token that follows each."""
        self._update_histories()
        self._target = target
        self._nodes = list(nodes)
        self._following = list(tokens)
        self._early = None

    def passed(self, draft: Iterable[ModelRow]) -> None:
        """Add the draft's outputs after further tokens. The oldest go to the history where many
        wait for a decision."""
        if self.needs_draft:
            if len(self._draft) >= BLOCK:
                self._update_histories()
                self._update_draft_history()
            self._draft += draft

    def features(self, level: str) -> dict[str, Tensor] | None:
        """The features of a level at the root, as its schema says: `scalars`, float32 [F], and of
        `full` the hidden states, float32 [D]; None at the first root. `light` and `full` need what
        `passed` adds."""
        if self._target is None:
            return None
        self._update_histories()
        if level == schema.MATCH:
            return {schema.MATCH: torch.tensor(float(self.text.index.match))}
        if self._early is None:
            (scalars_F,) = TextStates([self.text.state(self.sampling)]).scalars()
            self._early = torch.from_numpy(scalars_F.astype(np.float32))
        if level == schema.EARLY:
            return {schema.SCALARS_KEY: self._early}
        states = [row.hidden_D for row in self._draft[-2:]]
        self._update_draft_history()
        of_draft = torch.tensor(self._of_draft.scalars(), dtype=torch.float32)
        result = {schema.SCALARS_KEY: torch.cat([self._early, of_draft])}
        if level == schema.FULL:
            states.insert(0, self._target.hidden_ND[self._nodes[-1]])
            for name, state in zip(schema.HIDDEN_STATES, states, strict=True):
                result[name] = state.float().cpu()
        return result

    def _update_draft_history(self) -> None:
        # the last output stays, because its next token is not known
        fresh = self._draft[1:] if self._of_draft.knows_root else self._draft
        count = len(self._draft) - 1
        q: list[float] = []
        for row, token in zip(self._draft[:-1], self._next[:count], strict=True):
            q.append(float(row.probs_V[token]))
        fresh_entropies = entropies(torch.stack([row.logits_V for row in fresh]))
        self._of_draft.add(self._p[:count], q, fresh_entropies)
        self._next = self._next[count:]
        self._p = self._p[count:]
        self._draft = self._draft[-1:]

    def _update_histories(self) -> None:
        if self._target is None or not self._following:
            return
        self.text.index.extend(self._following)
        if self.needs_draft:
            self._next += self._following
            self._p += self._target.probs_NV[self._nodes, self._following].tolist()
        self._following = []


class DrafterKnowledge:
    """The features at the roots of an engine that has its own drafter, updated step by step.

    Args:
        prompt: token ids, of which the last one is the first root.
        tokens: `Selector.tokens`.
        batch: requests that are decoded together.
        start: the prompt's length where `prompt` is a part of it, and the rest is `committed`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        tokens: TokenStatistics,
        batch: int = 1,
        start: int | None = None,
    ) -> None:
        self.sampling = sampling
        self.batch = batch
        self.tokens = tokens
        self.text = TextHistory(prompt, start)
        self._of_drafter = HitHistory(self.text)

    def committed(self, tokens: Sequence[int], hits: Sequence[float] = ()) -> None:
        """Add tokens of the text and, for `drafter` features, whether the drafter predicted each, 1
        or 0."""
        self.text.index.extend(tokens)
        self._of_drafter.add(hits)

    def state(self) -> TextState:
        """What the `text` features at the newest token follow from."""
        return self.text.state(self.sampling, self.batch)

    def hits(self) -> list[float]:
        """The scalars of `DRAFTER_SCALARS` at the newest token."""
        return self._of_drafter.scalars()

    def features(self, level: str) -> dict[str, Tensor]:
        """The scalars as a selector's input; for the lookup rule the match alone, which takes less
        time."""
        return {name: values[0] for name, values in features_of([self], level).items()}


def features_of(requests: Sequence[DrafterKnowledge], level: str) -> dict[str, Tensor]:
    """`DrafterKnowledge.features` of requests that are decoded together, float32 [R, F], or of the
    match [R]."""
    if level == schema.MATCH:
        matches_R = np.array([request.text.index.match for request in requests], np.float32)
        return {schema.MATCH: torch.from_numpy(matches_R)}  # more quickly than by torch.tensor
    of_hits: list[list[float]] = []
    if level == schema.DRAFTER:
        of_hits = [request.hits() for request in requests]
    states = [request.state() for request in requests]
    scalars_RF, _ = scalars_and_keys(states, of_hits, requests[0].tokens)
    return {schema.SCALARS_KEY: torch.from_numpy(scalars_RF)}


def scalars_and_keys(
    states: Sequence[TextState], of_hits: Sequence[Sequence[float]], tokens: TokenStatistics
) -> tuple[NDArray[np.float32], Array]:
    """The scalars of `schema.LOG` at some roots, float32 [R, F], and their keys, int64 [R, J], from
    `DrafterKnowledge.state` and, but for `text` features, `DrafterKnowledge.hits`."""
    texts = TextStates(states)
    keys_RJ = texts.keys()
    parts = [texts.scalars(), tokens.of(keys_RJ)]
    if of_hits:
        parts.append(np.array(of_hits))
    return np.concatenate(parts, axis=1).astype(np.float32), keys_RJ
