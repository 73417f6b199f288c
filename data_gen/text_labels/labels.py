"""Labels along a text: what every tree would have yielded at every position, without drafting one.

The text follows the target's law, as a text of any lossless decoder does. At a *root* (one of its
positions) let a tree be drafted and verified. Of all outcomes, keep only those that lead to the
text that stands there. The probability of each accepted length, given the text, then depends only
on the two models' distributions along it:

    S_t = P(tau >= t | text) = E over the drafts [ P(draft) P(accepted down to depth t | draft) ] /
    P(text),

and `1 + sum_t S_t` has the mean `E[tau + 1]` over texts. With x the text's token at a depth, and p
and q the distributions before it:

*Chain* (`chains`). The draft must be x, which has probability q(x), where the text gave it p(x).
So a step multiplies by `q/p min(1, p/q) = min(1, q/p)` top-down; bottom-up (Block Verification)
S_t is the smallest of 1 and the running products of q/p. With p(x) = 0.5 and q(x) = 0.4, a chain of
one token would have been accepted with S_1 = 0.8.

*Branches* (`walks`). Walk down the text from the trunk's end, with k branches still on it (K at
first), R = 1, and w the entry weight that the trunk leaves:

    k = 1:  top-down   R <- R (q/p) min(1, p/q)
            bottom-up  R <- R q/p,   w <- min(1, w p/q)
    k > 1:  let one of the k next tokens, at a uniformly drawn place, be x; draw the other k - 1,
            its siblings, from q (`siblings`); m of the k are x
            R <- R k q(x) / (m p(x))
            top-down   R <- R P(the solver yields x)                                 (`acceptance`)
            bottom-up  R <- R prod (1 - entry weight) over the siblings visited before x,
                       w <- the entry weight of x
            k <- m
    S_t = R top-down,  R w bottom-up;  the mean over a few draws of siblings

Where every level branches, each of the m branches on the text has several children at the next
depth, and k is m times their number.

The factors are right together alone: `k q / (m p)` corrects the draw of siblings to the law of
drafts given the text, and what the verifier does with the list is given the list. Greedy branches
differ in their child lists. Trees of another style are labelled for the verifier that takes the
given one's place there (`data_gen.verification.styled`).

S_t of (K, L1, L2) does not depend on L2, so a row of survivals S (`ActionSpace.survivals`) is the
law of tau of all trees.

Legend: T tokens, R roots, V vocabulary, B tokens of a block, L trunk lengths, D depths, S
survivals, A actions, C cells, P branching positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, cast

import torch
from torch import Tensor

from data_gen.text_labels.acceptance import before_branches
from data_gen.text_labels.chains import (
    acceptances,
    entry_weights,
    running_products,
    tokens_ahead,
)
from data_gen.text_labels.siblings import Siblings
from data_gen.text_labels.walks import Branches
from data_gen.verification import get_verifier, styled
from data_gen.verification.base import BottomUp, TopDown
from data_gen.verification.distributions import divide, most_likely
from data_gen.verification.khisti import Khisti
from data_gen.verification.one_path import FirstPath
from data_gen.verification.ranking import SortedRows
from selector.actions import GREEDY, IID, Action, ActionSpace, Grid

ELEMENTS = 1 << 22  # probabilities of one model that are sorted at once


def label_text(
    tokens_T: Tensor,
    target_probs_TV: Tensor,
    draft_probs_TV: Tensor,
    verifiers: Sequence[str],
    siblings: int | None = 1,
    generator: torch.Generator | None = None,
    space: ActionSpace | None = None,
) -> Tensor:
    """Block efficiency E[tau + 1 | text] of every action at every root, float64 [verifier, root,
    action], in tokens.

    Roots are 0 .. T - 1 - (max_L1 + max_L2); root r is committed up to token r.

    Args:
        tokens_T: int64, of a text that follows the target's law.
        target_probs_TV, draft_probs_TV: row t is the distribution after token t; float64, float32
            or bf16, on any device; normalised in float64.
        siblings: how many draws of the siblings are averaged; None enumerates all of them, for
            small vocabularies.
        generator: of the siblings' draws; torch's own if None.
        space: the actions; the default space if None. Its greedy trees rank tokens of draft
            probability 0 by their ids.

    Raises:
        ValueError: the shapes do not fit, no root has its whole look-ahead, the text holds a token
            of probability 0 under the target, or a verifier is unknown or has no labels along a
            text.
    """
    if not len(tokens_T) == len(target_probs_TV) == len(draft_probs_TV):
        raise ValueError(
            f"{len(tokens_T)} tokens need as many rows; target has {len(target_probs_TV)}, draft "
            f"{len(draft_probs_TV)}"
        )
    labeller = TextLabeller(tokens_T, verifiers, siblings, generator, space)
    size = block_rows(target_probs_TV.shape[-1])
    for begin in range(0, len(tokens_T), size):
        labeller.add(target_probs_TV[begin : begin + size], draft_probs_TV[begin : begin + size])
    return labeller.space.efficiencies(labeller.survivals())


def block_rows(vocabulary: int) -> int:
    """How many distributions along a text are taken at once, which bounds the memory."""
    return max(32, ELEMENTS // vocabulary)


def labelled_verifier(name: str) -> TopDown | BottomUp:
    """A verifier that has labels along a text; for verifiers of the first path, that of chains.
    ValueError where it is unknown, compares whole paths (GBV), or needs a linear program for each
    node (Khisti)."""
    verifier = get_verifier(name)
    if isinstance(verifier, TopDown | BottomUp) and not isinstance(verifier, Khisti):
        return verifier
    if isinstance(verifier, FirstPath):
        return verifier.chain
    raise ValueError(f"{name} has no labels along a text")


class _Branching(NamedTuple):
    """The branches of one style and grid. Many verifiers take the same rule for another style than
    i.i.d., so rules are walked for once."""

    style: str
    grid: Grid
    rules: list[TopDown | BottomUp]  # by verifier
    # by rule, [P, K, max_L2, L] of each block; top-down L is 1
    blocks: defaultdict[type, list[Tensor]]


class TextLabeller:
    """Survivals along one text, from blocks of distributions in its order; see `label_text` for the
    arguments."""

    def __init__(
        self,
        tokens_T: Tensor,
        verifiers: Sequence[str],
        siblings: int | None = 1,
        generator: torch.Generator | None = None,
        space: ActionSpace | None = None,
        draft_vocabulary_S: Tensor | None = None,
    ) -> None:
        """Outside the `draft_vocabulary_S`, int64, the draft gives every token probability 0; None:
        any token may have some."""
        self.space = space or ActionSpace.default()
        self.tokens_T = tokens_T
        self._draft_vocabulary_S = draft_vocabulary_S
        self._siblings = Siblings(siblings, generator)
        self.roots = len(tokens_T) - self.space.depth
        if self.roots < 1:
            raise ValueError(
                f"{len(tokens_T)} tokens leave no root with a look-ahead of {self.space.depth}"
            )
        self.verifiers = [labelled_verifier(name) for name in verifiers]
        self._is_first_path = [isinstance(get_verifier(name), FirstPath) for name in verifiers]
        self._branchings: list[_Branching] = []
        for style, grid in self.space.branchings:
            rules = [cast(TopDown | BottomUp, styled(rule, style)) for rule in self.verifiers]
            self._branchings.append(_Branching(style, grid, rules, defaultdict(list)))
        self._widest = max((grid.widths[-1] for _, grid in self.space.branchings), default=1)
        self._look_ahead = max((grid.max_L2 for _, grid in self.space.branchings), default=0)
        # of the text's own next tokens, block by block
        self._p: list[Tensor] = []
        self._q: list[Tensor] = []
        self._seen = 0
        self._rows: SortedRows | None = None  # of the last block
        # how many of its last positions wait for the next block before branches begin there
        self._waiting = 0
        # the draft's most likely tokens at each position of the last block
        self._likely: Tensor | None = None

    def add(
        self, target_probs_BV: Tensor, draft_probs_BV: Tensor, draft_logits_BV: Tensor | None = None
    ) -> None:
        """Both models after the next B tokens; the draft's logits rank tokens of probability 0 for
        greedy trees."""
        begin = self._seen
        next_B = self.tokens_T[begin + 1 : begin + 1 + len(target_probs_BV)]
        next_B = next_B.to(target_probs_BV.device)
        p_BV = target_probs_BV[: len(next_B)]
        q_BV = draft_probs_BV[: len(next_B)]
        self._seen += len(target_probs_BV)
        if len(next_B) == 0:
            return
        p_B = _normalised_at(p_BV, next_B)
        if bool((p_B <= 0).any()):
            at = int((p_B <= 0).nonzero()[0]) + begin + 1
            raise ValueError(f"token {at} of the text has probability 0 under the target")
        self._p.append(p_B)
        self._q.append(_normalised_at(q_BV, next_B))
        if self._branchings:
            p_PV = p_BV
            q_PV = q_BV
            if self._rows is not None:
                since = len(self._rows.p_NV) - self._waiting
                p_PV = torch.cat([self._rows.p_NV[since:], p_BV])
                q_PV = torch.cat([self._rows.q_NV[since:], q_BV])
            self._rows = SortedRows(p_PV, q_PV, self._draft_vocabulary_S)
            if GREEDY in self.space.styles:
                logits_BV = None if draft_logits_BV is None else draft_logits_BV[: len(next_B)]
                likely_BK = most_likely(q_BV, self._widest, logits_BV)
                if self._likely is not None:
                    kept_BK = self._likely[len(self._likely) - self._waiting :]
                    likely_BK = torch.cat([kept_BK, likely_BK])
                self._likely = likely_BK
            count = max(0, len(self._rows.p_NV) - self._look_ahead + 1)
            if count > 0:
                self._branch(self._rows, begin - self._waiting, count)
            self._waiting = len(self._rows.p_NV) - count

    def _ahead(self, since: int = 0) -> tuple[Tensor, Tensor]:
        """p and q of the next tokens at each position from `since` on, [T, D] each."""
        p_T = torch.cat(self._p)[since:]
        q_T = torch.cat(self._q)[since:]
        return tokens_ahead(p_T, self.space.depth), tokens_ahead(q_T, self.space.depth)

    def _branch(self, rows: SortedRows, begin: int, count: int) -> None:
        """The branches of all styles at `count` positions from `begin` on, the first of `rows`."""
        tokens_B = self.tokens_T[begin + 1 : begin + 1 + len(rows.p_NV)].to(rows.device)
        for style, grid, style_rules, blocks in self._branchings:
            entry_PL = self._trunk_weights(grid, begin, count)
            entry_CL = entry_PL.repeat_interleave(len(grid.widths), dim=0)
            branches = Branches(style, grid, self._siblings, rows, tokens_B, count, self._likely)
            rules = {type(rule): rule for rule in style_rules}
            starts = [before_branches(rule, entry_CL) for rule in rules.values()]
            for kind, block in zip(rules, branches.survivals(starts), strict=True):
                blocks[kind].append(block)

    def _trunk_weights(self, grid: Grid, begin: int, count: int) -> Tensor:
        """The entry weights that trunks of 0, 1, .. tokens leave at `count` positions, [P, L]; 0
        where a trunk would begin before the text."""
        since = max(0, begin - grid.max_L1)
        entry_TD = entry_weights(*self._ahead(since))
        trunk_L = torch.arange(grid.max_L1 + 1, device=entry_TD.device)
        end_P1 = torch.arange(begin, begin + count, device=entry_TD.device).unsqueeze(-1)
        root_PL = end_P1 - trunk_L
        entry_PL = entry_TD[root_PL.clamp(min=since) - since, trunk_L.expand_as(root_PL)]
        return entry_PL * (root_PL >= 0)

    def survivals(self) -> Tensor:
        """S of every root, float64 [verifier, R, S], in the order of `ActionSpace.survivals`, once
        all blocks are added; the distributions after the last token are not needed."""
        if self._seen < len(self.tokens_T) - 1:
            raise ValueError(
                f"{len(self.tokens_T)} tokens need as many rows; there are {self._seen}"
            )
        p_TD, q_TD = self._ahead()
        drafted_TD = running_products(divide(q_TD, p_TD))  # P(drafted) / P(text)
        sizes = len(self.verifiers), self.roots, self.space.tree_survivals
        survivals_vRS = torch.zeros(sizes, dtype=torch.float64, device=drafted_TD.device)
        for v, verifier in enumerate(self.verifiers):
            chain_TD = drafted_TD * acceptances(verifier, p_TD, q_TD)
            survivals_vRS[v, :, : self.space.depth] = chain_TD[: self.roots, 1:]
            # bottom-up, the trunk's acceptance is in the entry weights of the branches
            trunk_TD = chain_TD if isinstance(verifier, TopDown) else drafted_TD
            for branching in self._branchings:
                for action, branch_RD in self._branches(v, branching, chain_TD, trunk_TD):
                    survivals_vRS[v][:, self.space.positions(action)[action.L1 :]] = branch_RD
        return survivals_vRS

    def _branches(
        self, v: int, branching: _Branching, chain_TD: Tensor, trunk_TD: Tensor
    ) -> Iterator[tuple[Action, Tensor]]:
        """For one verifier the trees of each K and L1 with the longest branches, and S of every
        root below the trunk, [R, max_L2]."""
        grid = branching.grid
        trunks = range(grid.max_L1 + 1)
        is_chain = branching.style == IID and self._is_first_path[v]
        if not is_chain:
            blocks = branching.blocks[type(branching.rules[v])]
            below = torch.cat(blocks).expand(-1, -1, -1, len(trunks))
        for (number, K), L1 in product(enumerate(grid.widths), trunks):
            action = grid.action(K, L1, grid.max_L2, branching.style)
            if is_chain:  # its branches are the chain's continuation
                yield action, chain_TD[: self.roots, L1 + 1 : L1 + 1 + grid.max_L2]
            else:
                branch_RD = below[L1 : L1 + self.roots, number, :, L1]
                yield action, trunk_TD[: self.roots, L1, None] * branch_RD


def _normalised_at(probs_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """The probability of one token in each row, float64 [B]."""
    probs_B = probs_BV.gather(-1, tokens_B[:, None])[:, 0].double()
    return probs_B / probs_BV.sum(-1, dtype=torch.float64)
