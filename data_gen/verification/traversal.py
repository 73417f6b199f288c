"""Traversal Verification (Weng et al. 2025, algorithm 2). On a chain this is Block Verification.

    w(root) = 1;   w(child x of v) = min(1, w(v) p_v(x) / q_v(x))
    visit the leaves, depth first:
        accept the path down to the leaf with probability w(leaf); the extra token is drawn from p_leaf
        else remove the leaf;  at its parent v:  R = (w p_v - q_v)+,  S = sum R,
             w(v) <- S / (S + 1 - w(v)),  p_v <- R / S;   v is a leaf once it has no children

With p = (0.7, 0.3), q = (0.4, 0.6) and one drafted token, 2: w = 0.3 / 0.6 = 0.5. If it is rejected, R = (0.3, 0), and
the extra token is 1, as under speculative sampling: the two differ from the second token on.

Equal siblings share one merged subtree, visited at the first copy. Drafts with i.i.d. siblings: a rejection updates
the node once per *entry* of its child list, further copies included. Without replacement there are no copies, and
the updates subtract the law of each entry given the earlier ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_gen.verification.base import IID, WITHOUT_REPLACEMENT, BottomUp, Split
from data_gen.verification.profile import NodeDistributions, divide, is_copy
from data_gen.verification.specinfer import draft_steps


class Traversal(BottomUp):
    """Child `x` of `v` is entered with `min(1, w p/q)`; rejected, `w p <- (w p - q)+` and the rest is renormalised."""

    name = "traversal"
    styles = (IID, WITHOUT_REPLACEMENT)

    def split(self, profile: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        steps_Mk = draft_steps(profile, entries_Mk, self.style)
        states, rejected_M = _updates(profile, weights_M, steps_Mk)
        a_Mk, b_Mk, w_Mk = (torch.stack(column[:-1], dim=-1) for column in zip(*states, strict=True))
        p_Mk, q_Mk = profile.at(entries_Mk)
        entry_Mk = divide(w_Mk * (a_Mk * p_Mk - b_Mk * q_Mk).clamp(min=0), steps_Mk * q_Mk).clamp(max=1)
        return Split(entry_Mk.masked_fill_(is_copy(entries_Mk), 0.0), states[-1][2], 1 - rejected_M)

    def remainder(self, profile: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        states, _ = _updates(profile, weights_M, draft_steps(profile, entries_Mk, self.style))
        a_M, b_M, _ = states[-1]
        return profile.residual(a_M, b_M)


def _updates(
    profile: NodeDistributions, w_M: Tensor, steps_Mk: Tensor
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """The node's state before the first and after every rejection: its target `(a p - b q)+`, and its weight `w`.

    And P(all are rejected), [M], averaged over the drawn tokens.
    """
    a_M, b_M = torch.ones_like(w_M), torch.zeros_like(w_M)
    states = [(a_M, b_M, w_M)]
    rejected_M = torch.ones_like(w_M)
    for step_M in steps_Mk.unbind(-1):
        a_M, b_M = w_M * a_M, w_M * b_M + step_M
        mass_M = profile.excess(a_M, b_M)
        rejected_M = rejected_M * (mass_M + 1 - w_M)
        a_M, b_M = divide(a_M, mass_M), divide(b_M, mass_M)
        # a weight of 1 stays 1: 1 - w vanishes, and the root must accept in the end
        w_M = torch.where(w_M < 1, divide(mass_M, mass_M + 1 - w_M), w_M)
        states.append((a_M, b_M, w_M))
    return states, rejected_M
