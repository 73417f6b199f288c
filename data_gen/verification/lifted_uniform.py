"""K-SEQ's flow, shared evenly: the strongest verifier here where branches are equally long. Not in the papers.

    r as in K-SEQ;  each child is alive with probability min(1, m(x) / (r q(x)));  one alive child is selected at random
    children are visited by descending p / q, each entered with its share of what the ones before it have left

Every alive entry is selected with equal probability, instead of the first. The flow is K-SEQ's, so the rule is lossless
for the same reason. On a chain, what a subtree yields is concave in the weight it is entered with: the deeper nodes of
a child entered with half the weight accept more than half as much. So at equal flow, sharing beats concentrating, as
`make audit` shows; unless one child carries most of the tree (its sparse shape).
"""

from __future__ import annotations

from torch import Tensor

from data_gen.verification.profile import NodeDistributions
from data_gen.verification.selection import Lifted, any_alive
from data_gen.verification.spectr import KSeq


class LiftedUniform(Lifted):
    """K-SEQ at every node, bottom-up: any alive entry is selected, children are visited by descending `p/q`."""

    name = "lifted_uniform"
    rule = KSeq()

    def choose(self, profile: NodeDistributions, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
        return any_alive(alive_Mk)
