"""What a selector may know at a root, before anything is drafted. Names and meanings in `selector.schema`.

Everything follows from the committed text and the two models' rows along it, so that a decoder at a root and one
teacher-forced pass over the finished text give the same numbers. A row of the draft exists once the draft has passed
its token: not yet after a full acceptance, nor after steps without drafting. Before each decision the draft passes what
it has not seen, the root token at least, so that all its rows are there.

Legend: N consecutive tokens, V vocabulary, D hidden width, F scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_gen.lookup import LongestMatch
from data_gen.sampling import Sampling
from selector.schema import DECAYS, HIDDEN_STATES, LONGEST_MATCH, SCALAR_NAMES, SCALARS_KEY

LEAST_LOGIT = -1e4  # a masked token's logit is minus infinity, its probability 0


class ModelRows(NamedTuple):
    """One model after some consecutive tokens; `probs_NV` are what is sampled from."""

    probs_NV: Tensor
    logits_NV: Tensor
    hidden_ND: Tensor


class ModelRow(NamedTuple):
    """One model after one token."""

    probs_V: Tensor
    logits_V: Tensor
    hidden_D: Tensor


def entropies(logits_NV: Tensor) -> list[float]:
    """Of each row at temperature 1, in nats."""
    logits_NV = logits_NV.float().clamp(min=LEAST_LOGIT)
    return cross_entropy(logits_NV, logits_NV.softmax(-1), reduction="none").tolist()  # of a distribution with itself


def agreements(target_probs_NV: Tensor, draft_probs_NV: Tensor, next_N: Tensor) -> list[float]:
    """After each of some tokens `min(1, q/p)` of the text's next one."""
    p_N, q_N = (rows_NV.gather(-1, next_N.unsqueeze(-1))[:, 0] for rows_NV in (target_probs_NV, draft_probs_NV))
    return (q_N / p_N).clamp(max=1).tolist()


class History:
    """Running means over the committed text, from its last prompt token on.

    Args:
        prompt: token ids; they count for repeats alone.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._sums = [(0.0, 0.0, 0.0)] * len(DECAYS)  # of accepted shares, the draft's entropies, and weights
        self._match = LongestMatch(prompt)
        self._agreed = 0
        self._newest_entropy = 0.0

    def add(self, tokens: Sequence[int], accepted: Sequence[float], draft_entropies: Sequence[float]) -> None:
        """More committed tokens, and what the rows before each say: `min(1, q/p)` of it, and the draft's entropy."""
        # plain numbers: so few of them take less time than a call of NumPy
        for number, decay in enumerate(DECAYS):
            shares, entropies_, weights = self._sums[number]
            for share, entropy in zip(accepted, draft_entropies, strict=True):
                shares, entropies_, weights = decay * shares + share, decay * entropies_ + entropy, decay * weights + 1
            self._sums[number] = shares, entropies_, weights
        for token, share in zip(tokens, accepted, strict=True):
            self._match.add(token)
            self._agreed = self._agreed + 1 if share >= 1 else 0
        self._newest_entropy = draft_entropies[-1]

    def scalars(self, target_entropy_prev: float, draft_entropy_root: float, length: int, sampling: Sampling) -> Tensor:
        """The scalars of the schema at the newest token, float32 [F]. At least one token has been added."""
        return torch.tensor(
            [
                target_entropy_prev,
                self._newest_entropy,
                draft_entropy_root,
                *(shares / weights for shares, _, weights in self._sums),
                *(entropies_ / weights for _, entropies_, weights in self._sums),
                min(self._agreed, LONGEST_MATCH),
                min(self._match.length, LONGEST_MATCH),
                length,
                sampling.temperature,
                sampling.top_p,
            ]
        )


