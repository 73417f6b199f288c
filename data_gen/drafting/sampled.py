"""Drafts trees, one level after another, as `selector.layout` says of an action.

A forward pass of the draft goes over those nodes of a level whose children it draws or ranks, so
leaves and copied tokens need none. Equal tokens after one node are one node, though each has
children of its own.

Legend: N tree nodes, W tokens of one forward pass, R rows of the draft's KV cache, K branches, V
    vocabulary, D depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.drafting import ranked
from data_gen.models.pair import CachedModel
from data_gen.models.rows import ModelRow
from data_gen.models.sampling import Sampling, probabilities
from data_gen.trees import DraftTree
from data_gen.verification.distributions import most_likely, sample
from selector.actions import IID, Action, ActionSpace
from selector.latency import distinct_key
from selector.layout import COPIED, OTHER, SAMPLED, layout_of

EVERY = 8  # tokens between two roots at which branches are compared


@dataclass
class Draft:
    """A drafted tree and the draft's outputs at its nodes."""

    tree: DraftTree
    # the draft's distribution after each node, zeros at leaves; empty where no token is drawn
    probs_NV: Tensor
    row_of: dict[int, int]  # row in the draft's KV cache of each node that has one, except the root
    node_of: dict[int, int]  # the tree's node of each node of the layout that is not left out
    _passed: list[ModelRow]  # by row

    def rows(self, nodes: Iterable[int]) -> list[ModelRow]:
        return [self._passed[self.row_of[node]] for node in nodes]


def draft_tree(
    draft: CachedModel,
    root_probs_V: Tensor | None,
    action: Action,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    style: str = IID,
    text: Sequence[int] = (),
    root_logits_V: Tensor | None = None,
    proposal: Sequence[int] = (),
) -> Draft:
    """Draft the tree of an action. Its rows are appended to the draft's KV cache, which ends with
    the root. Nodes are left out where the draft can write fewer tokens than a node has children,
    or where fewer tokens are copied.

    Args:
        root_probs_V, root_logits_V: the draft's distribution after the root, and its logits, which
            rank tokens; None for a lookup. Without logits, tokens rank by their probability.
        generator: on the draft's device.
        style: how the first tokens of the branches are drawn, if the action does not say it:
            "iid"; "without_replacement", one draw after another; or "greedy", the `K - 1` most
            likely tokens and one draw from the others, or the next most likely one where the
            others have probability 0.
        text: the committed tokens, for a sampling that depends on them.
        proposal: the copied tokens (`LookupIndex.proposal`).
    """
    if action.style == IID:
        action = action._replace(style=style)
    tree = DraftTree()
    levels = Levels(draft, tree, sampling, text)
    node_of = {0: 0}
    probs_of: dict[int, Tensor] = {}
    logits_of: dict[int, Tensor] = {}
    if root_probs_V is not None:
        probs_of[0] = root_probs_V
        logits_of[0] = root_probs_V.log() if root_logits_V is None else root_logits_V
    for depth, level in enumerate(_levels(action)):
        families = [family for family in level if family.parent in node_of]
        parents = {node_of[family.parent] for family in families if family.needs_draft}
        unread = sorted(parents - probs_of.keys())
        if unread:
            for node, row in zip(unread, levels.extend(unread), strict=True):
                probs_of[node] = row.probs_V
                logits_of[node] = row.logits_V
        drawn = _drawn(families, node_of, probs_of, generator)
        copied = list(proposal[depth : depth + 1])
        for family in families:
            node = node_of[family.parent]
            tokens_of = {COPIED: copied, SAMPLED: drawn.get(family.parent, [])}
            likely = _likely(family, action, node, probs_of, logits_of)
            for number, source in family.children.items():
                if source == OTHER:
                    siblings = [tree.token(child) for child in tree.children(node)]
                    tokens_of[OTHER] = _other(probs_of[node], siblings, likely, generator)
                tokens = likely[source:] if isinstance(source, int) else tokens_of[source]
                if tokens:
                    (node_of[number],) = tree.append(node, [tokens.pop(0)])
    return Draft(
        tree,
        _probs_along(tree, root_probs_V, probs_of, action),
        levels.row_of,
        node_of,
        levels.passed,
    )


def _probs_along(
    tree: DraftTree, root_probs_V: Tensor | None, probs_of: dict[int, Tensor], action: Action
) -> Tensor:
    """`Draft.probs_NV`."""
    if root_probs_V is None or action.is_certain:
        return torch.zeros(0)
    probs_NV = root_probs_V.new_zeros(len(tree), len(root_probs_V))
    probs_NV[list(probs_of)] = torch.stack(list(probs_of.values()))
    return probs_NV


class _Family(NamedTuple):
    """The children of a node of the layout: their sources, by number."""

    parent: int
    children: dict[int, int | str]

    @property
    def needs_draft(self) -> bool:
        return any(source != COPIED for source in self.children.values())

    @property
    def sampled(self) -> int:
        return list(self.children.values()).count(SAMPLED)


@cache
def _levels(action: Action) -> list[list[_Family]]:
    """The families of an action's layout, by the depth of the parent."""
    depth_of = {0: 0}
    families: dict[int, _Family] = {}
    for number, (parent, source) in enumerate(layout_of(action), 1):
        depth_of[number] = depth_of[parent] + 1
        families.setdefault(parent, _Family(parent, {})).children[number] = source
    levels: list[list[_Family]] = [[] for _ in range(action.depth)]
    for parent, family in families.items():
        levels[depth_of[parent]].append(family)
    return levels


def _drawn(
    families: Sequence[_Family],
    node_of: dict[int, int],
    probs_of: dict[int, Tensor],
    generator: torch.Generator | None,
) -> dict[int, list[int]]:
    """By parent, at least as many independent draws as a family has, all at once."""
    drawing = [family.parent for family in families if family.sampled]
    if not drawing:
        return {}
    probs_MV = torch.stack([probs_of[node_of[parent]] for parent in drawing])
    most = max(family.sampled for family in families)
    return dict(zip(drawing, sample(probs_MV, most, generator).tolist(), strict=True))


def _likely(
    family: _Family,
    action: Action,
    node: int,
    probs_of: dict[int, Tensor],
    logits_of: dict[int, Tensor],
) -> list[int]:
    """The most likely tokens after the parent, if the family has ranks; fewer where the draft can
    write fewer."""
    ranks = [source for source in family.children.values() if isinstance(source, int)]
    if not ranks:
        return []
    logits_V = logits_of[node]
    if action.ranks:
        return ranked.most_likely(logits_V, max(ranks) + 1)
    likely_k = most_likely(probs_of[node], len(family.children), logits_V)
    tokens: list[int] = likely_k[logits_V[likely_k] > -torch.inf].tolist()
    return tokens


def _other(
    probs_V: Tensor, siblings: list[int], likely: list[int], generator: torch.Generator | None
) -> list[int]:
    """A token that is drawn outside of its siblings; where all others have probability 0, the next
    of the likely ones, if there are any."""
    others_V = probs_V.clone()
    others_V[siblings] = 0
    if not bool((others_V > 0).any()):
        return likely[len(siblings) :]
    return [int(sample(others_V, 1, generator))]


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
                (_, *nodes) = drafted.node_of.values()  # one level after another
                nodes_DK = torch.tensor(nodes).view(grid.max_L2, -1).tolist()
                for K in grid.widths:
                    distinct = [len(set(nodes_K[:K])) for nodes_K in nodes_DK]
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
