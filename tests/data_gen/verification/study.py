"""Tables of docs/verifiers.md:

    .venv/bin/python -m tests.data_gen.verification.study shares
    .venv/bin/python -m tests.data_gen.verification.study losses
    .venv/bin/python -m tests.data_gen.verification.study pair
    OMP_NUM_THREADS=1 .venv/bin/python -m tests.data_gen.verification.study times

`shares` prints what each verifier accepts of the optimum, which is the most that any lossless
verifier accepts on average from the same drafts, in 60 random worlds a shape, by enumeration of
all drafts. `losses` prints the least and the mean difference of `lifted_best` from `traversal` in
tokens per step, in 200. `pair` prints the acceptance at one node of the pair that comes with
Espalier, and `times` how long its trees of 8 branches of 3 tokens take to verify.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
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

Shape = tuple[int, int, int]

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
TIE = 1e-12
COUNTS = (2, 4, 8, 16, 32)  # of drafts at a node of the pair
TEXTS = 8  # of each temperature
EVERY = 8  # of so many positions one is taken
LENGTH = 40  # tokens of a text
LISTS = 64  # of drafts without replacement
TIMED = ("specinfer", "traversal", "lifted_uniform", "lifted_priority", "lifted_best")
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


def shares() -> Table:
    table = Table(title=f"Share of the optimum, {WORLDS} worlds of 2 or 3 tokens")
    by_name: dict[str, list[str]] = {name: [] for name in VERIFIERS | STYLED}
    optima: list[str] = []
    table.add_column("verifier")
    for K, L1, L2, style in SHARES:
        table.add_column(f"({K}, {L1}, {L2}) {style}")
        sizes = [2, 3] if 3 ** (L1 + K * L2) <= MOST_DRAFTS else [2]
        worlds = []
        for seed in range(WORLDS):
            kind = KINDS_SHOWN[seed % len(KINDS_SHOWN)]
            worlds.append(World(sizes[seed % len(sizes)], L1 + L2, kind, seed))
        best = sum(optimum(world, K, L1, L2, style) for world in worlds)
        optima.append(f"{best / WORLDS:.2f}")
        for name, cls in (VERIFIERS | STYLED).items():
            cell = ""
            if style in cls.styles and name != TOO_SLOW:
                tokens = [tokens_per_step(world, name, K, L1, L2, style) for world in worlds]
                cell = f"{(sum(tokens) - WORLDS) / best:.1%}"
            by_name[name].append(cell)
    for name, texts in by_name.items():
        table.add_row(name, *texts)
    table.add_row("tokens of the optimum", *optima)
    return table


def losses() -> Table:
    table = Table(title=f"lifted_best less traversal in tokens per step, {MORE_WORLDS} worlds each")
    for column in ("trees", "tokens", "traversal", "mean", "least", "worlds in which it is less"):
        table.add_column(column)
    for shape in LOSSES:
        for vocabulary in (2, 3):
            if vocabulary ** (shape[1] + shape[0] * shape[2]) > MOST_DRAFTS:
                continue
            pairs = np.empty((MORE_WORLDS, 2))
            for seed in range(MORE_WORLDS):
                kind = ("random", "zeros", "peaked")[seed % 3]
                world = World(vocabulary, shape[1] + shape[2], kind, seed)
                for column, name in enumerate(("traversal", "lifted_best")):
                    pairs[seed, column] = tokens_per_step(world, name, *shape)
            over = pairs[:, 1] - pairs[:, 0]
            numbers = (f"{x:.4f}" for x in (pairs[:, 0].mean(), over.mean(), over.min()))
            table.add_row(str(shape), str(vocabulary), *numbers, str((over < -TIE).sum()))
            print(
                shape, vocabulary, over.mean(), over.min(), np.flatnonzero(over < -TIE), flush=True
            )
    return table


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
def times() -> Table:
    pair = ModelPair.load("smollm2", str(ROOT / "pipelines/pair/shipped/draft"), device="cpu")
    table = Table(title="Milliseconds of one verification of (8, 0, 3), the quickest of five")
    table.add_column("verifier")
    columns: dict[str, list[str]] = {name: [] for name in TIMED}
    for temperature in (0.6, 1.0):
        table.add_column(f"T = {temperature}")
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
        for name in TIMED:
            columns[name].append(f"{1000 * seconds[name].mean():.2f}")
    for name, cells in columns.items():
        table.add_row(name, *cells)
    return table


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
def of_pair() -> Table:
    pair = ModelPair.load("smollm2", str(ROOT / "pipelines/pair/shipped/draft"), device="cpu")
    table = Table(title="Acceptance at one node, and shares of the optimum")
    for column in ("temperature", "drafts", "verifier", *(f"K={k}" for k in COUNTS)):
        table.add_column(column)
    for temperature in (0.6, 1.0):
        found = list(positions(pair, Sampling(temperature=temperature)))
        by_row: dict[tuple[str, str], list[float]] = {}
        for k in COUNTS:
            totals: dict[tuple[str, str], float] = {}
            for p_V, q_V in found:
                for key, value in accepted(p_V, q_V, k).items():
                    totals[key] = totals.get(key, 0.0) + value / len(found)
            for key, value in totals.items():
                by_row.setdefault(key, []).append(value)
        for (style, name), values in by_row.items():
            best = by_row[style, "optimum"] if name != "optimum" else [1.0] * len(COUNTS)
            cells = [f"{value / most:.3f}" for value, most in zip(values, best, strict=True)]
            table.add_row(str(temperature), style, name, *cells)
    return table


if __name__ == "__main__":
    Console(width=160).print(
        {"shares": shares, "losses": losses, "pair": of_pair, "times": times}[sys.argv[1]]()
    )
