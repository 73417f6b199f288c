"""Trees that the draft's confidence shapes, against the best static shape, at the same roots.

EAGLE-2 (arXiv 2406.16858) expands, level by level, the `WIDTH` nodes of a level whose path the
draft thinks most probable, and in the end verifies the n most probable nodes of all. OPT-Tree
(arXiv 2406.17276) stops where one more level raises the expected number of accepted tokens, by the
draft's own probabilities, by less than a threshold. Their nodes are the draft's choices, so the
target decides alone how far a step goes, as with shapes by rank: as far as the text's path is in
the tree.

One draft of `DEPTH` levels at a root tells all of this for every n, depth and threshold. These, and
the static shape, are chosen on roots of training texts for their speed, and judged on roots of
held-out ones. Errors are one standard error over sources.

Legend: R roots, L numbers of levels, N numbers of verified nodes, D depths, M nodes of a drafted
tree, C columns of a quotient (tokens, seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from data_gen.drafting.ranked import most_likely
from data_gen.drafting.sampled import Levels
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.trees import DraftTree
from pipelines.config import Config
from pipelines.data.recorded import rows_of, samplings_of
from pipelines.evaluate.table import DRAFTED, Figure, Table, show_grids
from pipelines.terminal import watched
from selector.actions import MOST_DEPTH, RANKED, Action
from selector.latency import LatencyProfile, Verification
from selector.sampling import Sampling
from selector.schema import RANK_COLUMN
from selector.train.ranked import along_ranks, candidates
from selector.train.replay import jackknifed

WIDTH = 8  # nodes of a level that are expanded, and children of each
DEPTH = 6  # levels
NODES = (4, 8, 12, 16, 24, 32, 48)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5)  # tokens
TEXTS = 12  # of a split under a setting
EVERY = 8  # tokens between two roots
EAGLE_2 = "EAGLE-2's tree"
OPT_TREE = "OPT-Tree's stop"
STATIC_SHAPE = "shape by rank"


class Expanded(NamedTuple):
    """What one draft at each of some roots tells; without the axis R, at one root."""

    source_R: list[str]
    length_R: Tensor  # committed tokens, int64
    accepted_RLN: Tensor  # tokens of the text in the tree of the most probable nodes, int64
    expected_RLN: Tensor  # the sum of the draft's probabilities of these nodes' paths, float64
    rank_RD: Tensor  # the draft's ranks of the next tokens of the text, uint8


class Steps(NamedTuple):
    """What a tree of so many nodes does at every root."""

    nodes: int
    accepted_R: Tensor
    passes_R: Tensor  # forward passes of the draft


Rule = Callable[[Expanded], list[Steps]]  # with every choice of its parameters, in one order


@torch.inference_mode()
def expanded_roots(config: Config, pair: ModelPair) -> dict[tuple[str, str], Expanded]:
    """What drafts at some roots of training and of held-out texts tell, by split and setting."""
    roots: dict[tuple[str, str], Expanded] = {}
    work = list(product(("train", "test"), samplings_of(config)))
    for split, sampling in watched(work, "drafting dynamic trees"):
        texts = rows_of(config, split, sampling)
        evenly = range(0, len(texts), max(1, len(texts) // TEXTS))[:TEXTS]
        expanded = []
        for row in texts.take(list(evenly)).to_pylist():
            draft = CachedModel(pair.draft)
            for number in range(0, row["roots"], EVERY):
                expanded.append(_at_root(draft, row, number))
        roots[split, str(sampling)] = default_collate(expanded)
    return roots


def figures_of(
    config: Config,
    roots: Mapping[tuple[str, str], Expanded],
    profiles: Mapping[str, LatencyProfile],
) -> Iterator[Figure]:
    """The speed of each dynamic rule over that of the best static shape, by setting and machine."""
    for sampling, (machine, profile) in product(samplings_of(config), profiles.items()):
        train = roots["train", str(sampling)]
        test = roots["test", str(sampling)]
        source_R = torch.from_numpy(np.unique(test.source_R, return_inverse=True)[1])
        static = partial(shapes_by_rank, candidates(train.rank_RD))
        rules: dict[str, Rule] = {STATIC_SHAPE: static, **DYNAMIC}
        columns_RC = {}
        for method, rule in rules.items():
            steps_of = zip(rule(train), rule(test), strict=True)
            _, steps = max(steps_of, key=lambda pair: _speed(_columns(train, pair[0], profile)))
            columns_RC[method] = _columns(test, steps, profile)
        for method in DYNAMIC:
            both_RC = torch.cat([columns_RC[method], columns_RC[STATIC_SHAPE]], dim=-1)
            yield Figure.of_ratio(
                jackknifed(both_RC, source_R),
                setting=str(sampling),
                method=method,
                rival=STATIC_SHAPE,
                clock=machine,
                basis=DRAFTED,
            )


def show(figures: Table) -> None:
    """Print each rule's speed over that of the static shape, by setting and machine."""
    title = f"Dynamic trees at the same roots: speed over the best static {STATIC_SHAPE}"
    selected = figures.select(basis=DRAFTED, rival=STATIC_SHAPE)
    show_grids((title, f"{f.setting}, {f.method}", f.clock, f.text(3)) for f in selected)