class RootKnowledge:
    """What a decoder knows at its roots, kept up to date step by step.

    Args:
        prompt: token ids; the last one is the first root.
        sampling: the target's.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self.history, self.sampling = History(prompt), sampling
        self._steps: list[tuple[ModelRows, Sequence[int]]] = []  # target rows after the tokens that the history lacks
        self._draft: list[ModelRow] = []  # the draft's after these tokens, and after the root token
        self._next: list[int] = []  # the tokens that follow them
        self._root_entropy: float | None = None  # of the draft after the first of its rows, once it is known

    def committed(self, target: ModelRows, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """A step has ended: the target's rows, which of them are the root's and the accepted nodes', and the
        tokens that follow each."""
        self._steps.append((target, nodes))
        self._next += tokens

    def passed(self, draft: Iterable[ModelRow]) -> None:
        """The draft's rows after further committed tokens."""
        self._draft += draft

    def features(self, length: int, full: bool) -> dict[str, Tensor] | None:
        """The features at the root, once the draft has passed it; None at the first root.

        Args:
            length: committed tokens, the root token included.
            full: with hidden states.
        """
        if not self._steps:
            return None
        target, nodes = self._steps[-1]
        new = self._draft[self._root_entropy is not None :]
        found = entropies(torch.stack([*(row.logits_V for row in new), target.logits_NV[nodes[-1]]]))
        draft_entropies = [*([] if self._root_entropy is None else [self._root_entropy]), *found[:-1]]
        self.history.add(self._next, self._agreements(), draft_entropies[:-1])
        result = {SCALARS_KEY: self.history.scalars(found[-1], draft_entropies[-1], length, self.sampling)}
        if full:
            states = target.hidden_ND[nodes[-1]], self._draft[-2].hidden_D, self._draft[-1].hidden_D
            result |= {name: state.float().cpu() for name, state in zip(HIDDEN_STATES, states, strict=True)}
        self._steps, self._next = [], []
        self._draft, self._root_entropy = self._draft[-1:], draft_entropies[-1]
        return result

    def _agreements(self) -> list[float]:
        """Of the tokens that the history lacks."""
        draft = self._draft[: len(self._next)]
        if draft[0].probs_V.is_cuda:
            target_NV = torch.cat([rows.probs_NV[list(nodes)] for rows, nodes in self._steps])
            next_N = torch.tensor(self._next, device=target_NV.device)
            return agreements(target_NV, torch.stack([row.probs_V for row in draft]), next_N)
        # on the CPU single numbers are cheaper than any call of torch
        next_ = iter(self._next)
        p = [
            probs_NV.item(node, next(next_))
            for probs_NV, nodes in ((rows.probs_NV.numpy(), nodes) for rows, nodes in self._steps)
            for node in nodes
        ]
        q = [row.probs_V.numpy().item(token) for row, token in zip(draft, self._next, strict=True)]
        return [min(1.0, of_draft / of_target) for of_draft, of_target in zip(q, p, strict=True)]


class TextKnowledge:
    """The same along a finished text, from blocks of rows in the order of the text.

    Args:
        tokens: of the whole text.
        start: the first root, the last prompt token.
    """

    def __init__(self, tokens: Sequence[int], start: int, sampling: Sampling) -> None:
        self.tokens, self.start, self.sampling = tokens, start, sampling
        self._target_entropies: list[float] = []
        self._draft_entropies: list[float] = []
        self._accepted: list[float] = []

    @property
    def seen(self) -> int:
        """Rows so far."""
        return len(self._target_entropies)

    def add(self, target: ModelRows, draft: ModelRows) -> None:
        """The rows after the next tokens from `start` on."""
        begin = self.start + self.seen
        self._target_entropies += entropies(target.logits_NV)
        self._draft_entropies += entropies(draft.logits_NV)
        following_N = torch.tensor(self.tokens[begin + 1 : begin + 1 + len(target.probs_NV)], dtype=torch.int64)
        N = len(following_N)
        following_N = following_N.to(target.probs_NV.device)
        self._accepted += agreements(target.probs_NV[:N], draft.probs_NV[:N], following_N)

    def scalars(self, roots: int) -> Tensor:
        """The scalars of the schema at the first so many roots, float32 [roots, F]; zeros at the very first."""
        history = History(self.tokens[: self.start + 1])
        rows = [torch.zeros(len(SCALAR_NAMES))]
        for n in range(1, roots):
            one = slice(n - 1, n)
            known = self._accepted[one], self._draft_entropies[one]
            history.add(self.tokens[self.start + n : self.start + n + 1], *known)
            length = self.start + n + 1
            rows.append(history.scalars(self._target_entropies[n - 1], self._draft_entropies[n], length, self.sampling))
        return torch.stack(rows)
