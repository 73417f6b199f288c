"""What a verifier is, and the two walks over the tree that verifiers share.

A verifier ends at one node of the tree (the accepted prefix) and adds one token. Its *law* is the
exact joint distribution of both, given the tree: where the verifier ends (`stops`), times what it
then adds (`extra`). Top-down verifiers ask a solver at every node which child to move to. Bottom-up
verifiers split a node's weight over its children and accept from the leaves up. The law takes the
nodes with equally many children together. A draw on the CPU visits one node after another, and
reads the rows of no other node.

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

from data_gen.trees import DraftTree
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


class Walk(NamedTuple):
    """What one draw is made from."""

    tree: DraftTree
    p_NV: Tensor
    q_NV: Tensor
    uniform_N: Sequence[float]  # a number in [0, 1) for the decision at each node

    def at(self, node: int) -> tuple[NodeDistributions, Tensor]:
        """The distributions after an inner node, and its child tokens, [1, k]."""
        row = slice(node, node + 1)
        entries = [self.tree.token(child) for child in self.tree.children(node)]
        rows = Rows(self.p_NV[row], self.q_NV[row])
        return rows.at(torch.tensor([0])), torch.tensor([entries])


class End(NamedTuple):
    node: int
    extra_V: Tensor  # the law of the extra token, up to a factor


class VerifierLaw(NamedTuple):
    stops_N: Tensor  # P(accepted node), float64 on the CPU
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
        stops_N1 = stops_N.to(extra_NV.device).unsqueeze(-1)
        return stops_N1 * divide(extra_NV, extra_NV.sum(-1, keepdim=True))

    def block_efficiency(
        self, tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor
    ) -> float:
        """E[tau + 1] given the tree, in tokens: the accepted tokens and the extra one. Rows,
        [N, V], and errors are those of `law`."""
        stops_N = self._of(tree, target_probs_NV.double(), draft_probs_NV.double()).stops_N
        return float((stops_N * (tree.depths_N + 1)).sum())

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
        if target_probs_NV.device.type == "cpu":
            _check_rows(tree, target_probs_NV, draft_probs_NV)
            uniform_N = torch.rand(len(tree), generator=generator, dtype=torch.float64).tolist()
            walk = Walk(tree, target_probs_NV, draft_probs_NV, uniform_N)
            node, extra_V = self._end(walk)
        else:  # one transfer for the whole tree
            stops_N, extra_of = self._of(tree, target_probs_NV, draft_probs_NV)
            node = int(sample(stops_N.to(target_probs_NV.device), 1, generator))
            (extra_V,) = extra_of([node])
        return Verdict(node, int(sample(extra_V, 1, generator)))

    def _of(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> VerifierLaw:
        _check_rows(tree, p_NV, q_NV)
        return self._verifier_law(tree, Rows(p_NV, q_NV))

    @abstractmethod
    def _verifier_law(self, tree: DraftTree, rows: Rows) -> VerifierLaw: ...

    @abstractmethod
    def _end(self, walk: Walk) -> End: ...


def _check_rows(tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> None:
    if not len(tree) == len(p_NV) == len(q_NV):
        counts = f"target has {len(p_NV)}, draft {len(q_NV)}"
        raise ValueError(f"a tree of {len(tree)} nodes needs as many rows; {counts}")


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
        # P(parent -> node)
        steps_N = torch.zeros(len(tree), dtype=torch.float64)
        steps_N[tree.roots] = 1.0
        for nodes_M, entries_Mk, children_Mk in tree.groups():
            pull_Mk = self.pull(rows.at(nodes_M), entries_Mk.to(rows.device)).cpu()
            steps_N.index_add_(0, children_Mk.flatten(), pull_Mk.flatten())
        reach_N = steps_N[tree.paths_ND].prod(-1)
        below = tree.parents_N >= 0
        stops_N = reach_N.index_add(0, tree.parents_N[below], -reach_N[below]).clamp_(min=0)
        return VerifierLaw(stops_N, lambda nodes: extra(tree, rows, nodes, self.leftover))

    def _end(self, walk: Walk) -> End:
        node = 0
        while children := walk.tree.children(node):
            at, entries_Mk = walk.at(node)
            passed = 0.0
            for child, pull in zip(children, self.pull(at, entries_Mk)[0].tolist(), strict=True):
                passed += pull
                if walk.uniform_N[node] < passed:
                    node = child
                    break
            else:
                left_MV = self.leftover(at, entries_Mk)
                return End(node, _or_target(left_MV, walk.p_NV[node])[0])
        return End(node, walk.p_NV[node])


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
        stops_N, weights_N = self._stops(tree, rows)
        leftover = partial(self._leftover, weights_N)
        return VerifierLaw(stops_N, lambda nodes: extra(tree, rows, nodes, leftover))

    def _end(self, walk: Walk) -> End:
        end = self._visit(walk, 0, 1.0)
        assert end is not None  # the root's weight stays 1
        return end

    def _visit(self, walk: Walk, node: int, weight: float) -> End | None:
        """The end in the subtree of a node that is entered with this weight; None if it accepts
        nothing."""
        # a node is accepted with at most its weight
        may_accept = walk.uniform_N[node] < weight
        children = walk.tree.children(node)
        if not children:
            return End(node, walk.p_NV[node]) if may_accept else None
        at, entries_Mk = walk.at(node)
        weights_M = torch.tensor([weight], dtype=torch.float64)
        final_M = None
        if len(children) == 1:
            entries = [min(1.0, weight * at.rows.ratio(walk.tree.token(children[0])))]
        else:
            entry_Mk, final_M, order_Mk = self.split(at, weights_M, entries_Mk)
            entries = entry_Mk[0].tolist()
            if order_Mk is not None:
                children = [children[place] for place in order_Mk[0].tolist()]
                entries = entry_Mk.gather(-1, order_Mk)[0].tolist()
        for child, entry in zip(children, entries, strict=True):
            if entry > 0:  # it is 0 at further copies of a token
                end = self._visit(walk, child, entry)
                if end is not None:
                    return end
        if not may_accept:
            return None
        if final_M is None:
            final_M = self.leave(at, weights_M)
        if walk.uniform_N[node] >= float(final_M):
            return None
        left_MV = self._leftover(weights_M, at, entries_Mk)
        return End(node, _or_target(left_MV, walk.p_NV[node])[0])

    def _stops(self, tree: DraftTree, rows: Rows) -> tuple[Tensor, Tensor]:
        """P(accepted node) and the nodes' entry weights, on the CPU, [N] each."""
        weights_N = torch.zeros(len(tree), dtype=torch.float64)
        weights_N[tree.roots] = 1.0
        tokens_N1 = tree.tokens_N.clamp(min=0).unsqueeze(-1).to(rows.device)
        ratio_N1 = divide(*rows.at(tree.parents_N.clamp(min=0)).at(tokens_N1)).cpu()
        finals: list[tuple[Tensor, Tensor]] = []
        visits: dict[int, list[int]] = {}
        for nodes in tree.nodes_by_depth[:-1]:
            for nodes_M, entries_Mk, children_Mk in tree.groups(nodes):
                weights_M = weights_N[nodes_M]
                if entries_Mk.shape[-1] == 1:
                    entry_Mk = (weights_M.unsqueeze(-1) * ratio_N1[children_Mk[:, 0]]).clamp_(max=1)
                else:
                    device = rows.device
                    split = self.split(
                        rows.at(nodes_M), weights_M.to(device), entries_Mk.to(device)
                    )
                    entry_Mk = split.entry_Mk.cpu()
                    finals.append((nodes_M, split.final_M.cpu()))
                    if split.order_Mk is not None:
                        visit_Mk = children_Mk.gather(-1, split.order_Mk.cpu())
                        visits.update(zip(nodes_M.tolist(), visit_Mk.tolist(), strict=True))
                weights_N.index_add_(0, children_Mk.flatten(), entry_Mk.flatten())
        finals_N = weights_N.clone()  # a leaf's weight is its entry weight
        with_one_child = [node for node in range(len(tree)) if len(tree.children(node)) == 1]
        if with_one_child:  # all at once
            nodes_M = torch.tensor(with_one_child)
            left_M = self.leave(rows.at(nodes_M), weights_N[nodes_M].to(rows.device))
            finals.append((nodes_M, left_M.cpu()))
        for nodes_M, final_M in finals:
            finals_N[nodes_M] = final_M
        visited = [torch.tensor(tree.postorder(visits, root)) for root in tree.roots]
        order_SN = pad_sequence(visited, batch_first=True, padding_value=-1)  # S trees
        accept_SN = finals_N[order_SN.clamp(min=0)] * (order_SN >= 0)
        stops_N = torch.zeros_like(finals_N)
        stops_N.index_add_(0, order_SN.clamp(min=0).flatten(), first_accepted(accept_SN).flatten())
        return stops_N, weights_N

    def _leftover(self, weights_N: Tensor, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        weights_M = weights_N.to(node.rows.device)[node.nodes_M]
        if entries_Mk.shape[-1] == 1:
            return node.residual(weights_M, node.ones())
        return self.remainder(node, weights_M, entries_Mk)


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
    for nodes_m, entries_mk, _ in tree.groups(nodes):
        at = [row_of[node] for node in nodes_m.tolist()]
        left_mV = leftover(rows.at(nodes_m), entries_mk.to(rows.device)).to(extra_MV.dtype)
        extra_MV[at] = _or_target(left_mV, extra_MV[at])
    return extra_MV


def _or_target(left_MV: Tensor, p_MV: Tensor) -> Tensor:
    """Where nothing is left, the verifier ends with probability 0, or 1e-17 after rounding."""
    return torch.where(left_MV.sum(-1, keepdim=True) > 0, left_MV, p_MV)
