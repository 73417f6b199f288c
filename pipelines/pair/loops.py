"""Loops of greedy text."""

from __future__ import annotations

from collections.abc import Sequence

PERIOD, LOOP = 16, 16  # tokens of a loop's longest period, and of the shortest loop


def inside_loops(tokens: Sequence[int]) -> list[bool]:
    """Which tokens equal the one a period before them, with a period of up to `PERIOD` tokens, all along a run of at
    least two periods and `LOOP` tokens."""
    inside = [False] * len(tokens)
    for period in range(1, PERIOD + 1):
        begin = period
        for at in range(period, len(tokens) + 1):
            if at == len(tokens) or tokens[at] != tokens[at - period]:
                if at - begin >= max(2 * period, LOOP):
                    inside[begin:at] = [True] * (at - begin)
                begin = at + 1
    return inside
