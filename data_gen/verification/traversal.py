"""Traversal Verification (Weng et al. 2025, algorithm 2). On a chain this is Block Verification.

    w(root) = 1;   w(child x of v) = min(1, w(v) p_v(x) / q_v(x))
    visit the leaves, depth first:
        accept the path down to the leaf with probability w(leaf); the extra token is drawn from p_leaf
        else remove the leaf;  at its parent v:  R = (w p_v - q_v)+,  S = sum R,
             w(v) <- S / (S + 1 - w(v)),  p_v <- R / S;   v is a leaf once it has no children

Equal siblings share one merged subtree, visited at the first copy. With i.i.d. siblings, a rejection updates the node
once per *entry* of its child list, further copies included. Without replacement there are no copies, and the updates
subtract the law of each entry given the earlier ones.

Legend: M nodes taken at once, V vocabulary, k child-list entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_gen.verification.base import IID, WITHOUT_REPLACEMENT, BottomUp, Split
from data_gen.verification.distributions import NodeDistributions, divide, is_copy
from data_gen.verification.rejection import draft_steps


class Traversal(BottomUp):
    """Child `x` of `v` is entered with `min(1, w p/q)`; rejected, `w p <- (w p - q)+` and the rest is renormalised."""

    name = "traversal"
    styles = (IID, WITHOUT_REPLACEMENT)

    def split(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        steps_Mk = draft_steps(node, entries_Mk, self.style)
        states = _updates(node, weights_M, steps_Mk)
        a_Mk, b_Mk, w_Mk = (torch.stack(column[:-1], dim=-1) for column in zip(*states, strict=True))
        p_Mk, q_Mk = node.at(entries_Mk)
        entry_Mk = divide(w_Mk * (a_Mk * p_Mk - b_Mk * q_Mk).clamp(min=0), steps_Mk * q_Mk).clamp(max=1)
        return Split(entry_Mk.masked_fill_(is_copy(entries_Mk), 0.0), states[-1][2])

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        a_M, b_M, _ = _updates(node, weights_M, draft_steps(node, entries_Mk, self.style))[-1]
        return node.residual(a_M, b_M)


def _updates(node: NodeDistributions, w_M: Tensor, steps_Mk: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Before the first and after every rejection: the scalars of the target `(a p - b q)+`, and the weight `w`."""
    a_M, b_M = torch.ones_like(w_M), torch.zeros_like(w_M)
    states = [(a_M, b_M, w_M)]
    for step_M in steps_Mk.unbind(-1):
        a_M, b_M = w_M * a_M, w_M * b_M + step_M
        mass_M = node.excess(a_M, b_M)
        a_M, b_M = divide(a_M, mass_M), divide(b_M, mass_M)
        # a weight of 1 stays 1: 1 - w vanishes, and the root must accept in the end
        w_M = torch.where(w_M < 1, divide(mass_M, mass_M + 1 - w_M), w_M)
        states.append((a_M, b_M, w_M))
    return states
