"""The priority rule, which is new here: it comes close to optimal transport in one pass over the vocabulary.

The first alive child in descending `m/q` is selected. At each node with k children:

    A = 1
    for x in the vocabulary, by descending m(x) / q(x):
        a(x) = 1 if A^k - (A - q(x))^k <= m(x), else (A - (A^k - m(x))^(1/k)) / q(x);   A <- A - a(x) q(x)
    each child is alive with probability a(x);  the first alive one in this order is selected
    if none is alive, the extra token is drawn from m less the flow

The pass is sequential, so it is compiled, and rows of a GPU are brought to the host for it. Along a text many questions
are the same, and they share a pass.

Legend: N rows, M questions, V vocabulary in rank order, k child-list entries.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_gen.verification.distributions import NodeDistributions, by_ratio, first_accepted
from data_gen.verification.selection import Lifted, Selection, SelectionRule, TopDownRule
from selector.jit import jit

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

NOTHING = 1e-14  # of `A^k`: below this only rounding errors are left


class FirstInRank(SelectionRule):
    """A token is alive with the largest probability for which its flow stays below `m`, given those before it."""

    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        places_NV, p_NV, q_NV = _on_host(*node.rows.ranked(node.nodes_M))
        nodes_M, own_M, taken_Mk = _on_host(node.nodes_M, weights_M, entries_Mk)
        order_M = np.lexsort((own_M, nodes_M))  # the same questions stand together
        found = _selected(places_NV, p_NV, q_NV, nodes_M, own_M, taken_Mk, order_M)
        return Selection(*(torch.from_numpy(each).to(node.rows.device) for each in found))

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        places_NV, p_NV, q_NV = _on_host(*node.rows.ranked(node.nodes_M))
        nodes_M, own_M = _on_host(node.nodes_M, weights_M)
        left_MV = _remainders(places_NV, p_NV, q_NV, nodes_M, own_M, entries_Mk.shape[-1])
        return torch.from_numpy(left_MV).to(node.rows.device)

    def choose(self, node: NodeDistributions, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
        order_Mk = by_ratio(node, entries_Mk)
        return torch.zeros_like(alive_Mk).scatter_(-1, order_Mk, first_accepted(alive_Mk.gather(-1, order_Mk)))


def _on_host(*tensors: Tensor) -> list[NDArray]:
    return [each.cpu().contiguous().numpy() for each in tensors]


@jit
def _selected(
    places_NV: Integers,
    p_NV: Array,
    q_NV: Array,
    nodes_M: Integers,
    weights_M: Array,
    entries_Mk: Integers,
    order_M: Integers,
) -> tuple[Array, Array, Array]:
    k = entries_Mk.shape[1]
    alive_Mk, left_Mk, flow_M = np.empty(entries_Mk.shape), np.empty(entries_Mk.shape), np.empty(len(nodes_M))
    alive_V, flow_V = np.empty(p_NV.shape[1]), np.empty(p_NV.shape[1])
    flow, before = 0.0, -1
    for m in order_M:
        node, weight = nodes_M[m], weights_M[m]
        if before < 0 or node != nodes_M[before] or weight != weights_M[before]:
            flow = _scan(p_NV[node], q_NV[node], weight, k, alive_V, flow_V)
        flow_M[m], before = flow, m
        for i in range(k):
            place = places_NV[node, entries_Mk[m, i]]
            alive_Mk[m, i] = alive_V[place]
            left_Mk[m, i] = max(weight * p_NV[node, place] - flow_V[place], 0.0)
    return alive_Mk, flow_M, left_Mk


@jit
def _remainders(places_NV: Integers, p_NV: Array, q_NV: Array, nodes_M: Integers, weights_M: Array, k: int) -> Array:
    left_MV = np.empty((len(nodes_M), p_NV.shape[1]))
    alive_V, flow_V = np.empty(p_NV.shape[1]), np.empty(p_NV.shape[1])
    for m in range(len(nodes_M)):
        node = nodes_M[m]
        _scan(p_NV[node], q_NV[node], weights_M[m], k, alive_V, flow_V)
        for token in range(p_NV.shape[1]):
            place = places_NV[node, token]
            left_MV[m, token] = max(weights_M[m] * p_NV[node, place] - flow_V[place], 0.0)
    return left_MV


@jit
def _scan(p_V: Array, q_V: Array, weight: float, k: int, alive_V: Array, flow_V: Array) -> float:
    """Write P(a draw of the token is alive) and the token's flow for k drafts, in rank order; return the whole flow.

    `A` is one minus the alive mass of the tokens so far, and `rest` is `A^k`. A token that is always alive takes `q`
    from `A`; one whose target is the limit takes `m` from `A^k`, and a run of these is summed there. A token that the
    scan does not reach is never alive, which is lossless, too: once `A^k` is lost in rounding, nothing is left.
    """
    alive_V[:], flow_V[:] = 0.0, 0.0
    A, rest, total = 1.0, 1.0, 0.0
    least, limited = NOTHING ** (1 / k), False
    for n in range(len(q_V)):
        q, m = q_V[n], weight * p_V[n]
        if min(q, m) <= 0 or least >= A:  # nor are later ones drafted, or alive
            break
        always = min(q, A) * _powers(A, max(A - q, 0.0), k)  # A^k - (A - q)^k, the flow if always alive
        if always <= m:
            limited = False
            alive_V[n], flow_V[n] = 1.0, always
            A = max(A - q, 0.0)
        else:
            if not limited:
                limited, rest = True, A**k
            rest = max(rest - m, 0.0)
            after = _root(rest, k)
            alive_V[n], flow_V[n] = min(m / (q * _powers(A, after, k)), 1.0), m
            A = after
        total += flow_V[n]
    return total


@jit
def _powers(a: float, b: float, k: int) -> float:
    total = last = 1.0
    for _ in range(k - 1):
        last *= b
        total = total * a + last
    return total


@jit
def _root(x: float, k: int) -> float:
    if k == 2:
        return np.sqrt(x)
    if k == 4:
        return np.sqrt(np.sqrt(x))
    return x ** (1 / k)


class Priority(TopDownRule):
    name = "priority"
    rule = FirstInRank()


class LiftedPriority(Lifted):
    name = "lifted_priority"
    rule = FirstInRank()
