"""The better of two rules at each node, which is new here.

A lifted verifier takes at each node a rule whose flow `F` stays below the target measure `m = w p`.
The priority rule's flow is nearly always the larger one; K-SEQ's is where target and draft agree on
few likely tokens. At each node with k children and weight w, bottom-up:

    F1 = the flow of K-SEQ for (p, q, w, k);    F2 = the flow of the priority rule
    take the priority rule if mass(F2) > mass(F1), else K-SEQ
    pi(x | X1..Xk) = P(the rule selects child x)
    visit the children in order of first appearance, the j-th one entered with weight
        pi(xj) / (1 - pi(x1) - .. - pi(xj-1))
    if all are rejected:  the node has (m - F)~ and weight (mass(m) - mass(F)) / (1 - mass(F))

*It is lossless.* Which rule is taken depends on p, q, w and k, all of which are settled before a
child is drawn. So for each of their values the children are selected by one rule, `E[pi(x)] = F(x)
<= m(x)` over their draws, and what is left for the extra token is `m - F`, as for that rule alone.

*At one node* it accepts `max(mass(F1), mass(F2))`, which is never less than Traversal, because
K-SEQ's flow never is. *Deeper trees* also depend on how the flow is shared among the children: a
subtree accepts fewer tokens for each unit of weight the more it is entered with, and the child that
is visited first is entered with the least. An order of visits by `p/q` favours the same child in
every tree, and where its subtree accepts little the verifier can stay behind Traversal, in spite of
its larger flow. The order of the drafts favours none. It does not help where the priority rule
gives more flow to the children below which less is accepted; p, q, w and k alone cannot tell.
Enumeration finds such worlds, about one in a thousand.

Legend: M nodes taken at once, V vocabulary, k child-list entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_gen.verification.distributions import NodeDistributions
from data_gen.verification.k_seq import KSeq
from data_gen.verification.priority import FirstInRank
from data_gen.verification.ranking import in_rank_order
from data_gen.verification.selection import Lifted, Selection

TIE = 1e-12  # of flows: rounding errors decide nothing


class LargerFlow:
    k_seq = KSeq()
    priority = FirstInRank()

    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        node = in_rank_order(node)
        first = self.k_seq.select(node, weights_M, entries_Mk)
        second = self.priority.select(node, weights_M, entries_Mk)
        is_second_M = second.flow_M > first.flow_M + TIE
        is_second_M1 = is_second_M.unsqueeze(-1)
        return Selection(
            torch.where(is_second_M1, second.chosen_Mk, first.chosen_Mk),
            torch.where(is_second_M, second.flow_M, first.flow_M),
            torch.where(is_second_M1, second.left_Mk, first.left_Mk),
        )

    def remainder(self, node: NodeDistributions, weights_M: Tensor, k: int) -> Tensor:
        node = in_rank_order(node)
        any_Mk = node.rows.tokens_PS[node.nodes_M, :1].expand(-1, k)
        # flows do not depend on the entries
        first = self.k_seq.select(node, weights_M, any_Mk)
        second = self.priority.select(node, weights_M, any_Mk)
        return torch.where(
            (second.flow_M > first.flow_M + TIE).unsqueeze(-1),
            self.priority.remainder(node, weights_M, k),
            self.k_seq.remainder(node, weights_M, k),
        )


class LiftedBest(Lifted):
    name = "lifted_best"
    rule = LargerFlow()
    visits_by_ratio = False
