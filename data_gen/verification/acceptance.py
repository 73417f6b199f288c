"""Acceptance at one node, exact: of every rule in closed form, and of the best verifier that there can be.

`alpha` is the probability that a node's token is one of its drafted children, over the drafts too. MDSD (Hu et al.
2025) gives the optimum `alpha* = 1 + min_H [p(H) - Q(H)]` with `Q(H) = P(all drafts lie in H)`, where only the prefixes
in ascending `p/q` need be tried.

Legend: V vocabulary, P prefixes of the vocabulary (the empty one included), T quadrature nodes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from data_gen.verification.base import GREEDY, IID, STYLES, WITHOUT_REPLACEMENT
from data_gen.verification.khisti import Khisti
from data_gen.verification.priority import scan
from data_gen.verification.profile import NodeDistributions, Rows, divide
from data_gen.verification.specinfer import rounds
from data_gen.verification.spectr import solve

LOG_STEP = 0.15  # of the quadrature over log t
CLOSED_FORMS = ("nss", "naive", "naive_tree", "spectr", "specinfer", "khisti", "priority")


def acceptance(name: str, target_probs_V: Tensor, draft_probs_V: Tensor, k: int) -> float:
    """P(the token at a node is one of its k i.i.d. children), for a top-down verifier; a lower bound for `khisti`.

    Raises:
        ValueError: no closed form is known under that name, or k < 1.
    """
    if name not in CLOSED_FORMS or k < 1:
        raise ValueError(f"no closed-form acceptance of {name!r} with {k} drafts; known are {', '.join(CLOSED_FORMS)}")
    profile = _profile(target_probs_V, draft_probs_V)
    p_V, q_V = (rows_MV[0] for rows_MV in profile.exact())
    one_M = profile.ones()
    if name == "nss":
        return float((p_V * (1 - (1 - q_V) ** k)).sum())
    if name in ("naive", "naive_tree"):
        reached_V = 1 - (1 - q_V) ** (k - 1 if name == "naive_tree" else 0)  # the others' chance to be hit
        return float(p_V.minimum(q_V).sum() + ((p_V - q_V).clamp(min=0) * reached_V).sum())
    if name == "specinfer":
        return _specinfer(profile, p_V, q_V, k)
    if name == "spectr":
        r_M, f_M, beta_M = solve(profile, one_M, k)
        dead_V = (q_V - p_V / r_M).clamp(min=0)
        return _selected_or_hit(p_V - f_M * (p_V / r_M).minimum(q_V), dead_V, float(f_M * beta_M), k)
    if name == "priority":
        alive_MV, flow_MV = scan(profile.ranked, one_M, k)
        places_V = profile.ranked.places_MV[0]
        return _selected_or_hit(p_V - flow_MV[0][places_V], q_V * (1 - alive_MV[0][places_V]), float(flow_MV.sum()), k)
    r_V, _ = Khisti().winner(p_V, q_V, k)
    return float(p_V.minimum(r_V).sum())


def _selected_or_hit(left_V: Tensor, dead_V: Tensor, flow: float, k: int) -> float:
    """A draft is selected; or none is, all k are dead, and the draw from what is left hits one of them."""
    dead_V, left_V = (divide(row_V.clamp(min=0), row_V.clamp(min=0).sum()) for row_V in (dead_V, left_V))
    return flow + (1 - flow) * float((left_V * (1 - (1 - dead_V) ** k)).sum())


def _specinfer(profile: NodeDistributions, p_V: Tensor, q_V: Tensor, k: int) -> float:
    a_Mr, b_Mr = rounds(profile, torch.ones(1, k, dtype=torch.float64, device=p_V.device))
    rejected, missed_V = 1.0, torch.ones_like(p_V)
    p_i_V = p_V
    for i in range(k):
        p_i_V = (a_Mr[0, i] * p_V - b_Mr[0, i] * q_V).clamp(min=0)
        left = 1 - float(p_i_V.minimum(q_V).sum())
        rejected *= left
        missed_V = missed_V * (1 - divide((q_V - p_i_V).clamp(min=0), torch.full_like(q_V, left)))
    p_k_V = (a_Mr[0, k] * p_V - b_Mr[0, k] * q_V).clamp(min=0)
    return 1 - rejected + rejected * float((p_k_V * (1 - missed_V)).sum())


def optimal_acceptance(target_probs_V: Tensor, draft_probs_V: Tensor, k: int, style: str = IID) -> float:
    """`alpha*`: the largest acceptance that any lossless verifier can have at a node with k drafts.

    Raises:
        ValueError: an unknown style, or k < 1.
    """
    if style not in STYLES or k < 1:
        raise ValueError(f"no optimal acceptance of {k} drafts of style {style!r}; styles are {', '.join(STYLES)}")
    profile = _profile(target_probs_V, draft_probs_V)
    p_V, q_V = (rows_MV[0] for rows_MV in profile.exact())
    if style == GREEDY:
        top_V = q_V.topk(min(k - 1, len(q_V))).indices
        off_V = q_V.index_fill(0, top_V, 0.0)
        on_top = p_V[top_V][q_V[top_V] > 0].sum()
        rest_V = p_V.index_fill(0, top_V, 0.0).minimum(divide(off_V, off_V.sum()))
        return float(on_top + rest_V.sum())
    ranked = profile.ranked
    drafted_V = ranked.q_MV[0] > 0
    p_P = _prefix_sums(ranked.p_MV[0][drafted_V].flip(0))
    q_up_V = ranked.q_MV[0][drafted_V].flip(0)  # ascending p/q
    if style == WITHOUT_REPLACEMENT and k > 1:
        inside_P = torch.from_numpy(_all_inside(q_up_V.cpu().numpy(), k)).to(p_P.device)
    else:
        inside_P = _prefix_sums(q_up_V) ** k
    return float(1 + (p_P - inside_P).min().clamp(max=0))


def _all_inside(q_V: np.ndarray, k: int) -> np.ndarray:
    """P(the first k draws without replacement lie in a prefix), for every prefix of the given order, [P].

    The draws are the arrivals of independent exponential clocks of rates `q`. With `h` the rate outside the prefix,
    the probability is `int h exp(-h t) P(at least k inside have rung by t) dt`; the count is a sum of independent
    events, followed token by token. In log t the trapezoidal rule is exact to about 1e-12.
    """
    k = min(k, len(q_V))
    outside_P = np.concatenate([q_V[::-1].cumsum()[::-1], [0.0]])
    t_T = np.exp(np.arange(-40.0, 4.0 - np.log(q_V.min()), LOG_STEP))
    count_kT = np.zeros((k, len(t_T)))  # P(exactly 0 .. k - 1 have rung)
    count_kT[0] = 1.0
    result = np.zeros(len(q_V) + 1)
    enough_T = np.zeros_like(t_T)
    for n, q in enumerate(q_V, 1):
        rung_T = -np.expm1(-q * t_T)
        enough_T += count_kT[-1] * rung_T
        count_kT[1:] += rung_T * (count_kT[:-1] - count_kT[1:])
        count_kT[0] *= 1 - rung_T
        h = outside_P[n]
        result[n] = LOG_STEP * (h * t_T * np.exp(-h * t_T)) @ enough_T
    result[len(q_V)] = 1.0  # nothing is outside
    return result


def _prefix_sums(row_V: Tensor) -> Tensor:
    return torch.cat([row_V.new_zeros(1), row_V.cumsum(0)])


def _profile(p_V: Tensor, q_V: Tensor) -> NodeDistributions:
    rows = Rows(p_V.double().unsqueeze(0), q_V.double().unsqueeze(0))
    return rows.profile(torch.zeros(1, dtype=torch.int64, device=p_V.device))
