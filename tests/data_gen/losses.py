"""All verifiers on random small worlds, by enumeration: `make worlds`.

For each verifier: the largest error of the law of its text, its mean of E[tau], and the share of the optimum, which is
the most that any lossless verifier accepts on average from the same drafts. And how often it loses to Traversal.

Legend: D drafts, N nodes of all drafts, C contexts.
"""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import Tensor

from data_gen.trees import DraftTree
from data_gen.verification import STYLED, VERIFIERS, get_verifier
from data_gen.verification.distributions import Rows
from selector.actions import IID, STYLES
from tests.data_gen.worlds import KINDS, World

WORLDS = 60
KINDS_SHOWN = [kind for kind in KINDS if kind != "one_hot"]  # where every verifier accepts the same
SHAPES = [(1, 0, 3, IID), *((2, 0, 2, style) for style in STYLES), (3, 0, 1, IID), (3, 0, 1, STYLES[2])]
Context = tuple[int, ...]


def optimum(world: World, shape: tuple[int, int, int, str]) -> float:
    """The largest mean E[tau] of a lossless verifier, by a linear program.

    With `g(d, v) = P(d is drafted, v or a node below is accepted)` and `A(c)` the sum over all nodes of context c:
    `g(d, root) = P(d)`, `sum g(d, children of v) <= g(d, v)`, and `A(c y) <= A(c) p(y | c)`. Whatever is accepted
    within these limits can be continued to follow the target.
    """
    places: list[tuple[int, Context]] = []  # variables g, of all nodes but roots
    parents: list[tuple[int, float]] = []  # of each: the parent's variable or -1, and P(d)
    for d, (probability, trunk, branches) in enumerate(world.drafts(*shape)):
        tree, first = DraftTree.from_paths(trunk, branches), len(places)
        for node in range(1, len(tree)):
            parent = int(tree.parents_N[node])
            places.append((d, tuple(tree.token(n) for n in tree.path_to(node))))
            parents.append((first + parent - 1 if parent else -1, probability))
    rows: dict[object, int] = {}
    cells: list[tuple[int, int, float]] = []
    bounds: dict[int, float] = {}
    inner: set[int] = set()
    for at, ((d, context), (parent, probability)) in enumerate(zip(places, parents, strict=True)):
        row = rows.setdefault(("node", parent if parent >= 0 else f"root {d}"), len(rows))
        cells.append((row, at, 1.0))
        if parent < 0:
            bounds[row] = probability
        elif parent not in inner:
            inner.add(parent)
            cells.append((row, parent, -1.0))
        limit = rows.setdefault(("context", context), len(rows))
        cells.append((limit, at, 1.0))
        own = float(world.target[context[:-1]][context[-1]])
        if len(context) == 1:
            bounds[limit] = own
    for row_key, row in list(rows.items()):
        if isinstance(row_key, tuple) and row_key[0] == "context" and len(row_key[1]) > 1:
            context = row_key[1]
            own = float(world.target[context[:-1]][context[-1]])
            cells += [(row, at, -own) for at, (_, each) in enumerate(places) if each == context[:-1]]
    row, column, value = map(np.array, zip(*cells, strict=True))
    size = max(rows.values()) + 1
    limits = coo_array((value, (row, column)), shape=(size, len(places)))
    above = np.array([bounds.get(r, 0.0) for r in range(size)])
    return -float(linprog(-np.ones(len(places)), A_ub=limits.tocsr(), b_ub=above, method="highs").fun)


class Hierarchical:
    """HSD (arXiv 2601.05724) on a chain, as in `simulation.py` of its authors' repository.

    With joint probabilities P and Q of the prefixes and c_n the largest of 1 and all P/Q up to n: from the end,

        accept all L tokens with probability min(1, P_L / Q_L), or, where `capped`, min(1, P_L / (c Q_L)), c = c_{L-1}
        else at n = L-1, .., 0:  D = P_n p / c_n - Q_n q;  stop there with sum D+ / max(sum D+, sum D-), extra ~ D+
    """

    def __init__(self, capped: bool) -> None:
        self.capped = capped
        self.name = "hsd, capped to the end" if capped else "hsd, as in its repository"

    def law(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> Tensor:
        law_NV = torch.zeros_like(p_NV)
        for root in tree.roots:
            chain = [root]
            while children := tree.children(chain[-1]):
                chain.append(children[0])
            law_NV[chain] = self._chain_law(tree, chain, Rows(p_NV, q_NV))
        return law_NV

    def _chain_law(self, tree: DraftTree, chain: list[int], rows: Rows) -> Tensor:
        p_NV, q_NV = rows.p_NV[chain], rows.q_NV[chain]
        tokens = [tree.token(node) for node in chain[1:]]
        P, Q, caps = [1.0], [1.0], [1.0]
        for n, token in enumerate(tokens):
            P.append(P[-1] * float(p_NV[n, token]))
            Q.append(Q[-1] * float(q_NV[n, token]))
            caps.append(max(caps[-1], P[-1] / Q[-1]))
        L, law_NV = len(tokens), torch.zeros_like(p_NV)
        accept = min(1.0, P[L] / Q[L] / (caps[L - 1] if self.capped else 1.0))
        law_NV[L], left = accept * p_NV[L], 1 - accept
        for n in reversed(range(L)):
            excess_V = P[n] / caps[n] * p_NV[n] - Q[n] * q_NV[n]
            above_V, below_V = excess_V.clamp(min=0), (-excess_V).clamp(min=0)
            most = float(max(above_V.sum(), below_V.sum()))
            stop_V = above_V / most if most > 0 else (p_NV[n] if n == 0 else 0 * above_V)
            law_NV[n], left = left * stop_V, left * (1 - float(stop_V.sum()))
        return law_NV


def main() -> None:
    """Print one table for each shape."""
    for shape in SHAPES:
        K, L1, L2, style = shape
        rules: dict[str, object] = {
            name: get_verifier(name, style)
            for name, cls in (VERIFIERS | STYLED).items()
            if style in cls.styles and name != "khisti" and not (name == "spechub" and K > 2)
        }
        if K == 1:
            rules |= {rule.name: rule for rule in map(Hierarchical, (False, True))}
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rules}
        for seed in track(range(WORLDS), description=str(shape), console=Console(stderr=True)):
            world = World(2 + seed % 2, depth=L1 + L2, kind=KINDS_SHOWN[seed % len(KINDS_SHOWN)], seed=seed)
            best = optimum(world, shape)
            for name, rule in rules.items():
                law_CV = world.appended_law(rule, world.delayed_trees(*shape))  # type: ignore[arg-type]
                tokens = world.block_efficiency(law_CV) - 1
                found[name].append((world.losslessness_error(law_CV, L1 + L2), tokens, best))
        _print(f"(K, L1, L2) = {shape[:3]}, {style}: {WORLDS} worlds of 2 or 3 tokens", found)


def _print(title: str, found: dict[str, list[tuple[float, float, float]]]) -> None:
    base = next((name for name in ("traversal", "greedy") if name in found), "")
    table = Table(title=title)
    for column in ("verifier", "law error", "tau", "of the optimum", f"worse than {base}", "at worst"):
        table.add_column(column)
    for name, values in found.items():
        error, tokens, best = (np.array(column) for column in zip(*values, strict=True))
        over = (1 + tokens) / (1 + np.array(found[base])[:, 1]) - 1
        lost, least = f"{(over < -1e-9).mean():.0%}", f"{over.min():+.1%}"
        table.add_row(
            name, f"{error.max():.0e}", f"{tokens.mean():.4f}", f"{tokens.sum() / best.sum():.1%}", lost, least
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
