"""What stages show while they run: progress, tables, and work that is shared by processes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch.utils.data import DataLoader

from selector.schema import InputError

T = TypeVar("T")
N = TypeVar("N")
R = TypeVar("R")
LINE_SECONDS = 20.0  # at least, between two lines on a stage's progress
# a user's names may look like markup or emoji
console = Console(highlight=False, markup=False, emoji=False)


@contextmanager
def ticking(words: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """A progress bar; where the output is no terminal, a line of plain text from time to time and
    at the end. Yields `tick(parts=1, note="")` to advance it."""
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(words, total=total, completed=done, note="")
        last_line = time.monotonic()

        def tick(parts: int = 1, note: str = "") -> None:
            nonlocal last_line
            bar.update(task, advance=parts, note=note)
            if not console.is_terminal and time.monotonic() > last_line + LINE_SECONDS:
                console.print(bar.get_renderable())
                last_line = time.monotonic()

        yield tick


def watched(items: Collection[T], words: str) -> Iterator[T]:
    """Iterate over items with a progress bar."""
    with ticking(words, len(items)) as tick:
        for item in items:
            yield item
            tick()


def made(make: Callable[[T], R], items: Mapping[N, T], processes: int) -> Iterator[tuple[N, R]]:
    """The names of some items and what `make` makes of them, as they are done: by this process, or
    by several copies of it with one thread each. InputError as `make` raises it."""
    options: dict[str, Any] = {"batch_size": None, "collate_fn": partial(_tried, make)}
    if processes > 1:
        options |= {
            "num_workers": processes,
            "prefetch_factor": 1,
            "in_order": False,
            "multiprocessing_context": "fork",
        }
    for name, result in DataLoader(list(items.items()), **options):  # type: ignore[arg-type]
        if isinstance(result, InputError):
            raise result
        yield name, result


def _tried(make: Callable[[T], R], item: tuple[N, T]) -> tuple[N, R | InputError]:
    name, value = item
    try:
        return name, make(value)
    except InputError as error:  # raised there, it would come with a traceback in its words
        return name, error


def table(rows: Sequence[Mapping[str, str]], title: str, caption: str | None = None) -> Table:
    """Rows with the same keys as a table for the terminal. Columns that hold only numbers are
    right-aligned."""
    rich_table = Table(
        title=f"\n{title}", caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    rich_table.title_justify = "left"
    rich_table.caption_justify = "left"
    for name in rows[0]:
        is_numeric = all(re.fullmatch(r"[-+±\d.,%\[\] *]*", row[name]) for row in rows)
        rich_table.add_column(name, justify="right" if is_numeric else "left", overflow="fold")
    for row in rows:
        rich_table.add_row(*row.values())
    return rich_table
