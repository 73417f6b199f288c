"""Reads an engine's step times from a CSV file into a latency profile with a batch axis."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelines.config import Config
from pipelines.pair.loading import load_pair
from pipelines.run import Stage, write_json
from selector.latency import LatencyProfile
from selector.schema import LEVELS, InputError, sha256
from selector.tables import FREE, Batches, Table, along

COLUMNS = ("batch", "context", "verified", "passes", "seconds")


class Row(NamedTuple):
    """One timed step of an engine."""

    line: int  # in the file
    batch: int  # requests that are decoded together
    context: int  # tokens of each request before the step
    verified: int  # tokens of each request in the target's pass, the root included; 0 without a target pass
    passes: int  # of the draft
    seconds: float  # of the whole step

    @property
    def work(self) -> tuple[int, int, int, int]:
        return self.batch, self.context, self.verified, self.passes


class Steps(NamedTuple):
    """Seconds at one batch size and context: of a draft pass, and of the rest of a step by verified tokens."""

    draft: float
    target: dict[int, float]


def engine_path(config: Config) -> Path:
    return config.folder / "engine-latency.json"


def run(config: Config, path: Path) -> None:
    """Read an engine's times into a profile of its own."""
    rows = read_timings(path)
    pair = load_pair(config).fingerprint
    depends = {
        "timings": sha256(path),
        "stepped": config.latency.stepped,
        "pair": pair,
        "verifiers": list(config.verifiers),
    }
    stage = Stage("engine-latency", config, depends, (engine_path(config),))
    for remark in remarks(rows):
        stage.say(f"{path}: {remark}")
    profile = profile_of(rows, str(path), config.latency.stepped, pair, config.verifiers)
    if not stage.begin():
        return
    stage.replace()
    write_json(engine_path(config), profile.to_json())
    assert profile.batches is not None
    stage.say(f"{engine_path(config)}: {len(rows)} timed steps, of up to {profile.batches.sizes[-1]} requests together")
    stage.finish()


def load_engine_profile(config: Config) -> LatencyProfile:
    """The engine's profile; InputError where no engine's times were read."""
    if not engine_path(config).exists():
        raise InputError(f"{engine_path(config)}: no engine's times there: espalier latency --from timings.csv")
    return LatencyProfile.load(engine_path(config))


