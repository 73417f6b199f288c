"""Samples trees from the draft.

A delayed tree takes `L1 + L2` forward passes, that over the root included: a node's token is
sampled from its parent's next-token distribution, so leaves need none. Branches are drafted side by
side and merged afterwards.

Legend: N tree nodes, W tokens of one forward pass, R rows of the draft's KV cache, K branches, V
    vocabulary, D depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.models.pair import CachedModel
from data_gen.models.rows import ModelRow
from data_gen.models.sampling import Sampling, probabilities
from data_gen.trees import DraftTree
from data_gen.verification.distributions import most_likely, sample
from selector.actions import GREEDY, IID, Action, ActionSpace
from selector.latency import distinct_key

EVERY = 8  # tokens between two roots at which branches are compared


@dataclass
class Draft:
    """A drafted tree and the draft's outputs at its nodes."""

    tree: DraftTree
    probs_NV: Tensor  # the draft's distribution after each node; zeros at leaves
    row_of: dict[int, int]  # row in the draft's KV cache of each node that has one, except the root
    _passed: list[ModelRow]  # by row

    def rows(self, nodes: Iterable[int]) -> list[ModelRow]:
        return [self._passed[self.row_of[node]] for node in nodes]


def draft_tree(
    draft: CachedModel,
    root_probs_V: Tensor,
    action: Action,
    sampling: Sampling,
    generator: torch.Generator,
    style: str = IID,
    text: Sequence[int] = (),
    root_logits_V: Tensor | None = None,
) -> Draft:
    """Draft a delayed tree (DDTE, section 3). Its rows are appended to the draft's KV cache, which
    ends with the root.

    Args:
        root_probs_V, root_logits_V: the draft's distribution after the root, and its logits, which
            rank tokens of probability 0 for greedy branches.
        generator: on the draft's device.
        style: how the first tokens of the branches are drawn (`draw_children`).
        text: the committed tokens, for a sampling that depends on them.
    """
    if action.children:
        return _branching(draft, root_probs_V, action, sampling, generator, text)
    L1, L2 = action.L1, action.L2
    if action.K == 1:  # a chain is a trunk alone
        L1 += L2
        L2 = 0
    trunk: list[int] = []
    passed: list[ModelRow] = []

    def extend(tokens_W: Tensor, visible_WR: Tensor, texts: list[list[int]]) -> None:
        offsets_W = torch.full((len(tokens_W),), len(texts[0]) - 1)
        forward_pass = draft.forward(tokens_W, offsets_W, visible_WR)
        rows = forward_pass.rows(sampling, lambda: [[*text, *path] for path in texts])
        passed.extend(rows.each())

    probs_V, logits_V = root_probs_V, root_logits_V  # at the trunk's end
    while len(trunk) < L1:
        trunk.append(int(sample(probs_V, 1, generator)))
        if len(trunk) < L1 or L2 > 0:
            extend(torch.tensor(trunk[-1:]), torch.ones(1, len(trunk), dtype=torch.bool), [trunk])
            probs_V, logits_V = passed[-1].probs_V, passed[-1].logits_V
    branches_KD = torch.zeros(1, 0, dtype=torch.int64)
    if L2 > 0:
        children = draw_children(probs_V, action.K, style, generator, logits_V)
        branches_KD = torch.tensor(children).unsqueeze(-1)
    K = len(branches_KD)
    for depth in range(1, L2):
        paths = [[*trunk, *branch] for branch in branches_KD.tolist()]
        extend(branches_KD[:, -1], _visible(L1, K, depth), paths)
        drawn_K1 = sample(torch.stack([row.probs_V for row in passed[-K:]]), 1, generator).cpu()
        branches_KD = torch.cat([branches_KD, drawn_K1], dim=-1)
    tree = DraftTree.from_paths(trunk, branches_KD.tolist())
    row_of = _rows_of(tree, L1, K)
    probs_NV = root_probs_V.new_zeros(len(tree), len(root_probs_V))
    probs_NV[0] = root_probs_V
    if row_of:
        probs_NV[list(row_of)] = torch.stack([passed[row].probs_V for row in row_of.values()])
    return Draft(tree, probs_NV, row_of, passed)


def _branching(
    draft: CachedModel,
    root_probs_V: Tensor,
    action: Action,
    sampling: Sampling,
    generator: torch.Generator,
    text: Sequence[int],
) -> Draft:
    """A tree that branches at every level: each drafted token, of several equal ones each, has its
    own children, drawn independently."""
    tree = DraftTree()
    levels = Levels(draft, tree, sampling, text)
    probs_of = {0: root_probs_V}
    tokens_of = {0: 1}  # how many drafted tokens a node of the last level stands for
    for number, count in enumerate(action.children):
        if number > 0:
            rows = levels.extend(list(tokens_of))
            probs_of |= {node: row.probs_V for node, row in zip(tokens_of, rows, strict=True)}
        below: Counter[int] = Counter()
        for node, tokens in tokens_of.items():
            drawn = sample(probs_of[node], count * tokens, generator).tolist()
            below.update(tree.append(node, drawn))
        tokens_of = dict(below)
    probs_NV = root_probs_V.new_zeros(len(tree), len(root_probs_V))
    for node, probs_V in probs_of.items():
        probs_NV[node] = probs_V
    return Draft(tree, probs_NV, levels.row_of, levels.passed)


