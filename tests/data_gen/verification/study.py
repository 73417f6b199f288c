"""Tables of docs/verifiers.md:

    .venv/bin/python -m tests.data_gen.verification.study shares
    .venv/bin/python -m tests.data_gen.verification.study losses
    .venv/bin/python -m tests.data_gen.verification.study pair
    OMP_NUM_THREADS=1 .venv/bin/python -m tests.data_gen.verification.study times

`shares` prints what each verifier accepts of the optimum, which is the most that any lossless
verifier accepts on average from the same drafts, in 60 random worlds a shape, by enumeration of
all drafts. `losses` prints the least and the mean difference of `lifted_best` from `traversal` in
tokens per step, in 200. `pair` prints the acceptance at one node of the pair that comes with
Espalier, and `times` the milliseconds that its trees of 8 branches of 3 tokens take to verify, the
quickest of six times each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array

from data_gen import CachedModel, Decoder, FixedTree, ModelPair, probabilities
from data_gen.trees import DraftTree
from data_gen.verification import STYLED, VERIFIERS, Verdict, get_verifier, optimal_acceptance
from data_gen.verification.distributions import Rows
from data_gen.verification.selection import Lifted
from data_gen.verification.traversal import Traversal
from selector import Action, Sampling
from selector.actions import IID, STYLES, WITHOUT_REPLACEMENT
from tests.checks import ROOT
from tests.data_gen.worlds import KINDS, World

WORLDS = 60
MORE_WORLDS = 200
KINDS_SHOWN = [kind for kind in KINDS if kind != "one_hot"]  # where every verifier accepts the same
SHARES = [
    (1, 0, 3, IID),
    *((2, 0, 2, style) for style in STYLES),
    *((K, 0, 1, IID) for K in (3, 6, 8)),
]
MOST_DRAFTS = 1000  # worlds of three tokens are left out where they have more
LOSSES = [(2, 0, 2), (3, 0, 2), (2, 0, 3), (4, 0, 1), (6, 0, 1), (8, 0, 1)]
COUNTS = (2, 4, 8, 16, 32)  # of drafts at a node of the pair
TEXTS = 8  # of each temperature
EVERY = 8  # of so many positions one is taken
LENGTH = 40  # tokens of a text
LISTS = 64  # of drafts without replacement
TIMED = ("specinfer", "traversal", "lifted_uniform", "lifted_priority", "lifted_best")
DRAFT = str(ROOT / "pipelines/pair/shipped/draft")
TOO_SLOW = "khisti"  # a linear program for every draft


def optimum(world: World, K: int, L1: int, L2: int, style: str) -> float:
    """The largest mean E[tau] of a lossless verifier, by a linear program where there are several
    levels.

    With `g(d, v) = P(d is drafted, v or a node below is accepted)` and `A(c)` the sum over all
    nodes of context c: `g(d, root) = P(d)`, `sum g(d, children of v) <= g(d, v)`, and
    `A(c y) <= A(c) p(y | c)`. What is accepted within these limits can be continued to follow the
    target.
    """
    if (L1, L2) == (0, 1):
        return optimal_acceptance(world.target[()], world.draft[()], K, style)
    rows: dict[object, int] = {}
    cells: dict[tuple[int, int], float] = {}
    bounds: dict[int, float] = {}
    count = 0  # of the variables g: one for every node but roots
    for d, (probability, trunk, branches) in enumerate(world.drafts(K, L1, L2, style)):
        tree = DraftTree.from_paths(trunk, branches)
        first = count
        for node in range(1, len(tree)):
            parent = int(tree.parents_N[node])
            context = tuple(map(tree.token, tree.path_to(node)))
            node_row = rows.setdefault(("children of", d, parent), len(rows))
            context_row = rows.setdefault(context, len(rows))
            cells[node_row, count] = cells[context_row, count] = 1.0
            if parent:
                cells[node_row, first + parent - 1] = -1.0
            else:
                bounds[node_row] = probability
                bounds[context_row] = float(world.target[()][context[0]])
            for token, p in enumerate(world.target[context].tolist()):
                cells[rows.setdefault((*context, token), len(rows)), count] = -p
            count += 1
    limits = coo_array(
        (np.array(list(cells.values())), tuple(np.array(list(cells)).T)), shape=(len(rows), count)
    )
    above = np.array([bounds.get(row, 0.0) for row in range(len(rows))])
    return -float(linprog(-np.ones(count), A_ub=limits.tocsr(), b_ub=above, method="highs").fun)


def tokens_per_step(world: World, name: str, K: int, L1: int, L2: int, style: str = IID) -> float:
    law_CV = world.appended_law(get_verifier(name, style), world.delayed_trees(K, L1, L2, style))
    return world.block_efficiency(law_CV)


def shares() -> pd.DataFrame:
    columns: dict[str, dict[str, float]] = {}
    for K, L1, L2, style in SHARES:
        sizes = [2, 3] if 3 ** (L1 + K * L2) <= MOST_DRAFTS else [2]
        worlds = []
        for seed in range(WORLDS):
            kind = KINDS_SHOWN[seed % len(KINDS_SHOWN)]
            worlds.append(World(sizes[seed % len(sizes)], L1 + L2, kind, seed))
        best = sum(optimum(world, K, L1, L2, style) for world in worlds)
        column = {"tokens": best / WORLDS}
        for name, cls in (VERIFIERS | STYLED).items():
            if style in cls.styles and name != TOO_SLOW:
                tokens = [tokens_per_step(world, name, K, L1, L2, style) for world in worlds]
                column[name] = (sum(tokens) - WORLDS) / best
        columns[f"({K}, {L1}, {L2}) {style}"] = column
    return pd.DataFrame(columns)


def losses() -> pd.DataFrame:
    rows = []
    for (K, L1, L2), vocabulary in product(LOSSES, (2, 3)):
        if vocabulary ** (L1 + K * L2) > MOST_DRAFTS:
            continue
        over = []
        for seed in range(MORE_WORLDS):
            world = World(vocabulary, L1 + L2, ("random", "zeros", "peaked")[seed % 3], seed)
            traversal, best = (
                tokens_per_step(world, name, K, L1, L2) for name in ("traversal", "lifted_best")
            )
            over.append(best - traversal)
        rows.append(((K, L1, L2), vocabulary, np.mean(over), min(over)))
    return pd.DataFrame(rows, columns=["trees", "tokens", "mean", "least"])


def prompts(pair: ModelPair) -> Iterator[list[int]]:
    lines = (ROOT / "pipelines" / "pair" / "prompts.jsonl").read_text().splitlines()
    for line in lines[:: len(lines) // TEXTS][:TEXTS]:
        turns = [{"role": "user", "content": json.loads(line)["text"]}]
        text = pair.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        yield pair.tokenizer.encode(text)


def positions(pair: ModelPair, sampling: Sampling) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The target's and the draft's distributions at places of texts that the target wrote, [V]."""
    for number, prompt in enumerate(prompts(pair)):
        decoder = Decoder(pair, sampling, get_verifier("traversal"), FixedTree(Action(1, 4, 0)))
        generator = torch.Generator().manual_seed(number)
        tokens = prompt + decoder.decode(prompt, LENGTH, generator).tokens
        rows = []
        for model in (pair.target, pair.draft):
            cached = CachedModel(model)
            cached.fill(prompt)
            rows.append(probabilities(cached.extend(tokens[len(prompt) :]).logits_WV, sampling))
        yield from zip(rows[0][::EVERY], rows[1][::EVERY], strict=True)