def _at_root(draft: CachedModel, row: dict[str, Any], number: int) -> Expanded:
    """Expand a tree at one root of a text, whose cache holds an earlier part of it."""
    position = row["start"] + number
    tokens = row["tokens"]
    draft.fill(tokens[draft.committed : position])
    root_pass = draft.extend(tokens[position : position + 1])
    tree, joint_M = expand(draft, root_pass.logits_WV[-1])
    draft.keep([])
    path = [0]
    for token in tokens[position + 1 : position + 1 + DEPTH]:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    order = np.argsort(-joint_M, kind="stable")[1:]  # without the root
    depth_M = tree.depths_N.numpy()[order]
    accepted_LN = torch.zeros(DEPTH, len(NODES), dtype=torch.int64)
    expected_LN = torch.zeros(DEPTH, len(NODES), dtype=torch.float64)
    for level, at in product(range(DEPTH), range(len(NODES))):
        verified = order[depth_M <= level + 1][: NODES[at]]
        accepted_LN[level, at] = int(np.isin(path, verified).sum())
        expected_LN[level, at] = joint_M[verified].sum()
    ranks = torch.tensor(row[RANK_COLUMN][number : number + MOST_DEPTH], dtype=torch.uint8)
    return Expanded(row["source"], position + 1, accepted_LN, expected_LN, ranks)


def expand(draft: CachedModel, root_logits_V: Tensor) -> tuple[DraftTree, np.ndarray]:
    """A tree of `DEPTH` levels: of each, the `WIDTH` most probable nodes have `WIDTH` children; and
    the draft's probability of every node's path, float64 [M]."""
    tree = DraftTree()
    joint = [1.0]
    levels = Levels(draft, tree, Sampling(), ())
    frontier = [0]
    next_logits = [root_logits_V]
    for depth in range(1, DEPTH + 1):
        level: list[int] = []
        for node, logits_V in zip(frontier, next_logits, strict=True):
            probs_V = logits_V.float().softmax(-1)
            for token in most_likely(logits_V, WIDTH):
                level.append(tree.add(node, token))
                joint.append(joint[node] * float(probs_V[token]))
        if depth == DEPTH:
            break
        frontier = sorted(sorted(level, key=lambda node: -joint[node])[:WIDTH])
        next_logits = [row.logits_V for row in levels.extend(frontier)]
    return tree, np.array(joint)


def eagle_2(roots: Expanded) -> list[Steps]:
    """With every number of nodes and of levels."""
    steps = []
    for at, level in product(range(len(NODES)), range(DEPTH)):
        passes_R = torch.full_like(roots.length_R, level + 1)
        steps.append(Steps(NODES[at], roots.accepted_RLN[:, level, at], passes_R))
    return steps


def opt_tree(roots: Expanded) -> list[Steps]:
    """With every number of nodes and every threshold."""
    steps = []
    for at, threshold in product(range(len(NODES)), THRESHOLDS):
        is_worth_RL = roots.expected_RLN[:, :, at].diff() >= threshold
        level_R = is_worth_RL.cumprod(-1).sum(-1)
        accepted_R = roots.accepted_RLN[:, :, at].gather(-1, level_R.unsqueeze(-1))[:, 0]
        # the level that was not worth it was drafted, too
        steps.append(Steps(NODES[at], accepted_R, (level_R + 2).clamp(max=DEPTH)))
    return steps


def shapes_by_rank(shapes: list[Action], roots: Expanded) -> list[Steps]:
    steps = []
    for shape in shapes:
        passes_R = torch.full_like(roots.length_R, shape.depth)
        steps.append(Steps(shape.nodes, along_ranks(roots.rank_RD, shape.ranks), passes_R))
    return steps


DYNAMIC: dict[str, Rule] = {EAGLE_2: eagle_2, OPT_TREE: opt_tree}


def _speed(columns_RC: Tensor) -> float:
    tokens, seconds = columns_RC.sum(0).tolist()
    return tokens / seconds


def _columns(roots: Expanded, steps: Steps, profile: LatencyProfile) -> Tensor:
    """Tokens and seconds at every root of drafted trees whose tokens are certain, float64 [R, 2].
    Every pass of the draft but the first is over `WIDTH` nodes, of a shape over as many at most."""
    verification = profile.verify.get(RANKED, Verification())
    width = min(WIDTH, steps.nodes)
    times = []
    for length in roots.length_R.tolist():
        once = profile.target.at(length, 1 + steps.nodes) + profile.draft.at(length, 2)
        once += profile.drafting.at(length, 0) + verification.token * steps.nodes
        times.append((once, profile.draft.at(length, width)))
    once_R, pass_R = torch.tensor(times, dtype=torch.float64).unbind(-1)
    seconds_R = once_R + (steps.passes_R - 1) * pass_R
    return torch.stack([1 + steps.accepted_R, seconds_R], dim=-1)
