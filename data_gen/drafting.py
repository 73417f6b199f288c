"""Draws trees from the draft model: one delayed tree for decoding, or supertrees for labelling.

A delayed tree takes `L1 + L2` passes, the one over the root token included: a node's token is drawn from its parent's
row, so leaves need no pass. Branches are drafted side by side and merged only afterwards.

Legend: N tree nodes, W tokens of one pass, S samples, K branches, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from data_gen.models import CachedModel
from data_gen.sampling import Sampling
from data_gen.trees import DraftTree, Supertree, Topology, ancestors
from data_gen.verification.base import GREEDY, IID
from data_gen.verification.profile import invert, sample
from selector.actions import Action, ActionSpace


@dataclass
class Draft:
    """A drafted tree.

    Attributes:
        action: what was drafted in the end; all of a chain is trunk.
        tree: equal prefixes merged.
        probs_NV: the draft's distribution after each node; zeros at leaves.
        hidden_ND: the draft's last hidden state at each node but the leaves and the root, by node id.
        row_of: for each node that the draft has passed, its row in the draft's cache; the root's is committed.
    """

    action: Action
    tree: DraftTree
    probs_NV: Tensor
    hidden_ND: dict[int, Tensor]
    row_of: dict[int, int]


class Drawn(NamedTuple):
    """A trunk token that has been drawn and not passed yet; or the root, before anything is drawn.

    Attributes:
        depth: tokens drafted so far, this one included; 0 at the root.
        token: without meaning at the root.
        probs_V: the draft's distribution that it was drawn from; the next token's, at the root.
        hidden_D: the draft's last hidden state there; None where that is the root token's.
    """

    depth: int
    token: int
    probs_V: Tensor
    hidden_D: Tensor | None


def draft_tree(
    draft: CachedModel,
    root_probs_V: Tensor,
    action: Action,
    sampling: Sampling,
    generator: torch.Generator,
    style: str = IID,
    revise: Callable[[Drawn], Action] | None = None,
) -> Draft:
    """Draft a delayed tree. The draft's cache already holds the root token.

    With `revise`, the action is decided anew at the root and after each trunk token, before that token is passed: to
    stop there, to draft on, or to branch. It may use whatever has been drafted, and no more: what is drawn next does
    not depend on it, so every verifier that is lossless for the resulting trees stays so (by enumeration:
    `tests/data_gen/verification/test_deciding.py`).

    Args:
        draft: its committed rows end with the root token; the tree's rows are appended.
        root_probs_V: the draft's distribution after the root token.
        generator: lives on the device of `root_probs_V`.
        style: how the branches' first tokens are drawn; where the support is too small, there are fewer branches.
        revise: the action from here on; its trunk holds at least the tokens drafted so far.
    """
    action = _all_trunk(action if revise is None else revise(Drawn(0, -1, root_probs_V, None)))
    trunk: list[int] = []
    probs = [root_probs_V]  # of the rows passed so far, the root first
    hidden: list[Tensor] = []
    while len(trunk) < action.L1:
        trunk.append(int(sample(probs[-1], 1, generator)))
        if revise is not None:
            action = _all_trunk(revise(Drawn(len(trunk), trunk[-1], probs[-1], hidden[-1] if hidden else None)))
            if len(trunk) > action.L1:
                raise ValueError(f"{action} has a shorter trunk than the {len(trunk)} tokens that are drafted")
        if len(trunk) < action.L1 or action.L2 > 0:
            _pass(draft, torch.tensor([[trunk[-1]]]), action, len(trunk), sampling, probs, hidden)
    _, L1, L2 = action
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
    return Draft(action, tree, probs_NV, {node: hidden[row] for node, row in row_of.items()}, row_of)


def _all_trunk(action: Action) -> Action:
    """A chain as a trunk alone."""
    return Action(1, action.L1 + action.L2, 0) if action.K == 1 else action


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
    draft: CachedModel, root_probs_SV: Tensor, space: ActionSpace, sampling: Sampling, uniforms_SN: Tensor
) -> tuple[list[Supertree], Tensor, Tensor]:
    """Draft independent supertrees side by side: `max_L1 + max_L2 - 1` passes, one per depth, for all of them.

    Args:
        draft: a cache of S sequences that end with the root tokens (`CachedModel.prefixes`).
        root_probs_SV: the draft's distributions after the root tokens.
        uniforms_SN: float64 in [0, 1), one per node but the root (`nodes_of`): what the tokens are drawn with.

    Returns:
        the supertrees; the draft's distributions after their nodes, [S, N, V]: those of a supertree come first, in its
        order; zeros at leaves, and where it has fewer nodes than others; and its last hidden states after the trunk's
        nodes but the root and the leaf, [S, T, D].
    """
    layout = _layout(space)
    tokens_SN, probs_SNV, trunk_hidden_STD = draft_layout(draft, root_probs_SV, layout, sampling, uniforms_SN)
    trees, sources = zip(*(_merged(tokens_N, layout) for tokens_N in tokens_SN.tolist()), strict=True)
    width = max(map(len, sources))
    padding = layout.levels[-1][0]  # a leaf
    sources_SN = torch.tensor([[*source, *[padding] * (width - len(source))] for source in sources])
    which_S1 = torch.arange(len(trees)).unsqueeze(-1)
    return list(trees), probs_SNV[which_S1, sources_SN], trunk_hidden_STD


@torch.inference_mode()
def draft_layout(
    draft: CachedModel, root_probs_SV: Tensor, layout: Layout, sampling: Sampling, uniforms_SN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the tokens of a layout for each of S sequences, in one pass per depth.

    Args:
        uniforms_SN: one per node but the root.

    Returns:
        tokens, int64 [S, N], the root's 0; the draft's distributions after the nodes, [S, N, V], zeros at leaves; and
        its last hidden states after the first inner node of every depth below the root (the trunk's), [S, T, D].
    """
    device = draft.model.device
    tokens_SN = torch.zeros(len(root_probs_SV), len(layout.parents), dtype=torch.int64, device=device)
    probs_SNV = root_probs_SV.new_zeros(*tokens_SN.shape, root_probs_SV.shape[-1])
    probs_SNV[:, 0] = root_probs_SV
    uniforms_SN = uniforms_SN.to(device)
    passed: list[int] = []
    hidden = [root_probs_SV.new_zeros(len(root_probs_SV), 0, draft.model.config.get_text_config().hidden_size)]
    for depth, level in enumerate(layout.levels[1:]):
        parents_SWV = probs_SNV[:, [layout.parents[node] for node in level]]
        u_SW1 = uniforms_SN[:, [node - 1 for node in level], None]
        tokens_SN[:, level] = invert(parents_SWV, u_SW1)[..., 0]
        inner = [node for node in level if node in layout.inner]
        if inner:
            passed += inner
            offsets_W = torch.full((len(inner),), depth, device=device)
            visible = layout.ancestors_NN[inner][:, passed]
            output = draft.forward(tokens_SN[:, inner], offsets_W, visible)
            probs_SNV[:, inner] = sampling.probabilities(output.logits_BWV)
            hidden.append(output.hidden_BWD[:, :1])
    return tokens_SN, probs_SNV, torch.cat(hidden, dim=1)