class Levels:
    """The draft's forward passes over a growing tree, one level after another."""

    def __init__(
        self, draft: CachedModel, tree: DraftTree, sampling: Sampling, text: Sequence[int]
    ) -> None:
        self.row_of: dict[int, int] = {}  # row in the draft's KV cache, by node
        self.passed: list[ModelRow] = []  # by row
        self._draft = draft
        self._tree = tree
        self._sampling = sampling
        self._text = text

    def extend(self, nodes: Sequence[int]) -> list[ModelRow]:
        """The draft's outputs at some nodes of one level, ascending, whose parents have rows."""
        tree = self._tree
        paths = [tree.path_to(node) for node in nodes]
        for node in nodes:
            self.row_of[node] = len(self.row_of)
        visible_WR = torch.zeros(len(nodes), len(self.row_of), dtype=torch.bool)
        for at, path in enumerate(paths):
            visible_WR[at, [self.row_of[passed_node] for passed_node in path]] = True
        tokens_W = torch.tensor([tree.token(node) for node in nodes])
        offsets_W = torch.full((len(nodes),), len(paths[0]) - 1)
        forward_pass = self._draft.forward(tokens_W, offsets_W, visible_WR)

        def texts() -> list[list[int]]:
            return [[*self._text, *map(tree.token, path)] for path in paths]

        rows = list(forward_pass.rows(self._sampling, texts).each())
        self.passed += rows
        return rows


@torch.inference_mode()
def distinct_nodes(
    model: PreTrainedModel,
    texts: Sequence[tuple[list[int], int]],
    sampling: Sampling,
    seed: int,
    space: ActionSpace,
) -> dict[str, list[float]]:
    """The mean number of distinct nodes that K branches of a draft have at each of their depths,
    by K (`str`), for all K of a space.

    `texts` are token ids and the position of the first root; branches are drafted at every
    `EVERY`-th one from it.
    """
    generator = torch.Generator(device=model.device).manual_seed(seed)
    counts: dict[str, list[list[int]]] = {}  # by K, root and depth
    for tokens, start in texts:
        draft = CachedModel(model)
        for root in range(start, len(tokens), EVERY):
            draft.fill(tokens[draft.committed : root])
            (probs_V,) = probabilities(draft.extend(tokens[root : root + 1]).logits_WV, sampling)
            for grid in space.grids:
                action = Action(grid.widths[-1], 0, grid.max_L2)
                drafted = draft_tree(draft, probs_V, action, sampling, generator)
                draft.keep([])
                nodes_by_depth = list(zip(*drafted.tree.branch_nodes, strict=True))[1:]
                for K in grid.widths:
                    distinct = [len(set(nodes[:K])) for nodes in nodes_by_depth]
                    counts.setdefault(str(K), []).append(distinct)
            for action in map(Action.branching, space.children):
                drafted = draft_tree(draft, probs_V, action, sampling, generator)
                draft.keep([])
                distinct = [len(nodes) for nodes in drafted.tree.nodes_by_depth[1:]]
                counts.setdefault(distinct_key(action), []).append(distinct)
    means_of_K = {}
    for name, counts_RD in counts.items():
        means_of_K[name] = torch.tensor(counts_RD, dtype=torch.float64).mean(0).tolist()
    return means_of_K


def draw_children(
    probs_V: Tensor,
    count: int,
    style: str,
    generator: torch.Generator,
    logits_V: Tensor | None = None,
) -> list[int]:
    """Tokens of a node's children, in order; fewer than `count` where distinct children run out of
    support and no logits rank the tokens of probability 0.

    The style is "iid"; "without_replacement", one draw after another; or "greedy", the `count - 1`
    most likely tokens and one draw from the others, or the next most likely one by the logits where
    the others have probability 0.
    """
    if style == IID:
        return sample(probs_V, count, generator).tolist()
    left_V = probs_V.clone()
    if style == GREEDY:
        likely = most_likely(probs_V, count, logits_V).tolist()
        if logits_V is None:
            likely = [token for token in likely if probs_V[token] > 0]
        left_V[likely[: count - 1]] = 0
        last = likely[count - 1 :]
        if bool((left_V > 0).any()):
            last = sample(left_V, 1, generator).tolist()
        return likely[: count - 1] + last
    tokens: list[int] = []
    while len(tokens) < count and bool((left_V > 0).any()):
        token = int(sample(left_V, 1, generator))
        tokens.append(token)
        left_V[token] = 0
    return tokens


@cache
def _visible(L1: int, K: int, depth: int) -> Tensor:
    trunk = torch.ones(K, L1, dtype=torch.bool)
    return torch.cat([trunk, torch.eye(K, dtype=torch.bool).repeat(1, depth)], dim=1)


def _rows_of(tree: DraftTree, L1: int, K: int) -> dict[int, int]:
    trunk = tree.path_to(tree.branch_nodes[0][0])
    rows = {node: row for row, node in enumerate(trunk)}
    for k, nodes in enumerate(tree.branch_nodes):
        for depth, node in enumerate(nodes[1:-1]):
            rows.setdefault(node, L1 + depth * K + k)
    if len(tree.branch_nodes[0]) == 1 and trunk:
        del rows[trunk[-1]]  # a bare trunk ends in a leaf
    return rows
