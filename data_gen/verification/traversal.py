"""Traversal Verification (Weng et al. 2025, algorithm 2). On a chain this is Block Verification.

    w(root) = 1;   w(child x of v) = min(1, w(v) p_v(x) / q_v(x))
    visit the leaves, depth first:
        accept the path down to the leaf with probability w(leaf); the extra token is drawn from p_leaf
        else remove the leaf;  at its parent v:  R = (w p_v - q_v)+,  S = sum R,
             w(v) <- S / (S + 1 - w(v)),  p_v <- R / S;   v is a leaf once it has no children

Equal siblings share one merged subtree, visited at the first copy. With i.i.d. siblings, a rejection updates the node
once for every *entry* of its child list, further copies included. Without replacement there are no copies, and the
updates subtract the law of each entry given the earlier ones.

Legend: M nodes taken at once, V vocabulary, k child-list entries, r = k + 1 states.
"""

from __future__ import annotations

from torch import Tensor

from data_gen.verification.base import BottomUp, Split
from data_gen.verification.distributions import NodeDistributions, divide, is_copy
from data_gen.verification.rejection import draft_steps, rejections
from selector.actions import IID, WITHOUT_REPLACEMENT


class Traversal(BottomUp):
    """Child `x` of `v` is entered with `min(1, w p/q)`; a rejection makes `w p` into `(w p - q)+`, renormalised."""

    name = "traversal"
    styles = (IID, WITHOUT_REPLACEMENT)

    def split(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        steps_Mk = draft_steps(node, entries_Mk, self.style)
        a_Mr, b_Mr, w_Mr = rejections(node, weights_M, steps_Mk)
        p_Mk, q_Mk = node.at(entries_Mk)
        left_Mk = (a_Mr[:, :-1] * p_Mk - b_Mr[:, :-1] * q_Mk).clamp(min=0)
        entry_Mk = divide(w_Mr[:, :-1] * left_Mk, steps_Mk * q_Mk).clamp(max=1)
        return Split(entry_Mk.masked_fill_(is_copy(entries_Mk), 0.0), w_Mr[:, -1])

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        a_Mr, b_Mr, _ = rejections(node, weights_M, draft_steps(node, entries_Mk, self.style))
        return node.residual(a_Mr[:, -1], b_Mr[:, -1])
