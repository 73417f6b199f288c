"""Khisti et al. (ICLR 2025): importance-weighted selection of one draft by a linear program, then speculative sampling.

Two drafts with laws `q1`, `q2` meet: `b(x1, x2)` is the probability that `x1` wins. The winner's law `r` is linear in
`b`, and `b` maximises `sum min(p, r)`. Only the pairs among the `size` best tokens by `p - q1 q2` are free; elsewhere
the better-ranked token wins. Further drafts meet the winner so far, one after another. At each node, from the root
down:

    x = X1, r = q
    for X in the other children:  b, r' = the linear program for drafts of the laws r and q
        x = x with probability b(x, X), else X;   r = r'
    go to x with probability min(1, p(x) / r(x));  else  Y ~ (p - r)+, normalised, as the extra token or another child

Legend: V vocabulary, s free tokens, k child-list entries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from data_gen.verification.base import IID, TopDown
from data_gen.verification.profile import NodeDistributions, divide, is_copy

SOLVER = "highs-ds"  # the optimum need not be unique: the dual simplex always ends in the same vertex


class Match(NamedTuple):
    """One match: the law of its winner, and who wins."""

    winner_V: np.ndarray
    rank_V: np.ndarray  # of each token, the best is 0
    free_ss: np.ndarray  # P(row beats column) among the best tokens, by rank

    def wins(self, first: int, second: int) -> float:
        """P(the first draft wins)."""
        i, j = int(self.rank_V[first]), int(self.rank_V[second])
        if i != j and max(i, j) < len(self.free_ss):
            return float(self.free_ss[i, j])
        return float(i <= j)


def match(p_V: np.ndarray, first_V: np.ndarray, second_V: np.ndarray, size: int) -> Match:
    """Solve for `b` between drafts of the laws `first_V` and `second_V`."""
    order_V = np.argsort(-(p_V - first_V * second_V), kind="stable")
    rank_V = np.argsort(order_V, kind="stable")
    p, q1, q2 = p_V[order_V], first_V[order_V], second_V[order_V]
    q1_after, q2_after = (q[::-1].cumsum()[::-1] - q for q in (q1, q2))
    s = min(size, int(((q1 > 0) | (q2 > 0)).sum()), len(p))
    free_ss = np.triu(np.ones((s, s)))
    if s > 1:
        # what the free tokens have whatever `b` is: equal pairs, and wins against all tokens beyond
        fixed_s = (q1 * q2)[:s] + q1[:s] * q2_after[s - 1] + q2[:s] * q1_after[s - 1]
        free_ss = _optimum(p[:s], q1[:s], q2[:s], fixed_s)
    b_ss = free_ss.copy()
    np.fill_diagonal(b_ss, 0.0)
    winner = q1 * q2 + q1 * q2_after + q2 * q1_after
    beaten_ss = 1 - free_ss
    np.fill_diagonal(beaten_ss, 0.0)
    inner = q1[:s] * (b_ss @ q2[:s]) + q2[:s] * (q1[:s] @ beaten_ss)
    if s:
        winner[:s] = (q1 * q2)[:s] + q1[:s] * q2_after[s - 1] + q2[:s] * q1_after[s - 1] + inner
    return Match(winner[rank_V], rank_V, free_ss)


def _optimum(p_s: np.ndarray, q1_s: np.ndarray, q2_s: np.ndarray, fixed_s: np.ndarray) -> np.ndarray:
    """`b` [s, s] that maximises `sum_y t(y)`, `t <= p`, `t <= r(b)`; by scipy's HiGHS."""
    s = len(p_s)
    pairs = [(i, j) for i in range(s) for j in range(s) if i != j]
    wins_ty = np.zeros((s, len(pairs)))
    constant_s = fixed_s.copy()
    for column, (i, j) in enumerate(pairs):  # b(i, j): i as the first draft beats j as the second
        mass = q1_s[i] * q2_s[j]
        wins_ty[i, column] += mass
        wins_ty[j, column] -= mass
        constant_s[j] += mass
    objective = np.concatenate([np.zeros(len(pairs)), -np.ones(s)])
    limits = np.hstack([-wins_ty, np.eye(s)])
    bounds = [(0.0, 1.0)] * len(pairs) + [(0.0, float(p)) for p in p_s]
    result = linprog(objective, A_ub=limits, b_ub=constant_s, bounds=bounds, method=SOLVER)
    free_ss = np.triu(np.ones((s, s)))
    if result.x is not None:  # else the better-ranked wins, which is lossless too
        for value, (i, j) in zip(np.clip(result.x[: len(pairs)], 0, 1), pairs, strict=True):
            free_ss[i, j] = value
    return free_ss


