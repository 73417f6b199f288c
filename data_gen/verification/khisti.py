"""Khisti et al. (ICLR 2025): importance-weighted selection of one draft by a linear program, then
speculative sampling.

Two drafts with laws `q1`, `q2` meet, and `x1` wins with probability `b(x1, x2)`. The winner's law
`r` is linear in `b`, and `b` maximises `sum min(p, r)`. Only the pairs among the `FREE` best tokens
by `p - q1 q2` are free; elsewhere the better-ranked token wins. Further drafts meet the winner one
after another. At each node, from the root down:

    x = X1, r = q
    for X in the other children:  b, r' = the linear program for drafts of the laws r and q
        x = x with probability b(x, X), else X;   r = r'
    go to x with probability min(1, p(x) / r(x));  else  Y ~ (p - r)+, normalised, as the extra
    token or another child

Legend: M nodes taken at once, V vocabulary, s free tokens, k child-list entries, U nodes with
    distinct distributions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from data_gen.verification.base import TopDown
from data_gen.verification.distributions import NodeDistributions, divide, is_copy, pooled

FREE = 8  # tokens whose pairs are free in the linear program
# the optimum need not be unique, and the dual simplex always ends in the same vertex
SOLVER = "highs-ds"


class Match(NamedTuple):
    winner_V: np.ndarray
    rank_V: np.ndarray  # of each token, the best is 0
    free_ss: np.ndarray  # P(row beats column) among the best tokens, by rank

    def wins(self, first: int, second: int) -> float:
        i = int(self.rank_V[first])
        j = int(self.rank_V[second])
        if i != j and max(i, j) < len(self.free_ss):
            return float(self.free_ss[i, j])
        return float(i <= j)


def match(p_V: np.ndarray, first_V: np.ndarray, second_V: np.ndarray) -> Match:
    """Solve for `b` between drafts of the laws `first_V` and `second_V`."""
    order_V = np.argsort(-(p_V - first_V * second_V), kind="stable")
    rank_V = np.argsort(order_V, kind="stable")
    p = p_V[order_V]
    q1 = first_V[order_V]
    q2 = second_V[order_V]
    q1_after = q1[::-1].cumsum()[::-1] - q1
    q2_after = q2[::-1].cumsum()[::-1] - q2
    s = min(FREE, int(((q1 > 0) | (q2 > 0)).sum()), len(p))
    # the part of r at the free tokens that does not depend on b: equal pairs, and wins against all
    # later tokens
    fixed_s = (q1 * q2)[:s] + q1[:s] * q2_after[s - 1] + q2[:s] * q1_after[s - 1]
    if s > 1:
        free_ss = _optimum(p[:s], q1[:s], q2[:s], fixed_s)
    else:
        free_ss = np.ones((s, s))
    apart_ss = 1 - np.eye(s)
    winner = q1 * q2 + q1 * q2_after + q2 * q1_after
    first_s = (free_ss * apart_ss) @ q2[:s]
    second_s = q1[:s] @ ((1 - free_ss) * apart_ss)
    winner[:s] = fixed_s + q1[:s] * first_s + q2[:s] * second_s
    return Match(winner[rank_V], rank_V, free_ss)


def _optimum(
    p_s: np.ndarray, q1_s: np.ndarray, q2_s: np.ndarray, fixed_s: np.ndarray
) -> np.ndarray:
    """`b` [s, s] that maximises `sum_y t(y)`, `t <= p`, `t <= r(b)`; by scipy's HiGHS."""
    s = len(p_s)
    i, j = np.nonzero(1 - np.eye(s))  # b(i, j): i as the first draft beats j as the second
    mass = q1_s[i] * q2_s[j]
    column = np.arange(len(i))
    wins_ty = np.zeros((s, len(i)))
    wins_ty[i, column] = mass
    wins_ty[j, column] = -mass
    constant_s = fixed_s.copy()
    np.add.at(constant_s, j, mass)
    objective = np.concatenate([np.zeros(len(i)), -np.ones(s)])
    limits = np.hstack([-wins_ty, np.eye(s)])
    bounds = [(0.0, 1.0)] * len(i) + [(0.0, float(p)) for p in p_s]
    result = linprog(objective, A_ub=limits, b_ub=constant_s, bounds=bounds, method=SOLVER)
    free_ss = np.triu(np.ones((s, s)))
    if result.x is not None:  # else the better-ranked wins, which is lossless too
        free_ss[i, j] = np.clip(result.x[: len(i)], 0, 1)
    return free_ss


class Khisti(TopDown):
    name = "khisti"

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        p_MV, _ = node.exact()
        r_MV, matches_M = self._winners(node, entries_Mk.shape[-1])
        wins: list[list[float]] = []
        for entries, matches in zip(entries_Mk.tolist(), matches_M, strict=True):
            wins.append(_tournament(entries, matches))
        wins_Mk = torch.tensor(wins, dtype=torch.float64, device=p_MV.device)
        accept_Mk = divide(p_MV.gather(-1, entries_Mk), r_MV.gather(-1, entries_Mk)).clamp(max=1)
        left_MV = (p_MV - r_MV).clamp(min=0)
        rejected_M1 = (wins_Mk * (1 - accept_Mk)).sum(-1, keepdim=True)
        share_Mk = divide(left_MV.gather(-1, entries_Mk), left_MV.sum(-1, keepdim=True))
        landed_Mk = (rejected_M1 * share_Mk).masked_fill(is_copy(entries_Mk), 0.0)
        return pooled(wins_Mk * accept_Mk, entries_Mk) + landed_Mk

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        r_MV, _ = self._winners(node, entries_Mk.shape[-1])
        return (node.exact()[0] - r_MV).clamp_(min=0).scatter_(-1, entries_Mk, 0.0)

    def _winners(self, node: NodeDistributions, k: int) -> tuple[Tensor, list[list[Match]]]:
        pairs_M2V = torch.stack(node.exact(), dim=1)
        # equal nodes share the programs
        pairs_U2V, inverse_M = pairs_M2V.unique(dim=0, return_inverse=True)
        laws: list[Tensor] = []
        matches_U: list[list[Match]] = []
        for p_V, q_V in pairs_U2V.cpu().numpy():
            law_V = q_V
            matches: list[Match] = []
            for _ in range(k - 1):
                matches.append(match(p_V, law_V, q_V))
                law_V = matches[-1].winner_V
            laws.append(torch.from_numpy(law_V.copy()))
            matches_U.append(matches)
        laws_MV = torch.stack(laws).to(inverse_M.device)[inverse_M]
        matches_M = [matches_U[index] for index in inverse_M.tolist()]
        return laws_MV, matches_M


def _tournament(entries: list[int], matches: list[Match]) -> list[float]:
    wins = [1.0]
    for number, next_match in enumerate(matches, 1):
        defended: list[float] = []
        lost: list[float] = []
        for won, first in zip(wins, entries, strict=False):
            stay = next_match.wins(first, entries[number])
            defended.append(won * stay)
            lost.append(won * (1 - stay))
        wins = [*defended, sum(lost)]
    return wins