def read_timings(path: Path) -> list[Row]:
    """The rows of a CSV file with the columns `COLUMNS`, in any order.

    Raises:
        InputError: the file or a column is missing, a column is unknown, a value is invalid, or a step is timed twice;
            names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if sorted(reader.fieldnames or []) != sorted(COLUMNS):
                raise InputError(f"{path}: its columns must be {', '.join(COLUMNS)}")
            rows = [_row(path, reader.line_num, values) for values in reader]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file in UTF-8") from error
    if not rows:
        raise InputError(f"{path}: no rows")
    seen: dict[tuple[int, ...], int] = {}
    for row in rows:
        if row.work in seen:
            raise InputError(f"{path} line {row.line}: the step of line {seen[row.work]} again; keep one, the median")
        seen[row.work] = row.line
    return rows


def _row(path: Path, line: int, values: dict[str | None, str | None]) -> Row:
    try:
        batch, context, verified, passes = (int(values[name] or "") for name in COLUMNS[:-1])
        seconds = float(values["seconds"] or "")
    except ValueError as error:
        raise InputError(f"{path} line {line}: four whole numbers and a time in seconds are needed") from error
    if None in values:
        raise InputError(f"{path} line {line}: more values than columns")
    if min(batch, context) < 1 or min(verified, passes) < 0 or not verified + passes:
        raise InputError(f"{path} line {line}: a step has requests, a context, and verified tokens or draft passes")
    if not 0 < seconds < math.inf:
        raise InputError(f"{path} line {line}: seconds must be above 0")
    return Row(line, batch, context, verified, passes, seconds)


def remarks(rows: list[Row]) -> Iterator[str]:
    """One line for each row that takes less time than a row with less work, and for each gap in the grid."""
    for row in rows:
        less = [each for each in rows if each != row and all(a <= b for a, b in zip(each.work, row.work, strict=True))]
        slowest = max(less, key=lambda each: each.seconds, default=row)
        if slowest.seconds > row.seconds:
            yield (
                f"line {row.line}: {row.seconds:g} s, though line {slowest.line}, with less to do, took "
                f"{slowest.seconds:g} s; taken as it is"
            )
    timed = {row.work[:3] for row in rows}
    for batch in sorted({row.batch for row in rows}):
        for context in sorted({row.context for row in rows}):
            if not any(work[:2] == (batch, context) for work in timed):
                line = next(row.line for row in rows if row.context == context)
                yield f"line {line}: context {context} is not timed with batch {batch}; its other contexts count"
                continue
            for verified in sorted({row.verified for row in rows if row.verified}):
                if (batch, context, verified) not in timed:
                    line = next(row.line for row in rows if row.verified == verified)
                    yield f"line {line}: {verified} verified tokens are not timed with batch {batch}, context {context}"


def profile_of(
    rows: list[Row], name: str, stepped: bool, pair: str, verifiers: Sequence[str], drafts: bool = True
) -> LatencyProfile:
    """The latency profile of an engine. Its verification costs nothing beside the steps, which contain it.

    Args:
        stepped: whether sizes between the timed ones cost as much as the next larger one (`selector.tables.along`).
        drafts: whether there is a drafter; if not, only rows without draft passes count.

    Raises:
        InputError: drafting cannot be told from verification, or one of them would take no time.
    """
    rows = rows if drafts else [row for row in rows if row.passes == 0]
    cells: dict[int, dict[int, Steps]] = defaultdict(dict)
    for batch, context in sorted({(row.batch, row.context) for row in rows}):
        cells[batch][context] = _steps([row for row in rows if row.work[:2] == (batch, context)], name, drafts)
    batches = Batches(
        list(cells),
        [Table(list(own), [1], [[steps.draft] for steps in own.values()]) for own in cells.values()],
        [_target_table(own, stepped) for own in cells.values()],
        stepped,
    )
    return LatencyProfile(
        device=f"an engine: {name}",
        pair=pair,
        draft=batches.draft[0],
        target=batches.target[0],
        verify=dict.fromkeys(verifiers, FREE),
        decide=dict.fromkeys(LEVELS, 0.0),
        step=0.0,
        batches=batches,
    )


def _steps(rows: list[Row], name: str, drafts: bool) -> Steps:
    """Least squares of `seconds = target(verified) + passes x draft`, where `target(0)` is 0.

    Rows with equal `verified` and different `passes`, and rows with `verified` 0, determine `draft`, which is 0 where
    there is no drafter.
    """
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.verified].append(row)
    means = {
        verified: (sum(row.passes for row in own) / len(own), sum(row.seconds for row in own) / len(own))
        for verified, own in groups.items()
    } | {0: (0.0, 0.0)}
    square = product = 0.0
    for verified, own in groups.items():
        passes, seconds = means[verified]
        square += sum((row.passes - passes) ** 2 for row in own)
        product += sum((row.passes - passes) * (row.seconds - seconds) for row in own)
    place = f"{name} line {rows[0].line}: batch {rows[0].batch}, context {rows[0].context}"
    if drafts and square == 0:
        raise InputError(f"{place}: drafting cannot be told from verification: add a row of 0 verified tokens")
    draft, target = product / square if drafts else 0.0, {}
    if draft < 0:
        raise InputError(f"{place}: more draft passes take less time")
    for verified, own in sorted(groups.items()):
        if verified:
            passes, seconds = means[verified]
            target[verified] = seconds - draft * passes
            if target[verified] <= 0:
                raise InputError(f"{name} line {own[0].line}: its draft passes alone take longer by the other rows")
    if not target:
        raise InputError(f"{place}: no row verifies anything")
    return Steps(draft, target)


def _target_table(cells: dict[int, Steps], stepped: bool) -> Table:
    sizes = sorted({size for steps in cells.values() for size in steps.target})
    rows = [[along(list(s.target), list(s.target.values()), size, stepped) for size in sizes] for s in cells.values()]
    return Table(list(cells), sizes, rows)
