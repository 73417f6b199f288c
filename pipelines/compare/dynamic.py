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

Legend: N nodes, R roots, C columns of a quotient (tokens, seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data_gen.drafting.ranked import most_likely
from data_gen.drafting.sampled import Levels
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.traces import read_manifest
from data_gen.trees import DraftTree
from pipelines.config import Config
from pipelines.data.recorded import samplings_of, traces_folder
from pipelines.evaluate.table import DRAFTED, Figure, Table
from pipelines.run import console, table, watched
from selector.actions import MOST_DEPTH, RANKED, Action
from selector.latency import LatencyProfile
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
Choice = tuple[float, ...]  # the parameters of a method


@dataclass
class Expanded:
    """What one draft at a root tells.

    Attributes:
        accepted: by numbers of nodes and levels, how many tokens of the text are in the tree.
        expected: likewise, the sum of the draft's probabilities of its nodes' paths.
        rank_D: the draft's ranks of the next tokens of the text.
    """

    source: str
    length: int
    accepted: dict[tuple[int, int], int]
    expected: dict[tuple[int, int], float]
    rank_D: Tensor


class Step(NamedTuple):
    """A tree at a root: accepted tokens, drafted nodes, and the draft's forward passes."""

    accepted: int
    nodes: int
    passes: int


@torch.inference_mode()
def expanded_roots(config: Config, pair: ModelPair) -> dict[tuple[str, str], list[Expanded]]:
    """What drafts at some roots of training and of held-out texts tell, by split and setting."""
    roots: dict[tuple[str, str], list[Expanded]] = {}
    work = list(product(("train", "test"), samplings_of(config)))
    for split, sampling in watched(work, "drafting dynamic trees"):
        expanded: list[Expanded] = []
        for row in _rows(config, split, sampling):
            draft = CachedModel(pair.draft)
            for number in range(0, row["roots"], EVERY):
                expanded.append(_at_root(draft, row, number))
        roots[split, str(sampling)] = expanded
    return roots


def figures_of(
    config: Config,
    roots: Mapping[tuple[str, str], list[Expanded]],
    profiles: Mapping[str, LatencyProfile],
) -> Iterator[Figure]:
    """The speed of each dynamic rule over that of the best static shape, by setting and machine."""
    for sampling, (machine, profile) in product(samplings_of(config), profiles.items()):
        train = roots["train", str(sampling)]
        test = roots["test", str(sampling)]
        shapes = candidates(torch.stack([root.rank_D for root in train]))
        rivals = _columns(train, test, profile, list(range(len(shapes))), _of_shape(shapes))
        for method, (choices, step_of) in DYNAMIC.items():
            columns_RC = _columns(train, test, profile, choices, step_of)
            sources = np.unique([root.source for root in test], return_inverse=True)[1]
            both_RC = torch.cat([columns_RC, rivals], dim=-1)
            ratio = jackknifed(both_RC, torch.from_numpy(sources))
            yield Figure.of_ratio(
                ratio,
                setting=str(sampling),
                method=method,
                rival=STATIC_SHAPE,
                clock=machine,
                basis=DRAFTED,
            )


def show(figures: Table) -> None:
    """Print each rule's speed over that of the static shape, by setting and machine."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for figure in figures.select(basis=DRAFTED, rival=STATIC_SHAPE):
        row = {"setting": figure.setting, "method": figure.method}
        rows.setdefault((figure.setting, figure.method), row)[figure.clock] = figure.text(3)
    title = f"Dynamic trees at the same roots: speed over the best static {STATIC_SHAPE}"
    console.print(table(list(rows.values()), title))


def _rows(config: Config, split: str, sampling: Sampling) -> list[dict[str, Any]]:
    """Texts of a split under a setting, evenly over their order."""
    folder = traces_folder(config)
    columns = ["tokens", "start", "roots", "source", RANK_COLUMN, "temperature", "top_p"]
    names = sorted(name for name in read_manifest(folder)["shards"] if name.startswith(f"{split}/"))
    texts = pa.concat_tables([pq.read_table(folder / name, columns=columns) for name in names])
    has_temperature = pc.field("temperature") == sampling.temperature
    has_top_p = pc.field("top_p") == sampling.top_p
    texts = texts.filter(has_temperature & has_top_p & (pc.field("roots") > 0))
    rows: list[dict[str, Any]] = texts.to_pylist()
    return rows[:: max(1, len(rows) // TEXTS)][:TEXTS]


def _at_root(draft: CachedModel, row: dict[str, Any], number: int) -> Expanded:
    """Expand a tree at one root of a text, whose cache holds an earlier part of it."""
    position = row["start"] + number
    tokens = row["tokens"]
    draft.fill(tokens[draft.committed : position])
    root_pass = draft.extend(tokens[position : position + 1])
    tree, joint_N = expand(draft, root_pass.logits_WV[-1])
    draft.keep([])
    path: list[int] = []
    node: int | None = 0
    for token in tokens[position + 1 : position + 1 + DEPTH]:
        assert node is not None
        node = tree.child(node, token)
        if node is None:
            break
        path.append(node)
    accepted = {}
    expected = {}
    depth_N = tree.depths_N.numpy()
    for depth in range(1, DEPTH + 1):
        within = np.flatnonzero((depth_N >= 1) & (depth_N <= depth))
        order = within[np.argsort(-joint_N[within], kind="stable")]
        for nodes in NODES:
            verified = order[:nodes]
            accepted[nodes, depth] = int(np.isin(path, verified).sum())
            expected[nodes, depth] = float(joint_N[verified].sum())
    ranks = torch.tensor(row[RANK_COLUMN][number : number + MOST_DEPTH], dtype=torch.uint8)
    return Expanded(row["source"], position + 1, accepted, expected, ranks)


def expand(draft: CachedModel, root_logits_V: Tensor) -> tuple[DraftTree, np.ndarray]:
    """A tree of `DEPTH` levels: of each, the `WIDTH` most probable nodes have `WIDTH` children; and
    the draft's probability of every node's path, float64 [N]."""
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


def _eagle_2(root: Expanded, choice: Choice) -> Step:
    nodes, depth = map(int, choice)
    return Step(root.accepted[nodes, depth], nodes, depth)


def _opt_tree(root: Expanded, choice: Choice) -> Step:
    nodes, threshold = int(choice[0]), choice[1]
    depth = 1
    while depth < DEPTH:
        gain = root.expected[nodes, depth + 1] - root.expected[nodes, depth]
        if gain < threshold:
            break
        depth += 1
    # the level that was not worth it was drafted, too
    return Step(root.accepted[nodes, depth], nodes, min(depth + 1, DEPTH))


def _of_shape(shapes: list[Action]) -> Callable[[Expanded, Any], Step]:
    def step_of(root: Expanded, number: int) -> Step:
        shape = shapes[number]
        accepted = int(along_ranks(root.rank_D.unsqueeze(0), shape.ranks))
        return Step(accepted, shape.nodes, shape.depth)

    return step_of


DYNAMIC: dict[str, tuple[list[Any], Callable[[Expanded, Any], Step]]] = {
    EAGLE_2: (list(product(NODES, range(1, DEPTH + 1))), _eagle_2),
    OPT_TREE: (list(product(NODES, THRESHOLDS)), _opt_tree),
}


def _columns(
    train: list[Expanded],
    test: list[Expanded],
    profile: LatencyProfile,
    choices: list[Any],
    step_of: Callable[[Expanded, Any], Step],
) -> Tensor:
    """Tokens and seconds at the held-out roots with the choice that is fastest at the training
    roots, float64 [R, 2]."""
    best = max(choices, key=lambda choice: _speed(_sums(train, profile, choice, step_of)))
    return _sums(test, profile, best, step_of)


def _speed(columns_RC: Tensor) -> float:
    tokens, seconds = columns_RC.sum(0).tolist()
    return tokens / seconds


def _sums(
    roots: list[Expanded],
    profile: LatencyProfile,
    choice: Any,
    step_of: Callable[[Expanded, Any], Step],
) -> Tensor:
    columns = []
    for root in roots:
        step = step_of(root, choice)
        columns.append((1 + step.accepted, _seconds(profile, root.length, step)))
    return torch.tensor(columns, dtype=torch.float64)


def _seconds(profile: LatencyProfile, length: int, step: Step) -> float:
    """Of a step with a drafted tree whose tokens are certain; every pass of the draft but the first
    is over `WIDTH` nodes, of a shape over as many at most."""
    seconds = profile.target.at(length, 1 + step.nodes) + profile.draft.at(length, 2)
    seconds += (step.passes - 1) * profile.draft.at(length, min(WIDTH, step.nodes))
    verification = profile.verify.get(RANKED)
    if verification is not None:
        seconds += verification.token * step.nodes
    return seconds + profile.drafting.at(length, 0)
