"""Checks anybody's verifier: does the text that it appends follow the target?

The worlds are so small that all drafts can be listed. Where the verifier gives its law, the law of the appended text is
exact. Where it only draws, drawn texts are compared with the target's by chi-square, at a false-alarm rate of `ALARM`.

Legend: N tree nodes, V vocabulary, D drafts, S sequences of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from data_gen.trees import DraftTree
from data_gen.verification.worlds import KINDS, World

Law = Callable[[DraftTree, Tensor, Tensor], Tensor]
Draw = Callable[[DraftTree, Tensor, Tensor, torch.Generator], Sequence[int]]

ALARM = 1e-4
EXACT = 1e-9  # the largest error of a law
SHAPES = ((1, 1, 0), (1, 2, 0), (2, 0, 1), (3, 0, 1), (1, 3, 0), (2, 0, 2), (2, 1, 1), (3, 0, 2))  # K, L1, L2
MOST_DRAFTS = 100  # of i.i.d. tokens
CASES = tuple(  # vocabulary, shape, kind of world; small ones first
    (V, shape, kind)
    for V, shape, kind in product((2, 3), SHAPES, KINDS)
    if V ** (shape[1] + shape[0] * shape[2]) <= MOST_DRAFTS
)


class Drafted(NamedTuple):
    probability: float
    tree: DraftTree
    rows: tuple[Tensor, Tensor]  # of target and draft after each node, float64 [N, V]

    def __str__(self) -> str:
        paths = [tuple(self.tree.token(n) for n in self.tree.path_to(nodes[-1])) for nodes in self.tree.branch_nodes]
        return f"the tree with the branches {', '.join(map(str, paths))}"


@dataclass(frozen=True)
class Fault:
    shape: tuple[int, int, int]
    style: str
    vocabulary: int
    what: str
    drafted: Drafted

    def __str__(self) -> str:
        target_NV, draft_NV = self.drafted.rows
        rows = "\n".join(
            f"  node {n}, token {self.drafted.tree.token(n)}: p = {_row(target_NV[n])}, q = {_row(draft_NV[n])}"
            for n in range(len(self.drafted.tree))
        )
        return (
            f"wrong on trees (K, L1, L2) = {self.shape} of style {self.style} over {self.vocabulary} tokens: "
            f"{self.what}\nfor example {self.drafted}:\n{rows}"
        )


def check_law(law: Law, style: str) -> Fault | None:
    """The first fault of a verifier that gives P(accepted node, extra token), [N, V]; None where there is none."""
    for case in CASES:
        world, drafts, fault = _case(*case, style)
        found: dict[tuple[int, ...], list[float]] = {}  # by sequence, what each draft adds to its probability
        for d, drafted in enumerate(drafts):
            law_NV = law(drafted.tree, *drafted.rows)
            if reason := _no_law(law_NV, drafted):
                return fault(reason, drafted)
            for node, token in (law_NV > 0).nonzero().tolist():
                shares = found.setdefault((*_tokens(drafted.tree, node), token), [0.0] * len(drafts))
                shares[d] += drafted.probability * float(law_NV[node, token])
        for sequence, expected in _sequences(world, case[1]):
            ends = range(1, len(sequence) + 1)
            shares_SD = [
                world.target_probability(sequence, start=n) * np.array(found.get(sequence[:n], [0.0] * len(drafts)))
                for n in ends
            ]
            share_D = np.sum(shares_SD, axis=0)
            if abs(share_D.sum() - expected) > EXACT:
                what = f"the text {sequence} has probability {share_D.sum():.6f}, the target gives it {expected:.6f}"
                return fault(what, drafts[int(share_D.argmax())])
    return None


def check_draws(draw: Draw, style: str, draws: int, seed: int = 0) -> Fault | None:
    """As `check_law`, for a verifier that draws the accepted node and the extra token; `draws` for each case."""
    generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    for case in CASES:
        world, drafts, fault = _case(*case, style)
        number = {sequence: n for n, (sequence, _) in enumerate(_sequences(world, case[1]))}
        seen_SD = np.zeros((len(number), len(drafts)))
        for d in random.choice(len(drafts), draws, p=[drafted.probability for drafted in drafts]):
            tree, (p_NV, q_NV) = drafts[d].tree, drafts[d].rows
            node, token = map(int, draw(tree, p_NV, q_NV, generator))
            if not (0 <= node < len(tree) and 0 <= token < world.vocabulary and p_NV[node, token] > 0):
                return fault(f"node {node} and token {token} were drawn, which is impossible", drafts[d])
            text = (*_tokens(tree, node), token)
            while len(text) <= case[1][1] + case[1][2]:
                text = (*text, int(random.choice(world.vocabulary, p=world.target[text].numpy())))
            seen_SD[number[text], d] += 1
        expected_S = draws * np.array([expected for _, expected in _sequences(world, case[1])])
        if _chance(seen_SD.sum(-1), expected_S) < ALARM / len(CASES):
            worst = int(np.abs(seen_SD.sum(-1) - expected_S).argmax())
            seen, text = int(seen_SD[worst].sum()), list(number)[worst]
            what = f"the text {text} came {seen} times in {draws}, the target writes it {expected_S[worst]:.1f} times"
            return fault(what, drafts[int(seen_SD[worst].argmax())])
    return None


def _case(
    vocabulary: int, shape: tuple[int, int, int], kind: str, style: str
) -> tuple[World, list[Drafted], Callable[[str, Drafted], Fault]]:
    world = World(vocabulary, shape[1] + shape[2], kind, seed=vocabulary)
    drafts = []
    for probability, trunk, branches in world.drafts(*shape, style):
        tree = DraftTree.from_paths(trunk, branches)
        drafts.append(Drafted(probability, tree, world.rows(tree)))
    return world, drafts, lambda what, drafted: Fault(shape, style, vocabulary, what, drafted)


def _tokens(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.token(n) for n in tree.path_to(node))


def _sequences(world: World, shape: tuple[int, int, int]) -> Iterator[tuple[tuple[int, ...], float]]:
    for sequence in product(range(world.vocabulary), repeat=shape[1] + shape[2] + 1):
        yield sequence, world.target_probability(sequence)


def _no_law(law_NV: Tensor, drafted: Drafted) -> str | None:
    if law_NV.shape != drafted.rows[0].shape:
        return f"its law has the shape {list(law_NV.shape)}, not {list(drafted.rows[0].shape)}"
    if not bool(torch.isfinite(law_NV).all()) or float(law_NV.min()) < -EXACT:
        return "its law has numbers that are no probabilities"
    if abs(float(law_NV.sum()) - 1) > EXACT:
        return f"its law sums to {float(law_NV.sum()):.6f}"
    return None


def _chance(seen_S: np.ndarray, expected_S: np.ndarray) -> float:
    """P(a right verifier deviates more), by chi-square; cells of fewer than five are taken together."""
    if seen_S[expected_S == 0].sum() > 0:
        return 0.0
    large_S = expected_S >= 5
    seen, expected = (np.append(each[large_S], each[~large_S].sum()) for each in (seen_S, expected_S))
    kept = expected > 0
    statistic = ((seen[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return float(stats.chi2.sf(statistic, max(1, kept.sum() - 1)))


def _row(row_V: Tensor) -> str:
    return "(" + ", ".join(f"{value:.4f}" for value in row_V.tolist()) + ")"
