"""What a verifier is, and the two walks over the tree that verifiers share.

A verifier ends at one node of the tree (the accepted prefix) and adds one token. Its *law* is the
exact joint distribution of both, given the tree: where the verifier ends (`stops`), times what it
then adds (`extra`). Top-down verifiers ask a solver at every node which child to move to. Bottom-up
verifiers split a node's weight over its children and accept from the leaves up. Both process the
nodes with equally many children together.

Legend: N tree nodes, M nodes taken at once, V vocabulary, k child-list entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_gen.trees import DraftTree, NodeGroup
from data_gen.verification.distributions import (
    NodeDistributions,
    Rows,
    divide,
    first_accepted,
    sample,
)
from selector.actions import IID

# the extra token's law, [M, V] up to a factor, by entries_Mk
Leftover = Callable[[NodeDistributions, Tensor], Tensor]


class Verdict(NamedTuple):
    """One draw of a verifier: the last accepted node, and the token that follows it."""

    node: int
    token: int


class VerifierLaw(NamedTuple):
    stops_N: Tensor  # P(accepted node), float64
    # the laws of the extra token at M given nodes, [M, V] up to a factor
    extra: Callable[[Sequence[int]], Tensor]


class Verifier(ABC):
    """A verifier that is lossless for the draft samplings in `styles`; `style` is the one in
    use."""

    name: ClassVar[str]
    styles: ClassVar[tuple[str, ...]] = (IID,)

    def __init__(self, style: str = IID) -> None:
        if style not in self.styles:
            raise ValueError(
                f"{self.name} is not lossless for style {style!r}; it is for "
                f"{', '.join(self.styles)}"
            )
        self.style = style

    def law(self, tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor) -> Tensor:
        """P(accepted node, extra token) given the tree, exact; float64 [N, V], sums to one.

        Rows are the distributions after each node, in node order, in float64, float32 or bf16; the
        draft's rows of leaves may hold anything. ValueError unless there are as many as nodes.
        """
        stops_N, extra_of = self._of(tree, target_probs_NV.double(), draft_probs_NV.double())
        extra_NV = extra_of(range(len(tree)))
        return stops_N.unsqueeze(-1) * divide(extra_NV, extra_NV.sum(-1, keepdim=True))

    def block_efficiency(
        self, tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor
    ) -> float:
        """E[tau + 1] given the tree, in tokens: the accepted tokens and the extra one. Rows,
        [N, V], and errors are those of `law`."""
        stops_N = self._of(tree, target_probs_NV.double(), draft_probs_NV.double()).stops_N
        return float((stops_N * (tree.depths_N.to(stops_N.device) + 1)).sum())

    def verify(
        self,
        tree: DraftTree,
        target_probs_NV: Tensor,
        draft_probs_NV: Tensor,
        generator: torch.Generator,
    ) -> Verdict:
        """One draw from the law, computed in the rows' own precision: the accepted node and the
        extra token. Rows, [N, V], and errors are those of `law`; the generator lives on their
        device."""
        stops_N, extra_of = self._of(tree, target_probs_NV, draft_probs_NV)
        node = int(sample(stops_N, 1, generator))
        return Verdict(node, int(sample(extra_of([node])[0], 1, generator)))

    def _of(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> VerifierLaw:
        if not len(tree) == len(p_NV) == len(q_NV):
            counts = f"target has {len(p_NV)}, draft {len(q_NV)}"
            raise ValueError(f"a tree of {len(tree)} nodes needs as many rows; {counts}")
        inner_M = torch.tensor([n for n in range(len(tree)) if tree.children(n)], dtype=torch.int64)
        return self._verifier_law(tree, Rows(p_NV, q_NV, inner_M))

    @abstractmethod
    def _verifier_law(self, tree: DraftTree, rows: Rows) -> VerifierLaw: ...


class TopDown(Verifier):
    """One optimal-transport solver, applied from the root down until it yields a token that is not
    a child.

    `entries_Mk` are the nodes' child tokens in branch order, duplicates included.
    """

    def pull(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        """P(the solver yields this child's token), [M, k]: pooled at a token's first entry, 0 at
        its copies."""
        if entries_Mk.shape[-1] > 1:
            return self.branching(node, entries_Mk)
        return self.accept(*node.at(entries_Mk))

    def accept(self, p: Tensor, q: Tensor) -> Tensor:
        """P(an only child is accepted), from the two probabilities of its token, in any shape."""
        return divide(p, q).clamp_(max=1)

    @abstractmethod
    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        """`pull` for k >= 2. With one child, the solvers are speculative sampling,
        `min(1, p/q)`."""

    @abstractmethod
    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        """The law of the extra token where no child is taken, [M, V] up to a factor, for any k."""

    def _verifier_law(self, tree: DraftTree, rows: Rows) -> VerifierLaw:
        stops_N = self._chain_stops(tree, rows) if tree.is_chain else self._tree_stops(tree, rows)
        return VerifierLaw(stops_N, lambda nodes: extra(tree, rows, nodes, self.leftover))

    def _chain_stops(self, tree: DraftTree, rows: Rows) -> Tensor:
        reach = 1.0
        stops: list[float] = []
        for accept in self.accept(*along_chain(tree, rows)).tolist():
            stops.append(reach * (1 - accept))
            reach *= accept
        return torch.tensor([*stops, reach], dtype=torch.float64, device=rows.device)

    def _tree_stops(self, tree: DraftTree, rows: Rows) -> Tensor:
        # P(parent -> node)
        steps_N = torch.zeros(len(tree), dtype=torch.float64, device=rows.device)
        steps_N[tree.roots] = 1.0
        for group in tree.groups():
            nodes_M, entries_Mk, children_Mk = group.to(rows.device)
            pull_Mk = self.pull(rows.at(nodes_M), entries_Mk)
            steps_N.index_add_(0, children_Mk.flatten(), pull_Mk.flatten())
        reach_N = steps_N[tree.paths_ND.to(rows.device)].prod(-1)
        below = (tree.parents_N >= 0).to(rows.device)
        parents_M = tree.parents_N.to(rows.device)[below]
        return reach_N.index_add(0, parents_M, -reach_N[below]).clamp_(min=0)


class Split(NamedTuple):
    entry_Mk: Tensor  # entry weights, in entry order; 0 at further copies of a token
    final_M: Tensor  # the node's own weight once all children are rejected
    # entries in the order of visits; None is the order of first appearance
    order_Mk: Tensor | None = None


class BottomUp(Verifier):
    """A rule splits a node's weight over its children, and acceptance is decided from the leaves
    up.

    A subtree that is entered with weight `b` accepts with probability `b` on average over its own
    draws. A node whose children have all been rejected is a leaf with the remaining weight
    (Traversal Verification, algorithm 2). With one child every rule is Block Verification,
    `min(1, w p/q)`. `entries_Mk` are as in `TopDown`.
    """

    @abstractmethod
    def split(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        """The rule for k >= 2; `weights_M` are the nodes' own entry weights."""

    @abstractmethod
    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        """The law of the extra token at a node whose children are all rejected, for k >= 2."""

    @staticmethod
    def leave(node: NodeDistributions, weights_M: Tensor) -> Tensor:
        return left_over(weights_M, weights_M - node.excess(weights_M, node.ones()))

    def _verifier_law(self, tree: DraftTree, rows: Rows) -> VerifierLaw:
        if tree.is_chain:
            stops_N, weights_N = self._chain_stops(tree, rows)
        else:
            stops_N, weights_N = self._tree_stops(tree, rows)
        leftover = partial(self._leftover, weights_N)
        return VerifierLaw(stops_N, lambda nodes: extra(tree, rows, nodes, leftover))

    def _chain_stops(self, tree: DraftTree, rows: Rows) -> tuple[Tensor, Tensor]:
        weights = [1.0]
        for ratio in divide(*along_chain(tree, rows)).tolist():
            weights.append(min(1.0, weights[-1] * ratio))
        weights_N = torch.tensor(weights, dtype=torch.float64, device=rows.device)
        inner_M = torch.arange(len(tree) - 1, device=rows.device)
        accepts = [*self.leave(rows.at(inner_M), weights_N[:-1]).tolist(), weights[-1]]
        left = 1.0
        stops: list[float] = []
        for accept in reversed(accepts):
            stops.append(left * accept)
            left *= 1 - accept
        return torch.tensor(stops[::-1], dtype=torch.float64, device=rows.device), weights_N

    def _tree_stops(self, tree: DraftTree, rows: Rows) -> tuple[Tensor, Tensor]:
        weights_N = torch.zeros(len(tree), dtype=torch.float64, device=rows.device)
        weights_N[tree.roots] = 1.0
        parents_N = tree.parents_N.to(rows.device).clamp(min=0)
        tokens_N = tree.tokens_N.to(rows.device).clamp(min=0)
        ratio_N = divide(*rows.at(parents_N).at(tokens_N.unsqueeze(-1)))[:, 0]
        finals: list[tuple[Tensor, Tensor]] = []
        orders: list[tuple[NodeGroup, Tensor]] = []
        for nodes in tree.nodes_by_depth[:-1]:
            for group in tree.groups(nodes):
                nodes_M, entries_Mk, children_Mk = group.to(rows.device)
                if entries_Mk.shape[-1] == 1:
                    entry_Mk = (weights_N[nodes_M] * ratio_N[children_Mk[:, 0]]).clamp_(max=1)
                else:
                    entry_Mk, final_M, order_Mk = self.split(
                        rows.at(nodes_M), weights_N[nodes_M], entries_Mk
                    )
                    finals.append((nodes_M, final_M))
                    if order_Mk is not None:
                        orders.append((group, order_Mk))
                weights_N.index_add_(0, children_Mk.flatten(), entry_Mk.flatten())
        finals_N = weights_N.clone()  # a leaf's weight is its entry weight
        with_one_child = [node for node in range(len(tree)) if len(tree.children(node)) == 1]
        if with_one_child:  # all at once
            nodes_M = torch.tensor(with_one_child, device=rows.device)
            finals.append((nodes_M, self.leave(rows.at(nodes_M), weights_N[nodes_M])))
        for nodes_M, final_M in finals:
            finals_N[nodes_M] = final_M
        visits = _children_by_visit(orders)
        visited = [torch.tensor(tree.postorder(visits, root)) for root in tree.roots]
        # S trees
        order_SN = pad_sequence(visited, batch_first=True, padding_value=-1).to(rows.device)
        accept_SN = finals_N[order_SN.clamp(min=0)] * (order_SN >= 0)
        stops_N = torch.zeros_like(finals_N)
        stops_N.index_add_(0, order_SN.clamp(min=0).flatten(), first_accepted(accept_SN).flatten())
        return stops_N, weights_N

    def _leftover(self, weights_N: Tensor, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        weights_M = weights_N[node.nodes_M]
        if entries_Mk.shape[-1] == 1:
            return node.residual(weights_M, node.ones())
        return self.remainder(node, weights_M, entries_Mk)


def along_chain(tree: DraftTree, rows: Rows) -> tuple[Tensor, Tensor]:
    """p and q of each token of a chain, [N - 1] each."""
    tokens_N1 = tree.tokens_N[1:].to(rows.device).unsqueeze(-1)
    p_N1, q_N1 = rows.at(torch.arange(len(tree) - 1, device=rows.device)).at(tokens_N1)
    return p_N1[:, 0], q_N1[:, 0]


def left_over(weights_M: Tensor, flow_M: Tensor) -> Tensor:
    """The weight of a node after its children, which took `flow` of it on average, were all
    rejected."""
    # a weight of 1 stays 1: the root must accept in the end
    left_M = divide((weights_M - flow_M).clamp(min=0), 1 - flow_M).clamp_(max=1)
    return torch.where(weights_M < 1, left_M, weights_M)


def extra(tree: DraftTree, rows: Rows, nodes: Sequence[int], leftover: Leftover) -> Tensor:
    """The laws of the extra token at M nodes, [M, V] up to a factor."""
    extra_MV = rows.p_NV[list(nodes)]  # what a leaf adds
    row_of = {node: at for at, node in enumerate(nodes)}
    for group in tree.groups(nodes):
        at = [row_of[node] for node in group.nodes_M.tolist()]
        nodes_m, entries_mk, _ = group.to(rows.device)
        left_mV = leftover(rows.at(nodes_m), entries_mk).to(extra_MV.dtype)
        # where nothing is left, the verifier ends with probability 0, or 1e-17 after rounding
        extra_MV[at] = torch.where(left_mV.sum(-1, keepdim=True) > 0, left_mV, extra_MV[at])
    return extra_MV


def _children_by_visit(orders: list[tuple[NodeGroup, Tensor]]) -> dict[int, list[int]]:
    if not orders:
        return {}
    # one transfer from the device for the whole tree
    places = iter(torch.cat([order_Mk.flatten() for _, order_Mk in orders]).tolist())
    visits: dict[int, list[int]] = {}
    for group, _ in orders:
        child_lists = group.children_Mk.tolist()
        for node, children in zip(group.nodes_M.tolist(), child_lists, strict=True):
            visits[node] = [children[next(places)] for _ in children]
    return visits
