"""All verifiers on random small worlds, by enumeration: `make worlds`.

For each verifier: the largest error of the law of its text, its mean of E[tau], and the share of the optimum, which is
the most that any lossless verifier accepts on average from the same drafts. And how often it loses to Traversal.

Legend: C contexts, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import linprog
from scipy.sparse import coo_array

from data_gen.trees import DraftTree
from data_gen.verification import STYLED, VERIFIERS, get_verifier
from selector.actions import IID, STYLES
from tests.data_gen.worlds import KINDS, World

WORLDS = 60
KINDS_SHOWN = [kind for kind in KINDS if kind != "one_hot"]  # where every verifier accepts the same
SHAPES = [(1, 0, 3, IID), *((2, 0, 2, style) for style in STYLES), (3, 0, 1, IID), (3, 0, 1, STYLES[2])]


def optimum(world: World, shape: tuple[int, int, int, str]) -> float:
    """The largest mean E[tau] of a lossless verifier, by a linear program.

    With `g(d, v) = P(d is drafted, v or a node below is accepted)` and `A(c)` the sum over all nodes of context c:
    `g(d, root) = P(d)`, `sum g(d, children of v) <= g(d, v)`, and `A(c y) <= A(c) p(y | c)`. Whatever is accepted
    within these limits can be continued to follow the target.
    """
    rows: dict[object, int] = {}
    cells: dict[tuple[int, int], float] = {}
    bounds: dict[int, float] = {}
    count = 0  # of the variables g: one for every node but roots
    for d, (probability, trunk, branches) in enumerate(world.drafts(*shape)):
        tree, first = DraftTree.from_paths(trunk, branches), count
        for node in range(1, len(tree)):
            parent, context = int(tree.parents_N[node]), tuple(tree.token(n) for n in tree.path_to(node))
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
    limits = coo_array((np.array(list(cells.values())), tuple(np.array(list(cells)).T)), shape=(len(rows), count))
    above = np.array([bounds.get(row, 0.0) for row in range(len(rows))])
    return -float(linprog(-np.ones(count), A_ub=limits.tocsr(), b_ub=above, method="highs").fun)


def main() -> None:
    """Print one table for each shape."""
    for shape in SHAPES:
        K, L1, L2, style = shape
        rules = {
            name: get_verifier(name, style)
            for name, cls in (VERIFIERS | STYLED).items()
            if style in cls.styles and name != "khisti" and not (name == "spechub" and K > 2)
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rules}
        for seed in track(range(WORLDS), description=str(shape), console=Console(stderr=True)):
            world = World(2 + seed % 2, depth=L1 + L2, kind=KINDS_SHOWN[seed % len(KINDS_SHOWN)], seed=seed)
            best = optimum(world, shape)
            for name, rule in rules.items():
                law_CV = world.appended_law(rule, world.delayed_trees(*shape))
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
