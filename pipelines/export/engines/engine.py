"""What an engine is to the tables: what it reads, what it does without, and in what file and with what command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pipelines.export.engines.lengths import Choice, Defaults


class Range(NamedTuple):
    """Batch sizes from `first` to `last`, and how many tokens each request drafts in them."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class Served:
    """What a table is for.

    Attributes:
        target, draft: the models' directories or hub ids.
        block: whether chains are verified as blocks, and not token by token.
        sampled: whether drafts are drawn at the request's temperature, and not the likeliest tokens.
        ranges: the lengths of all batch sizes, from 1 on.
    """

    target: str
    draft: str
    block: bool
    sampled: bool
    ranges: list[Range]

    @property
    def longest(self) -> int:
        return max(each.length for each in self.ranges)

    @property
    def requests(self) -> int:
        """The largest batch."""
        return self.ranges[-1].last


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        read: which version's source or documentation the file was written after.
        blocks: whether it has block verification.
        defaults: what it drafts without a table.
        first_is_longest: whether larger batches may not draft longer chains than the smallest one.
        suffix: of its file.
        write: the file's text.
        command: the command line that uses the file.
        limits: what whoever uses the file must know; Markdown.
    """

    read: str
    blocks: bool
    defaults: Defaults
    first_is_longest: bool
    suffix: str
    write: Callable[[Served], str]
    command: Callable[[Served, str], str]
    limits: str


def ranges_of(choices: list[Choice]) -> list[Range]:
    """Lengths by ranges of batch sizes: a size between two timed ones takes the length of the larger one, as it is
    padded to that one's graph."""
    ranges: list[Range] = []
    for choice in choices:
        if ranges and ranges[-1].length == choice.length:
            ranges[-1] = ranges[-1]._replace(last=choice.batch)
        else:
            ranges.append(Range(ranges[-1].last + 1 if ranges else 1, choice.batch, choice.length))
    return ranges
