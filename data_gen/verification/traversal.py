"""Rejection sampling at a node, one draft after another: from the root down, or in `traversal` from
the leaves up.

`naive_tree` is speculative sampling (Leviathan et al. 2023, Chen et al. 2023) on the first child.
`specinfer` is recursive rejection (Miao et al. 2024, algorithm 2; without replacement RRSw/o of
MDSD, Hu et al. 2025, arXiv 2502.18779). `traversal` is Traversal Verification (Weng et al. 2025,
algorithm 2), on a chain Block Verification:

    w(root) = 1;   w(child x of v) = min(1, w(v) p_v(x) / q_v(x))
    visit the leaves, depth first:
        accept the path down to the leaf with probability w(leaf); the extra token is drawn from
        p_leaf else remove the leaf;  at its parent v:  R = (w p_v - q_v)+,  S = sum R,
             w(v) <- S / (S + 1 - w(v)),  p_v <- R / S;   v is a leaf once it has no children

Equal siblings share one merged subtree, visited at the first copy. With i.i.d. siblings, a
rejection updates the node once for every *entry* of its child list, further copies included.
Without replacement there are no copies, and the updates subtract the law of each entry given the
earlier ones.

Legend: M nodes taken at once, V vocabulary, k child-list entries, r the k + 1 states around k
rounds, S sets of rejected entries, T transitions.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from data_gen.trees import DraftTree
from data_gen.verification.base import BottomUp, Split, TopDown, Verdict
from data_gen.verification.distributions import (
    NodeDistributions,
    divide,
    first_accepted,
    is_copy,
    pooled,
    sample,
)
from selector.actions import IID, STYLES, WITHOUT_REPLACEMENT

# entries; where there are more, they are tried in their own order, which is lossless too
MOST_SHUFFLED = 12


class NSS(TopDown):
    """Naive speculation by sampling: `Y ~ p`; if Y is a child, go there; else Y is the extra
    token. The draft's distributions play no part, so children may be chosen in any way that does
    not depend on Y."""

    name = "nss"
    styles = STYLES

    def verify(
        self,
        tree: DraftTree,
        target_probs_NV: Tensor,
        draft_probs_NV: Tensor,
        generator: torch.Generator,
    ) -> Verdict:
        """As `Verifier.verify`, one node after another; `draft_probs_NV` is not read."""
        node = 0
        while True:
            token = int(sample(target_probs_NV[node], 1, generator))
            child = tree.child(node, token)
            if child is None:
                return Verdict(node, token)
            node = child

    def accept(self, p: Tensor, q: Tensor) -> Tensor:
        return p

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return node.at(entries_Mk)[0].masked_fill(is_copy(entries_Mk), 0.0)

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return node.residual(node.ones(), 0 * node.ones()).scatter_(-1, entries_Mk, 0.0)


class NaiveTree(TopDown):
    """Go to `X1` with probability `min(1, p/q)`; else `Y ~ (p - q)+`, normalised, may be another
    child.

    Only `X1` must be a draw from `q`; the other children may be drawn in any way.
    """

    name = "naive_tree"
    styles = (IID, WITHOUT_REPLACEMENT)

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        p_Mk, q_Mk = node.at(entries_Mk)
        pull_Mk = divide(p_Mk, q_Mk).clamp(max=1)
        rejected_M1 = 1 - pull_Mk[:, :1]
        mass_M1 = node.excess(node.ones(), node.ones()).unsqueeze(-1)
        pull_Mk[:, 1:] = rejected_M1 * divide((p_Mk - q_Mk).clamp(min=0), mass_M1)[:, 1:]
        # Y is one draw, however often its token was drafted
        return pull_Mk.masked_fill_(is_copy(entries_Mk), 0.0)

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return node.residual(node.ones(), node.ones()).scatter_(-1, entries_Mk, 0.0)


class SpecInfer(TopDown):
    """Recursive rejection: try the remaining children one after another.

        while there are children left:
            x = one of them, at random;  go there with probability min(1, p_i(x) / q_i(x))
            else  p_{i+1} = (p_i - q_i)+, normalised;  leave out this entry
        stop, the extra token is drawn from p_i

    I.i.d. drafts have `q_i = q`, and `p_i` does not depend on which child was rejected. Without
    replacement the children are tried in the order of the draws, and `q_i` is `q` outside the
    rejected tokens, normalised.
    """

    name = "specinfer"
    styles = (IID, WITHOUT_REPLACEMENT)

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        k = entries_Mk.shape[-1]
        p_Mk, q_Mk = node.at(entries_Mk)
        steps_Mk = draft_steps(node, entries_Mk, self.style)
        a_Mr, b_Mr, _ = node.rejections(node.ones(), steps_Mk)
        left_Mkk = a_Mr[:, :k, None] * p_Mk.unsqueeze(1) - b_Mr[:, :k, None] * q_Mk.unsqueeze(1)
        # P(accepted) by [node, round, entry]
        accept_Mkk = divide(
            left_Mkk.clamp(min=0), steps_Mk.unsqueeze(-1) * q_Mk.unsqueeze(1)
        ).clamp(max=1)
        if self.style == IID and k <= MOST_SHUFFLED:
            return pooled(_in_random_order(accept_Mkk), entries_Mk)
        return pooled(first_accepted(accept_Mkk.diagonal(dim1=1, dim2=2)), entries_Mk)

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        a_Mr, b_Mr, _ = node.rejections(node.ones(), draft_steps(node, entries_Mk, self.style))
        # in exact arithmetic nothing is left of a rejected token, and no rounding error may return
        # it as extra token
        return node.residual(a_Mr[:, -1], b_Mr[:, -1]).scatter_(-1, entries_Mk, 0.0)


class Traversal(BottomUp):
    name = "traversal"
    styles = (IID, WITHOUT_REPLACEMENT)

    def split(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        steps_Mk = draft_steps(node, entries_Mk, self.style)
        a_Mr, b_Mr, w_Mr = node.rejections(weights_M, steps_Mk)
        p_Mk, q_Mk = node.at(entries_Mk)
        left_Mk = (a_Mr[:, :-1] * p_Mk - b_Mr[:, :-1] * q_Mk).clamp(min=0)
        entry_Mk = divide(left_Mk, steps_Mk * q_Mk).clamp(max=1)
        return Split(entry_Mk.masked_fill_(is_copy(entries_Mk), 0.0), w_Mr[:, -1])

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        a_Mr, b_Mr, _ = node.rejections(weights_M, draft_steps(node, entries_Mk, self.style))
        return node.residual(a_Mr[:, -1], b_Mr[:, -1])


def draft_steps(node: NodeDistributions, entries_Mk: Tensor, style: str) -> Tensor:
    """The ratio of each entry's law to `q` outside the entries before it, where nothing of the
    target is left; [M, k].

    It is 1 for i.i.d. draws, and `1 / (1 - q(earlier entries))` without replacement.
    """
    if style == IID:
        return torch.ones_like(entries_Mk, dtype=torch.float64)
    masses = [node.ones()]
    for n in range(1, entries_Mk.shape[-1]):
        masses.append(node.draft_mass_off(entries_Mk[:, :n]))
    return 1 / torch.stack(masses, dim=-1)


def _in_random_order(accept_Mkk: Tensor) -> Tensor:
    """P(each entry is the accepted one) if every round takes a random remaining entry; over the 2^k
    rejected sets."""
    k = accept_Mkk.shape[-1]
    rejected_MS = accept_Mkk.new_zeros(len(accept_Mkk), 1 << k)
    rejected_MS[:, 0] = 1.0
    pull_Mk = torch.zeros_like(accept_Mkk[:, 0])
    for round_, (from_T, entry_T, to_T) in enumerate(_rejections(k, pull_Mk.device)):
        taken_MT = rejected_MS[:, from_T] / (k - round_)
        accept_MT = accept_Mkk[:, round_, entry_T]
        pull_Mk.index_add_(1, entry_T, taken_MT * accept_MT)
        rejected_MS.index_add_(1, to_T, taken_MT * (1 - accept_MT))
    return pull_Mk


@cache
def _rejections(k: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    rounds_: list[list[tuple[int, int, int]]] = [[] for _ in range(k)]
    for rejected in range(1 << k):
        for entry in range(k):
            is_rejected = rejected >> entry & 1
            if not is_rejected:
                rounds_[rejected.bit_count()].append((rejected, entry, rejected | 1 << entry))
    transitions = []
    for moves in rounds_:
        from_T, entry_T, to_T = torch.tensor(moves, device=device).unbind(-1)
        transitions.append((from_T, entry_T, to_T))
    return transitions