class Khisti(TopDown):
    """The winner is accepted with `min(1, p/r)`; else the token is drawn from `(p - r)+`.

    Args:
        size: tokens whose pairs are free in the linear program.
    """

    name = "khisti"

    def __init__(self, style: str = IID, size: int = 8) -> None:
        super().__init__(style)
        self.size = size

    def winner(self, p_V: Tensor, q_V: Tensor, k: int) -> tuple[Tensor, list[Match]]:
        """The law `r` of the winner among k drafts, float64 [V], and the matches that it comes from."""
        p, q = p_V.cpu().numpy(), q_V.cpu().numpy()
        matches: list[Match] = []
        law = q
        for _ in range(k - 1):
            matches.append(match(p, law, q, self.size))
            law = matches[-1].winner_V
        return torch.from_numpy(law.copy()).to(p_V.device), matches

    def branching(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        p_MV, q_MV = profile.exact()
        result = torch.zeros(entries_Mk.shape, dtype=torch.float64, device=p_MV.device)
        # nodes with equal distributions share the program
        V = p_MV.shape[-1]
        pairs_UW, place_M = torch.cat([p_MV, q_MV], dim=-1).unique(dim=0, return_inverse=True)
        solved = [self.winner(pair_W[:V], pair_W[V:], entries_Mk.shape[-1]) for pair_W in pairs_UW]
        for row, entries in enumerate(entries_Mk.tolist()):
            p_V, (r_V, matches) = p_MV[row], solved[int(place_M[row])]
            wins_k = torch.tensor(_tournament(entries, matches), dtype=torch.float64, device=p_V.device)
            accept_k = divide(p_V[entries], r_V[entries]).clamp(max=1)
            left_V = (p_V - r_V).clamp(min=0)
            rejected = (wins_k * (1 - accept_k)).sum()
            landed_k = rejected * divide(left_V[entries], left_V.sum())
            first = torch.tensor([entries.index(token) for token in entries], device=p_V.device)
            result[row].index_add_(0, first, wins_k * accept_k)
            result[row] += landed_k.masked_fill(is_copy(entries_Mk[row : row + 1])[0], 0.0)
        return result

    def leftover(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        p_MV, q_MV = profile.exact()
        V = p_MV.shape[-1]
        pairs_UW, place_M = torch.cat([p_MV, q_MV], dim=-1).unique(dim=0, return_inverse=True)
        laws = [self.winner(pair_W[:V], pair_W[V:], entries_Mk.shape[-1])[0] for pair_W in pairs_UW]
        r_MV = torch.stack(laws)[place_M]
        return (p_MV - r_MV).clamp_(min=0).scatter_(-1, entries_Mk, 0.0)


def _tournament(entries: list[int], matches: list[Match]) -> list[float]:
    """P(each entry is the winner of all its matches), given the drafted tokens."""
    wins = [1.0]
    for number, round_ in enumerate(matches, 1):
        stays = [round_.wins(entries[i], entries[number]) for i in range(number)]
        wins = [w * s for w, s in zip(wins, stays, strict=True)] + [
            sum(w * (1 - s) for w, s in zip(wins, stays, strict=True))
        ]
    return wins