class Kept(Traversal):
    """Traversal, which keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[DraftTree, torch.Tensor, torch.Tensor]] = []

    def verify(self, tree: DraftTree, *args: Any) -> Verdict:
        self.steps.append((tree, args[0].clone(), args[1].clone()))
        return super().verify(tree, *args)


@torch.inference_mode()
def times() -> pd.DataFrame:
    pair = ModelPair.load("smollm2", DRAFT, device="cpu")
    columns: dict[str, dict[str, float]] = {}
    for temperature in (0.6, 1.0):
        kept = Kept()
        for number, prompt in enumerate(prompts(pair)):
            tree = FixedTree(Action(8, 0, 3))
            decoder = Decoder(pair, Sampling(temperature=temperature), kept, tree)
            decoder.decode(prompt, LENGTH // 4, torch.Generator().manual_seed(number))
        seconds: dict[str, np.ndarray] = {}
        for repeat in range(6):  # the first one compiles
            for at, (tree, p_NV, q_NV) in enumerate(kept.steps):
                for name in TIMED:
                    generator = torch.Generator().manual_seed(repeat)
                    rows = p_NV.clone(), q_NV.clone()  # in decoding, too, they are new
                    begin = perf_counter()
                    get_verifier(name).verify(tree, *rows, generator)
                    quickest = seconds.setdefault(name, np.full(len(kept.steps), np.inf))
                    quickest[at] = min(quickest[at], perf_counter() - begin)
        columns[f"T = {temperature}"] = {name: 1000 * seconds[name].mean() for name in TIMED}
    return pd.DataFrame(columns)


def accepted(p_V: torch.Tensor, q_V: torch.Tensor, k: int) -> dict[tuple[str, str], float]:
    """The optimum and what bottom-up verifiers accept at one node, by style and name."""
    results = {(style, "optimum"): optimal_acceptance(p_V, q_V, k, style) for style in STYLES}
    rows = Rows(p_V.unsqueeze(0), q_V.unsqueeze(0))
    node = rows.at(torch.tensor([0]))
    ones_Mk = torch.ones(1, k, dtype=torch.float64)
    grown = float(node.rejections(node.ones(), ones_Mk)[0, 0, -1])  # 1 / P(all are rejected)
    results[IID, "traversal"] = 1 - 1 / grown if grown > 0 else 1.0
    for name in ("lifted_uniform", "lifted_priority", "lifted_best"):
        verifier = get_verifier(name)
        assert isinstance(verifier, Lifted)
        flow_M = verifier.rule.select(node, node.ones(), ones_Mk.long()).flow_M
        results[IID, name] = float(flow_M)
    count = min(k, int((q_V > 0).sum()))
    generator = torch.Generator().manual_seed(k)
    entries_Lk = torch.multinomial(q_V.expand(LISTS, -1), count, generator=generator)
    nodes_L = rows.at(torch.zeros(LISTS, dtype=torch.int64))
    split = Traversal(WITHOUT_REPLACEMENT).split(nodes_L, nodes_L.ones(), entries_Lk)
    rejected_L = (1 - split.entry_Mk).prod(-1)
    results[WITHOUT_REPLACEMENT, "traversal"] = 1 - float(rejected_L.mean())
    return results


@torch.inference_mode()
def of_pair() -> pd.DataFrame:
    pair = ModelPair.load("smollm2", DRAFT, device="cpu")
    columns: dict[tuple[float, int], pd.Series] = {}
    for temperature in (0.6, 1.0):
        rows = list(positions(pair, Sampling(temperature=temperature)))
        for k in COUNTS:
            means = pd.DataFrame([accepted(p_V, q_V, k) for p_V, q_V in rows]).mean()
            means.index = pd.MultiIndex.from_tuples(means.index)
            best = means.xs("optimum", level=1)
            shares = means.div(best, level=0)
            for style in STYLES:
                shares[style, "optimum"] = best[style]
            columns[temperature, k] = shares
    return pd.DataFrame(columns)


if __name__ == "__main__":
    tables = {"shares": shares, "losses": losses, "pair": of_pair, "times": times}
    print(tables[sys.argv[1]]().round(4).to_string())
