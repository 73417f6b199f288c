"""The priority rule: close to optimal transport in one pass over the vocabulary. Not in the papers.

The tokens are taken in descending `m/q`; the alive child that comes first is selected (algorithms sheet, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_gen.verification.profile import Profile, Ranked, by_ratio
from data_gen.verification.selection import Lifted, Rule, Selection, TopDownRule, first_alive


class FirstInRank(Rule):
    """Alive with the largest probability for which the flow of the token stays below `m`, given those before it."""

    def select(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        ranked = profile.ranked
        alive_MV, flow_MV = scan(ranked, weights_M, entries_Mk.shape[-1])
        places_Mk = ranked.places_MV.gather(-1, entries_Mk)
        left_Mk = weights_M.unsqueeze(-1) * ranked.p_MV.gather(-1, places_Mk) - flow_MV.gather(-1, places_Mk)
        return Selection(alive_MV.gather(-1, places_Mk), flow_MV.sum(-1), left_Mk.clamp(min=0))

    def remainder(self, profile: Profile, weights_M: Tensor, k: int) -> Tensor:
        ranked = profile.ranked
        left_MV = (weights_M.unsqueeze(-1) * ranked.p_MV - scan(ranked, weights_M, k)[1]).clamp_(min=0)
        return left_MV.gather(-1, ranked.places_MV)


def scan(ranked: Ranked, weights_M: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """P(a draw of the token is alive) and the token's flow, in rank order; float64 [M, V] each.

    `A` is one minus the alive mass of the tokens so far. A token that is always alive takes `q` from `A`; one whose
    target is the limit takes `m` from `A^k`. Tokens of one kind come in runs, whose `A` are prefix sums: a pass over
    the vocabulary per run, of which there are few, instead of a step per token.
    """
    m_MV, q_MV = weights_M.unsqueeze(-1) * ranked.p_MV, ranked.q_MV
    zero_M1 = torch.zeros_like(m_MV[:, :1])
    m_before_MV, q_before_MV = (torch.cat([zero_M1, rows.cumsum(-1)[:, :-1]], dim=-1) for rows in (m_MV, q_MV))
    places_V = torch.arange(m_MV.shape[-1], device=m_MV.device)
    alive_MV, flow_MV = torch.zeros_like(m_MV), torch.zeros_like(m_MV)
    start_M1 = torch.zeros_like(zero_M1, dtype=torch.int64)
    end = int((q_MV > 0).sum(-1).max())  # beyond are tokens that are never drafted
    A_M1 = torch.ones_like(zero_M1)
    limited = False
    while bool((start_M1 < end).any()):
        here_M1 = start_M1.clamp(max=end - 1)
        m_since_MV = (m_before_MV - m_before_MV.gather(-1, here_M1)).clamp(min=0)
        q_since_MV = (q_before_MV - q_before_MV.gather(-1, here_M1)).clamp(min=0)
        A_MV = ((A_M1**k - m_since_MV).clamp(min=0) ** (1 / k)) if limited else (A_M1 - q_since_MV).clamp(min=0)
        all_MV = A_MV**k - (A_MV - q_MV).clamp(min=0) ** k  # the flow if always alive
        fits_MV = (all_MV <= m_MV) != limited
        stop_M1 = torch.where((places_V >= start_M1) & ~fits_MV, places_V, end).amin(-1, keepdim=True)
        run_MV = (places_V >= start_M1) & (places_V < stop_M1)
        if limited:
            rest_MV = (A_MV**k - m_MV).clamp(min=0) ** (1 / k)
            alive_MV = torch.where(run_MV, ((A_MV - rest_MV) / q_MV).nan_to_num_(0.0).clamp_(0, 1), alive_MV)
        else:
            alive_MV = torch.where(run_MV, 1.0, alive_MV)
        flow_MV = torch.where(run_MV, m_MV if limited else all_MV, flow_MV)
        after_M1 = A_MV.gather(-1, stop_M1.clamp(max=A_MV.shape[-1] - 1))
        A_M1 = torch.where(stop_M1 > start_M1, after_M1, A_M1)
        start_M1, limited = stop_M1, not limited
    drafted_MV = q_MV > 0
    return alive_MV * drafted_MV, flow_MV * drafted_MV


def _first_in_rank(profile: Profile, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
    order_Mk = by_ratio(profile, entries_Mk)
    return torch.zeros_like(alive_Mk).scatter_(-1, order_Mk, first_alive(alive_Mk.gather(-1, order_Mk)))


class Priority(TopDownRule):
    """The priority rule at every node, from the root down."""

    name = "priority"
    rule = FirstInRank()

    def choose(self, profile: Profile, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
        return _first_in_rank(profile, alive_Mk, entries_Mk)


class LiftedPriority(Lifted):
    """The priority rule at every node, bottom-up; children are visited in the rule's own order."""

    name = "lifted_priority"
    rule = FirstInRank()

    def choose(self, profile: Profile, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
        return _first_in_rank(profile, alive_Mk, entries_Mk)
