"""How often each lifted rule loses to Traversal on random small worlds: `make worlds`.

Block efficiencies are exact: every draft of K root branches of two tokens is enumerated.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import track
from rich.table import Table

from data_gen.verification import get_verifier
from tests.data_gen.worlds import KINDS, World

WORLDS = 600
RULES = ("lifted_spectr", "lifted_priority", "lifted_uniform")


def main() -> None:
    """Print, for each rule, in how many worlds it loses, by how much at worst, and what it gains in the mean."""
    gains: dict[str, list[float]] = {name: [] for name in RULES}
    for seed in track(range(WORLDS), description="enumerating", console=Console(stderr=True)):
        world = World(3, depth=2, kind=KINDS[seed % len(KINDS)], seed=seed)
        K = 2 + seed // len(KINDS) % 2
        laws = {
            name: world.appended_law(get_verifier(name), world.delayed_trees(K, 0, 2)) for name in ("traversal", *RULES)
        }
        base = world.block_efficiency(laws["traversal"])
        for name in RULES:
            gains[name].append(world.block_efficiency(laws[name]) / base - 1)
    table = Table(title=f"{WORLDS} random worlds of 3 tokens, K = 2 or 3, L = 2, against Traversal")
    for column in ("rule", "loses in", "worst", "mean gain"):
        table.add_column(column)
    for name, values in gains.items():
        lost = sum(value < -1e-12 for value in values)
        table.add_row(name, f"{lost / WORLDS:.1%}", f"{min(values):+.2%}", f"{sum(values) / WORLDS:+.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
