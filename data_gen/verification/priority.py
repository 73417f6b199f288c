"""The priority rule, which is new here: it comes close to optimal transport in one pass over the vocabulary.

The first alive child in descending `m/q` is selected. At each node with k children:

    A = 1
    for x in the vocabulary, by descending m(x) / q(x):
        a(x) = 1 if A^k - (A - q(x))^k <= m(x), else (A - (A^k - m(x))^(1/k)) / q(x);   A <- A - a(x) q(x)
    each child is alive with probability a(x);  the first alive one in this order is selected
    if none is alive, the extra token is drawn from m less the flow

Legend: M nodes taken at once, V vocabulary in rank order, k child-list entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_gen.verification.distributions import NodeDistributions, Ranked, by_ratio, divide, first_accepted, powers
from data_gen.verification.selection import Lifted, Selection, SelectionRule, TopDownRule

NOTHING = 1e-14  # of `A^k`: below this only rounding errors are left
MOST_RUNS = 256


class FirstInRank(SelectionRule):
    """A token is alive with the largest probability for which its flow stays below `m`, given those before it."""

    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        ranked = node.ranked
        alive_MV, flow_MV = scan(ranked, weights_M, entries_Mk.shape[-1])
        places_Mk = ranked.places_MV.gather(-1, entries_Mk)
        left_Mk = weights_M.unsqueeze(-1) * ranked.p_MV.gather(-1, places_Mk) - flow_MV.gather(-1, places_Mk)
        return Selection(alive_MV.gather(-1, places_Mk), flow_MV.sum(-1), left_Mk.clamp(min=0))

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        ranked = node.ranked
        _, flow_MV = scan(ranked, weights_M, entries_Mk.shape[-1])
        return (weights_M.unsqueeze(-1) * ranked.p_MV - flow_MV).clamp_(min=0).gather(-1, ranked.places_MV)

    def choose(self, node: NodeDistributions, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
        order_Mk = by_ratio(node, entries_Mk)
        return torch.zeros_like(alive_Mk).scatter_(-1, order_Mk, first_accepted(alive_Mk.gather(-1, order_Mk)))


def scan(ranked: Ranked, weights_M: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """P(a draw of the token is alive) and the token's flow for k drafts, in rank order; float64 [M, V] each.

    `A` is one minus the alive mass of the tokens so far. A token that is always alive takes `q` from `A`; one whose
    target is the limit takes `m` from `A^k`. Tokens of one kind come in runs, whose `A` are prefix sums, so each of the
    few runs takes one pass over the vocabulary. A token that the scan does not reach is never alive, which is lossless
    too: once `A^k` is lost in rounding, nothing is left to select.
    """
    m_MV, q_MV = weights_M.unsqueeze(-1) * ranked.p_MV, ranked.q_MV
    alive_MV, flow_MV = torch.zeros_like(m_MV), torch.zeros_like(m_MV)
    end = int((q_MV > 0).sum(-1).max())  # later tokens are never drafted
    places_V = torch.arange(end, device=m_MV.device)
    todo_M = torch.arange(len(m_MV), device=m_MV.device)  # rows that have not reached their end
    start_M1 = torch.zeros_like(todo_M).unsqueeze(-1)
    A_M1 = torch.ones_like(m_MV[:, :1])
    for run in range(MOST_RUNS):
        if len(todo_M) == 0:
            break
        limited = run % 2 == 1
        m, q = m_MV[todo_M, :end], q_MV[todo_M, :end]
        m_since, q_since = (torch.where(places_V < start_M1, 0.0, rows).cumsum(-1) - rows for rows in (m, q))
        A = (A_M1**k - m_since).clamp(min=0) ** (1 / k) if limited else (A_M1 - q_since).clamp(min=0)
        always = q.minimum(A) * powers(A, (A - q).clamp(min=0), k)  # A^k - (A - q)^k, the flow if always alive
        over = A**k <= NOTHING
        breaks = (places_V >= start_M1) & (((always <= m) == limited) | over)
        stop_M1 = torch.where(breaks, places_V, end).amin(-1, keepdim=True)
        in_run = (places_V >= start_M1) & (places_V < stop_M1)
        rest = (A**k - m).clamp(min=0) ** (1 / k)
        alive = divide(m, q * powers(A, rest, k)).clamp_(max=1) if limited else torch.ones_like(q)
        alive_MV[todo_M, :end] = torch.where(in_run, alive, alive_MV[todo_M, :end])
        flow_MV[todo_M, :end] = torch.where(in_run, m if limited else always, flow_MV[todo_M, :end])
        place_M1 = stop_M1.clamp(max=end - 1)
        goes_on_M = ((stop_M1 < end) & ~over.gather(-1, place_M1))[:, 0]
        A_M1 = torch.where(stop_M1 > start_M1, A.gather(-1, place_M1), A_M1)[goes_on_M]
        todo_M, start_M1 = todo_M[goes_on_M], stop_M1[goes_on_M]
    drafted_MV = q_MV > 0
    return alive_MV * drafted_MV, flow_MV * drafted_MV


class Priority(TopDownRule):
    """The priority rule at every node, from the root down."""

    name = "priority"
    rule = FirstInRank()


class LiftedPriority(Lifted):
    """The priority rule at every node, bottom-up; children are visited in the rule's own order."""

    name = "lifted_priority"
    rule = FirstInRank()
