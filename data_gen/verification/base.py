"""What a verifier is, and the two walks that all of them share.

A verifier ends at one node of the tree (the accepted prefix) and adds one token. Its *law* is the exact joint
distribution of both, given the tree. Sampling, block efficiency and losslessness all follow from the law's two
factors, so that is all a verifier computes: where it ends (`stops`), and what it then adds (`extra`).

Legend: N tree nodes, M nodes taken at once, V vocabulary, k child-list entries. Probabilities are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from data_gen.trees import DraftTree, NodeGroup
from data_gen.verification.profile import Profile, normalised, sample


class Verdict(NamedTuple):
    """One draw of a verifier: the last accepted node, and the token that follows it."""

    node: int
    token: int


class Verifier(ABC):
    """Lossless for the draft samplings in `styles`."""

    name: ClassVar[str]
    styles: ClassVar[tuple[str, ...]] = ("iid",)

    def law(self, tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor) -> Tensor:
        """P(accepted node, extra token) given the tree, exact; float64 [N, V], sums to one.

        Args:
            target_probs_NV: the target's distribution after each node, in node order; float64, float32 or bf16.
            draft_probs_NV: the draft's; rows of leaves may hold anything.
        """
        p_NV, q_NV = _rows(tree, target_probs_NV, draft_probs_NV)
        state = self._prepare(tree, p_NV, q_NV)
        return state.stops_N.unsqueeze(-1) * self._extra(tree, p_NV, q_NV, state, list(range(len(tree))))

    def block_efficiency(self, tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor) -> float:
        """E[tau + 1] given the tree, in tokens: accepted tokens and the extra one."""
        stops_N = self.stops(tree, target_probs_NV, draft_probs_NV)
        return float((stops_N * (tree.depths_N.to(stops_N.device) + 1)).sum())

    def stops(self, tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor) -> Tensor:
        """P(accepted node) given the tree, exact; float64 [N]."""
        return self._prepare(tree, *_rows(tree, target_probs_NV, draft_probs_NV)).stops_N

    def verify(
        self, tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor, generator: torch.Generator
    ) -> Verdict:
        """One draw from the law; the generator lives on the tensors' device."""
        p_NV, q_NV = _rows(tree, target_probs_NV, draft_probs_NV)
        state = self._prepare(tree, p_NV, q_NV)
        node = int(sample(state.stops_N, 1, generator))
        return Verdict(node, int(sample(self._extra(tree, p_NV, q_NV, state, [node])[0], 1, generator)))

    def _extra(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor, state: _State, nodes: Sequence[int]) -> Tensor:
        """The laws of the extra token given that the verifier ends at each of M nodes, [M, V]."""
        extra_MV = p_NV[nodes]  # what a leaf adds
        for group in tree.groups(nodes):
            place = [nodes.index(node) for node in group.nodes_M.tolist()]
            nodes_m, entries_mk, _ = group.to(p_NV.device)
            left_mV = self.leftover(Profile(p_NV, q_NV, nodes_m), state.weights_N[nodes_m], entries_mk)
            # nothing left: the verifier ends here with probability 0, or 1e-17 after rounding
            extra_MV[place] = torch.where(left_mV.sum(-1, keepdim=True) > 0, normalised(left_mV), extra_MV[place])
        return extra_MV

    @abstractmethod
    def _prepare(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> _State: ...

    @abstractmethod
    def leftover(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        """What the extra token is drawn from where no child is taken; [M, V], not normalised."""


class _State(NamedTuple):
    stops_N: Tensor  # P(the verifier ends at this node)
    weights_N: Tensor  # entry weights; ones for top-down verifiers, which have none


class TopDown(Verifier):
    """One optimal-transport solver, applied from the root down until it yields a token that is no child."""

    @abstractmethod
    def branching(self, profile: Profile, entries_Mk: Tensor) -> Tensor:
        """P(the solver yields this child's token), [M, k]: pooled at a token's first entry, 0 at its copies.

        Args:
            profile: the distributions after the nodes.
            entries_Mk: child tokens in branch order, duplicates included.
        """

    def _prepare(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> _State:
        steps_N = p_NV.new_zeros(len(tree))  # P(parent -> node)
        steps_N[0] = 1.0
        for nodes_M, entries_Mk, children_Mk in _groups(tree, None, p_NV):
            pull_Mk = self.branching(Profile(p_NV, q_NV, nodes_M), entries_Mk)
            steps_N.index_add_(0, children_Mk.flatten(), pull_Mk.flatten())
        reach_N = steps_N[tree.paths_ND.to(p_NV.device)].prod(-1)
        stops_N = reach_N.index_add(0, tree.parents_N[1:].to(p_NV.device), -reach_N[1:])
        return _State(stops_N.clamp_(min=0), torch.ones_like(stops_N))


class BottomUp(Verifier):
    """One rule that splits a node's weight over its children; acceptance is decided from the leaves up.

    A subtree entered with weight `b` accepts with probability `b` on average over its own draws. A node whose
    children have all been rejected is a leaf with the weight that is left (Traversal, algorithm 2; algorithms sheet,
    section 3).
    """

    @abstractmethod
    def enter(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        """Entry weights of the children, [M, k], 0 at further copies of a token.

        Args:
            profile: the distributions after the nodes.
            weights_M: the nodes' own entry weights.
            entries_Mk: child tokens in branch order, duplicates included.
        """

    @abstractmethod
    def leave(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        """The nodes' weights once all children are rejected, [M]; arguments as for `enter`."""

    def _prepare(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> _State:
        weights_N = p_NV.new_zeros(len(tree))
        weights_N[0] = 1.0
        for level in tree.levels[:-1]:
            for nodes_M, entries_Mk, children_Mk in _groups(tree, level, p_NV):
                entry_Mk = self.enter(Profile(p_NV, q_NV, nodes_M), weights_N[nodes_M], entries_Mk)
                weights_N.index_add_(0, children_Mk.flatten(), entry_Mk.flatten())
        finals_N = weights_N.clone()  # a leaf's weight is its entry weight
        for nodes_M, entries_Mk, _ in _groups(tree, None, p_NV):
            finals_N[nodes_M] = self.leave(Profile(p_NV, q_NV, nodes_M), weights_N[nodes_M], entries_Mk)
        order = torch.tensor(tree.postorder(), device=p_NV.device)
        accept = finals_N[order]
        not_before = torch.cat([accept.new_ones(1), (1 - accept[:-1]).cumprod(0)])
        return _State(torch.zeros_like(finals_N).index_copy_(0, order, accept * not_before), weights_N)


def _groups(tree: DraftTree, nodes: Sequence[int] | None, like: Tensor) -> list[NodeGroup]:
    return [group.to(like.device) for group in tree.groups(nodes)]


def _rows(tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor) -> tuple[Tensor, Tensor]:
    if not len(tree) == len(target_probs_NV) == len(draft_probs_NV):
        raise ValueError(
            f"a tree of {len(tree)} nodes needs as many rows; target has {len(target_probs_NV)}, "
            f"draft {len(draft_probs_NV)}"
        )
    return normalised(target_probs_NV), normalised(draft_probs_NV)