def nodes_of(space: ActionSpace) -> int:
    """Nodes of a supertree before equal prefixes are merged, the root left out."""
    return len(_layout(space).parents) - 1


@dataclass(frozen=True)
class Layout:
    """Paths before equal prefixes are merged; node 0 is the root, nodes stand in order of depth.

    Attributes:
        trunk: the trunk's nodes without the root.
        branches: for each trunk depth, the further branches' nodes.
        inner: the nodes that have children.
    """

    parents: list[int]
    levels: list[list[int]]
    trunk: list[int]
    branches: list[list[list[int]]]
    inner: frozenset[int]
    ancestors_NN: Tensor


@cache
def _layout(space: ActionSpace) -> Layout:
    """A supertree's."""
    length = space.max_L1 + space.max_L2
    parents, levels, trunk = [-1], [[0]], [0]
    branches: list[list[list[int]]] = [[[] for _ in range(space.max_K - 1)] for _ in range(space.max_L1 + 1)]
    for depth in range(1, length + 1):
        level = [len(parents)]
        parents.append(trunk[-1])
        for L1 in range(max(0, depth - space.max_L2), min(space.max_L1, depth - 1) + 1):
            for branch in branches[L1]:
                level.append(len(parents))
                parents.append(branch[-1] if branch else trunk[L1])
                branch.append(level[-1])
        trunk.append(level[0])
        levels.append(level)
    return Layout(parents, levels, trunk[1:], branches, frozenset(parents) - {-1}, ancestors(parents))


@cache
def action_layout(action: Action) -> Layout:
    """That of one action's tree: all branches at the trunk's end."""
    parents, levels, trunk = [-1], [[0]], [0]
    for _ in range(action.L1):
        parents.append(trunk[-1])
        trunk.append(len(parents) - 1)
        levels.append(trunk[-1:])
    branches: list[list[int]] = [[] for _ in range(action.K)]
    for _ in range(action.L2):
        levels.append([])
        for branch in branches:
            parents.append(branch[-1] if branch else trunk[-1])
            branch.append(len(parents) - 1)
            levels[-1].append(branch[-1])
    inner = frozenset(parents) - {-1}
    return Layout(parents, levels, trunk[1:], [[]] * action.L1 + [branches], inner, ancestors(parents))


def _merged(tokens: list[int], layout: Layout) -> tuple[Supertree, list[int]]:
    """A supertree with equal prefixes merged, and for each of its nodes one of the layout that stands for it."""
    trunk = [tokens[node] for node in layout.trunk]
    branches = {L1: [[tokens[n] for n in branch] for branch in group] for L1, group in enumerate(layout.branches)}
    tree = Supertree.from_paths(trunk, branches)
    source = [0] * len(tree)
    pairs = list(zip(tree.trunk_D[1:].tolist(), layout.trunk, strict=True))
    for nodes, group in zip(tree.branches_LKD[:, 1:, 1:].tolist(), layout.branches, strict=True):
        pairs += [pair for merged, own in zip(nodes, group, strict=True) for pair in zip(merged, own, strict=True)]
    # leaves first: where a leaf of one path is an inner node of another, the latter's row counts
    for node, own in sorted(pairs, key=lambda pair: pair[1] in layout.inner):
        source[node] = own
    return tree, source
