"""Draws trees from the draft model: one delayed tree for decoding, or supertrees for labelling.

A delayed tree takes `L1 + L2` passes, the one over the root token included: a node's token is drawn from its parent's
row, so leaves need no pass. Branches are drafted side by side and merged only afterwards.

Legend: N tree nodes, W tokens of one pass, S samples, K branches, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from data_gen.models import CachedModel
from data_gen.sampling import Sampling
from data_gen.trees import DraftTree, Supertree, Topology
from data_gen.verification.base import GREEDY, IID
from data_gen.verification.profile import sample
from selector.actions import Action, ActionSpace


@dataclass
class Draft:
    """A drafted tree.

    Attributes:
        tree: equal prefixes merged.
        probs_NV: the draft's distribution after each node; zeros at leaves.
        hidden_ND: the draft's last hidden state at each node but the leaves and the root, by node id.
        row_of: for each node that the draft has passed, its row in the draft's cache; the root's is committed.
    """

    tree: DraftTree
    probs_NV: Tensor
    hidden_ND: dict[int, Tensor]
    row_of: dict[int, int]


def draft_tree(
    draft: CachedModel,
    root_probs_V: Tensor,
    action: Action,
    sampling: Sampling,
    generator: torch.Generator,
    style: str = IID,
) -> Draft:
    """Draft a delayed tree. The draft's cache already holds the root token.

    Args:
        draft: its committed rows end with the root token; the tree's rows are appended.
        root_probs_V: the draft's distribution after the root token.
        generator: lives on the device of `root_probs_V`.
        style: how the branches' first tokens are drawn; where the support is too small, there are fewer branches.
    """
    _, L1, L2 = action
    trunk: list[int] = []
    probs = [root_probs_V]  # of the rows passed so far, the root first
    hidden: list[Tensor] = []
    while len(trunk) < L1:
        trunk.append(int(sample(probs[-1], 1, generator)))
        if len(trunk) < L1 or L2 > 0:
            _pass(draft, torch.tensor([[trunk[-1]]]), action, len(trunk), sampling, probs, hidden)
    branches_KD = torch.zeros(1, 0, dtype=torch.int64)
    if L2 > 0:
        branches_KD = torch.tensor(draw_children(probs[-1], action.K, style, generator)).unsqueeze(-1)
    K = len(branches_KD)
    action = Action(K, L1, L2)
    for depth in range(L1 + 1, L1 + L2):
        _pass(draft, branches_KD[:, -1].unsqueeze(0), action, depth, sampling, probs, hidden)
        drawn_K1 = sample(torch.stack(probs[-K:]), 1, generator).cpu()
        branches_KD = torch.cat([branches_KD, drawn_K1], dim=-1)
    tree = DraftTree.from_paths(trunk, branches_KD.tolist())
    row_of = _rows_of(tree, L1, K)
    probs_NV = root_probs_V.new_zeros(len(tree), len(root_probs_V))
    probs_NV[0] = root_probs_V
    if row_of:
        probs_NV[list(row_of)] = torch.stack([probs[row + 1] for row in row_of.values()])
    return Draft(tree, probs_NV, {node: hidden[row] for node, row in row_of.items()}, row_of)


def draw_children(probs_V: Tensor, count: int, style: str, generator: torch.Generator) -> list[int]:
    """Tokens of a node's children, in order; fewer than `count` where a style without replacement runs out.

    Args:
        probs_V: the draft's distribution after the node.
        style: "iid"; "without_replacement", one draw after another; "greedy", the `count - 1` most probable tokens and
            one draw from the others.
    """
    if style == IID:
        return sample(probs_V, count, generator).tolist()
    left_V = probs_V.clone()
    tokens: list[int] = []
    if style == GREEDY:
        top = probs_V.topk(min(count - 1, len(probs_V))).indices
        tokens = [int(token) for token in top if probs_V[token] > 0]
        left_V[tokens] = 0
    while len(tokens) < count and bool((left_V > 0).any()):
        tokens.append(int(sample(left_V, 1, generator)))
        left_V[tokens[-1]] = 0
    return tokens


@torch.inference_mode()
def draft_topology(
    draft: CachedModel,
    root_probs_V: Tensor,
    topology: Topology,
    sampling: Sampling,
    generator: torch.Generator,
    style: str = IID,
) -> tuple[DraftTree, Tensor]:
    """Draft a tree of any shape, one pass per depth; the draft's cache already holds the root token.

    Returns:
        the tree, and the draft's distribution after each of its nodes, [N, V]; zeros at leaves.
    """
    device = draft.model.device
    children: list[list[int]] = [[] for _ in topology.parents]
    for node, parent in enumerate(topology.parents):
        if parent >= 0:
            children[parent].append(node)
    tokens: list[int | None] = [None] * len(topology.parents)
    probs = {-1: root_probs_V}
    passed: list[int] = []
    for depth, level in enumerate(topology.levels()):
        for parent in dict.fromkeys(topology.parents[node] for node in level):
            if parent in probs:
                siblings = [node for node in level if topology.parents[node] == parent]
                drawn = draw_children(probs[parent], len(siblings), style, generator)
                for node, token in zip(siblings, drawn, strict=False):
                    tokens[node] = token
        inner = [node for node in level if children[node] and tokens[node] is not None]
        if inner:
            passed += inner
            above = [_ancestors(topology, node) for node in inner]
            visible = torch.tensor([[row in seen for row in passed] for seen in above])
            offsets_W = torch.full((len(inner),), depth, device=device)
            output = draft.forward(torch.tensor([[tokens[n] for n in inner]], device=device), offsets_W, visible)
            probs |= dict(zip(inner, sampling.probabilities(output.logits_BWV[0]), strict=True))
    tree = DraftTree.from_topology(topology, tokens)
    probs_NV = root_probs_V.new_zeros(len(tree), len(root_probs_V))
    for node, row in probs.items():
        path = [tokens[n] for n in sorted(_ancestors(topology, node))]  # a parent has the smaller number
        probs_NV[tree.node_of([token for token in path if token is not None])] = row
    return tree, probs_NV


def _ancestors(topology: Topology, node: int) -> set[int]:
    """A node and all above it."""
    seen = set()
    while node >= 0:
        seen.add(node)
        node = topology.parents[node]
    return seen


def _pass(
    draft: CachedModel,
    tokens_1W: Tensor,
    action: Action,
    depth: int,
    sampling: Sampling,
    probs: list[Tensor],
    hidden: list[Tensor],
) -> None:
    """Pass the nodes of one depth; their distributions and hidden states are appended to `probs` and `hidden`."""
    width = tokens_1W.shape[1]
    device = draft.model.device
    offsets_W = torch.full((width,), depth - 1, device=device)
    output = draft.forward(tokens_1W.to(device), offsets_W, _visible(action.L1, action.K, depth))
    probs += sampling.probabilities(output.logits_BWV[0]).unbind(0)
    hidden += output.hidden_BWD[0].unbind(0)


@cache
def _visible(L1: int, K: int, depth: int) -> Tensor:
    """[W, R + W] bool for the pass over one depth: a branch sees the trunk and its own earlier tokens."""
    if depth <= L1:
        return torch.ones(1, depth, dtype=torch.bool)
    trunk = torch.ones(K, L1, dtype=torch.bool)
    return torch.cat([trunk, torch.eye(K, dtype=torch.bool).repeat(1, depth - L1)], dim=1)


def _rows_of(tree: DraftTree, L1: int, K: int) -> dict[int, int]:
    """Cache row of every node that was passed; merged nodes have several equal rows, of which the first is taken."""
    trunk = tree.path_to(tree.branch_nodes[0][0])
    rows = {node: row for row, node in enumerate(trunk)}
    for k, nodes in enumerate(tree.branch_nodes):
        for depth, node in enumerate(nodes[1:-1]):
            rows.setdefault(node, L1 + depth * K + k)
    if len(tree.branch_nodes[0]) == 1 and trunk:
        del rows[trunk[-1]]  # a bare trunk ends in a leaf
    return rows


@torch.inference_mode()
def draft_supertrees(
    draft: CachedModel,
    root_probs_V: Tensor,
    samples: int,
    space: ActionSpace,
    sampling: Sampling,
    generator: torch.Generator,
) -> list[tuple[Supertree, Tensor]]:
    """Draft independent supertrees side by side: `max_L1 + max_L2` passes for the trunks, `max_L2 - 1` for the rest.

    Args:
        draft: a cache of `samples` equal sequences that ends with the root token (`CachedModel.prefix`).
        root_probs_V: the draft's distribution after the root token.

    Returns:
        for each sample the supertree and the draft's distribution after each of its nodes, [N, V]; zeros
        at leaves.
    """
    L1s, L2, K = space.max_L1 + 1, space.max_L2, space.max_K - 1
    length = space.max_L1 + L2
    device = draft.model.device
    probs_SDV = root_probs_V.new_zeros(samples, length + 1, len(root_probs_V))  # along the trunk
    probs_SDV[:, 0] = root_probs_V
    trunk_SD = torch.zeros(samples, length, dtype=torch.int64, device=device)
    for depth in range(length):
        trunk_SD[:, depth] = sample(probs_SDV[:, depth], 1, generator)[:, 0]
        if depth + 1 < length:
            offset = torch.tensor([depth], device=device)
            output = draft.forward(trunk_SD[:, depth, None], offset, torch.ones(1, depth + 1, dtype=torch.bool))
            probs_SDV[:, depth + 1] = sampling.probabilities(output.logits_BWV[:, 0])
    width = L1s * K
    branches_SWD = torch.zeros(samples, width, L2, dtype=torch.int64, device=device)
    branch_probs_SWDV = root_probs_V.new_zeros(samples, width, L2, len(root_probs_V))  # after each branch token
    if width and L2:
        branches_SWD[:, :, 0] = sample(probs_SDV[:, :L1s], K, generator).flatten(1)
        start_W = torch.arange(L1s).repeat_interleave(K)
        sees_trunk = torch.arange(length - 1) < start_W.unsqueeze(-1)
        for depth in range(L2 - 1):
            visible = torch.cat([sees_trunk, torch.eye(width, dtype=torch.bool).repeat(1, depth + 1)], dim=1)
            output = draft.forward(branches_SWD[:, :, depth], (start_W + depth).to(device), visible)
            branch_probs_SWDV[:, :, depth] = sampling.probabilities(output.logits_BWV)
            branches_SWD[:, :, depth + 1] = sample(branch_probs_SWDV[:, :, depth], 1, generator)[..., 0]
    return [_merge(trunk_SD[s], branches_SWD[s], probs_SDV[s], branch_probs_SWDV[s], space) for s in range(samples)]


def _merge(
    trunk_D: Tensor, branches_WD: Tensor, probs_DV: Tensor, branch_probs_WDV: Tensor, space: ActionSpace
) -> tuple[Supertree, Tensor]:
    """One supertree and the distributions after its nodes, equal prefixes merged."""
    K = space.max_K - 1
    paths = branches_WD.tolist()
    tree = Supertree.from_paths(trunk_D.tolist(), {L1: paths[L1 * K : (L1 + 1) * K] for L1 in range(space.max_L1 + 1)})
    probs_NV = probs_DV.new_zeros(len(tree), probs_DV.shape[-1])
    # leaves first: where a leaf of one branch is an inner node of another path, the latter's row stays
    probs_NV[tree.branches_LKD[:, 1:, 1:].flatten()] = branch_probs_WDV.flatten(0, 1)
    inner = tree.branches_LKD[:, 1:, 1:-1].flatten()
    probs_NV[inner] = branch_probs_WDV[:, :-1].flatten(0, 1)
    probs_NV[tree.trunk_D[:-1]] = probs_DV[:-1]
    return tree, probs_NV
