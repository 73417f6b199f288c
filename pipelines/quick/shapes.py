"""What times alone say of speculation: how fast chains would be if every token were accepted with some probability."""

from __future__ import annotations

from rich.table import Table

from selector.actions import EMPTY, ActionSpace
from selector.latency import LatencyProfile

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


def assumed(profile: LatencyProfile, verifier: str) -> Table:
    """For each acceptance the chain with the most tokens per second, and how much faster it is than plain decoding.

    A chain of L tokens, each accepted with probability a if those before it are, yields `1 + a + .. + a^L` tokens.
    """
    space = ActionSpace.default()
    length = profile.target.lengths[-1]
    plain = 1 / profile.action_seconds(EMPTY, length, verifier)
    table = Table(
        title=f"{profile.device}, random weights: times are real, acceptance is assumed", title_justify="left"
    )
    for column in ("acceptance", "best chain", "block eff.", "predicted x autoregressive"):
        table.add_column(column, justify="right")
    for acceptance in ACCEPTANCES:
        chains = [(plain, 1.0, 0)]
        for drafted in range(1, space.depth + 1):
            tokens = chains[-1][1] + acceptance**drafted
            seconds = profile.action_seconds(space.chain(drafted), length, verifier)
            chains.append((tokens / seconds, tokens, drafted))
        speed, tokens, drafted = max(chains)
        table.add_row(f"{acceptance:g}", str(drafted), f"{tokens:.2f}", f"{speed / plain:.2f}")
    return table
