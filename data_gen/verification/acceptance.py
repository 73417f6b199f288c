"""The optimal acceptance at one node, which is the most that any lossless verifier can reach.

Acceptance is the probability, over the drafts too, that a node's token is one of its drafted
children. MDSD (Hu et al. 2025, arXiv 2502.18779): `alpha* = 1 + min_H [p(H) - Q(H)]` with
`Q(H) = P(all drafts lie in H)`, where only the prefixes in ascending `p/q` need be tried.

Legend: V vocabulary, P prefixes of the vocabulary (the empty one included), T quadrature nodes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen.verification.distributions import Rows
from data_gen.verification.ranking import in_rank_order
from selector.actions import GREEDY, IID, STYLES, WITHOUT_REPLACEMENT

LOG_STEP = 0.15  # of the quadrature over log t


def optimal_acceptance(
    target_probs_V: Tensor, draft_probs_V: Tensor, k: int, style: str = IID
) -> float:
    """`alpha*` of a node with k drafts; ValueError for an unknown style or k < 1."""
    if style not in STYLES or k < 1:
        raise ValueError(
            f"no optimal acceptance of {k} drafts of style {style!r}; styles are "
            f"{', '.join(STYLES)}"
        )
    rows = Rows(target_probs_V.cpu().double()[None], draft_probs_V.cpu().double()[None])
    node = rows.at(torch.zeros(1, dtype=torch.int64))
    if style == GREEDY:
        (p_V,), (q_V,) = node.exact()
        likely_V = q_V.argsort(descending=True, stable=True)
        top_V = likely_V[: k - 1]
        off_V = q_V.index_fill(0, top_V, 0.0)
        if off_V.sum() == 0:
            return float(p_V[likely_V[:k]].sum())
        rest_V = p_V.index_fill(0, top_V, 0.0).minimum(off_V / off_V.sum())
        return float(p_V[top_V].sum() + rest_V.sum())
    (p_V,), (q_V,) = node.exact()
    by_ratio_V = in_rank_order(node).rows.tokens_PS[0].flip(0)  # in ascending p/q
    p_V = p_V[by_ratio_V]
    q_V = q_V[by_ratio_V]
    drafted_V = q_V > 0
    p_V = p_V[drafted_V]
    q_V = q_V[drafted_V]
    p_P = pad(p_V.cumsum(0), (1, 0))
    inside_P = pad(q_V.cumsum(0), (1, 0)) ** k
    if style == WITHOUT_REPLACEMENT and k > 1:
        inside_P = torch.from_numpy(_all_inside(q_V.numpy(), k))
    return float(1 + (p_P - inside_P).min().clamp(max=0))


def _all_inside(q_V: np.ndarray, k: int) -> np.ndarray:
    """P(the first k draws without replacement lie in a prefix), for every prefix of the given
    order, [P].

    The draws are the arrivals of independent exponential clocks with rates `q`. With `h` the rate
    outside the prefix, the probability is `int h exp(-h t) P(at least k inside have rung by t) dt`.
    The count is a sum of independent events, which is updated token by token. The trapezoidal rule
    over log t is exact to about 1e-12.
    """
    k = min(k, len(q_V))
    outside_P = np.concatenate([q_V[::-1].cumsum()[::-1], [0.0]])
    t_T = np.exp(np.arange(-40.0, 4.0 - np.log(q_V.min()), LOG_STEP))
    count_kT = np.zeros((k, len(t_T)))  # P(exactly 0 .. k - 1 have rung)
    count_kT[0] = 1.0
    inside_P = np.zeros(len(q_V) + 1)
    enough_T = np.zeros_like(t_T)
    for n, q in enumerate(q_V, 1):
        rung_T = -np.expm1(-q * t_T)
        enough_T += count_kT[-1] * rung_T
        count_kT[1:] += rung_T * (count_kT[:-1] - count_kT[1:])
        count_kT[0] *= 1 - rung_T
        h = outside_P[n]
        inside_P[n] = LOG_STEP * (h * t_T * np.exp(-h * t_T)) @ enough_T
    inside_P[len(q_V)] = 1.0  # nothing is outside
    return inside_P
