"""Reads an engine's step times from a CSV file into a latency profile for several batch sizes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pipelines.config import Config
from pipelines.run import Stage, write_json
from selector.latency import Batches, LatencyProfile, Table, Verification, along
from selector.schema import LEVELS, InputError, sha256

MISFIT = 0.005  # the relative error of the profile at a row above which there is a remark
MOST_REQUESTS = 4096  # in a batch: replay walks along each, and engines take a few hundred
Count = Annotated[int, Field(ge=0, lt=2**31)]


class Row(BaseModel, extra="forbid"):
    """One timed step of an engine; its fields are the columns of the file."""

    batch: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]  # requests that are decoded together
    context: Annotated[Count, Field(gt=0)]  # tokens of each request before the step
    # mean tokens of a request, with the root; 0 without a pass
    verified: Annotated[float, Field(ge=0, lt=2**31)]
    passes: Count  # forward passes of the draft
    seconds: Annotated[float, Field(gt=0, lt=3600)]  # of the whole step


def engine_path(config: Config) -> Path:
    return config.folder / "engine-latency.json"


def run(stage: Stage, path: Path, drafts: bool = True) -> None:
    """Read an engine's step times into the profile that is the stage's output; `drafts` as in
    `profile_of`."""
    rows = read_timings(path)
    config = stage.config
    (output,) = stage.outputs
    profile = profile_of(
        rows, str(path), config.latency.stepped, stage.depends["pair"], config.verifiers, drafts
    )
    if not stage.begin():
        return
    stage.replace()
    write_json(output, profile.to_json())
    fitted_rows = rows if drafts else rows[rows["passes"] == 0]
    remark = misfit(fitted_rows, profile)
    if remark:
        stage.say(remark)
    largest = rows["batch"].max()
    stage.say(f"{output}: {len(rows)} timed steps, of up to {largest} requests together")
    stage.finish()


def stage_of(config: Config, name: str, path: Path, pair: str, output: Path) -> Stage:
    """The stage with what it depends on: the step times in `path` (else InputError), and the pair's
    fingerprint."""
    depends = {
        "timings": sha256(path),
        "stepped": config.latency.stepped,
        "pair": pair,
        "verifiers": list(config.verifiers),
    }
    return Stage(name, config, depends, (output,))


def read_timings(path: Path) -> pd.DataFrame:
    """The rows of a CSV file with the columns of `Row`; InputError where the file or a row is not
    valid."""
    try:
        # pandas would drop the cells beyond the header
        with path.open(encoding="utf-8-sig", newline="") as file:
            cells = list(csv.DictReader(file, restkey="a cell too many"))
            rows = TypeAdapter(list[Row]).validate_python(cells)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        number, column = first["loc"]
        raise InputError(f"{path} line {int(number) + 2}: {column}: {first['msg']}") from error
    except (ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not a CSV file in UTF-8: {reason}") from error
    frame = pd.DataFrame([row.model_dump() for row in rows], columns=list(Row.model_fields))
    repeated = frame.duplicated(list(Row.model_fields)[:-1])
    if repeated.any():
        raise InputError(
            f"{path} line {repeated.idxmax() + 2}: the step of an earlier line again; keep one, "
            "the median"
        )
    return frame


def profile_of(
    rows: pd.DataFrame,
    name: str,
    stepped: bool,
    pair: str,
    verifiers: Sequence[str],
    drafts: bool = True,
) -> LatencyProfile:
    """The latency profile of an engine, from the rows of `read_timings`; `stepped` as in
    `selector.latency.along`. Without a drafter (`drafts`), only rows without draft passes count.
    Verification is part of the timed steps, so it costs nothing more. InputError where drafting
    cannot be told from it, or one of them would take no time."""
    if not drafts:
        rows = rows[rows["passes"] == 0]
    if rows.empty:
        raise InputError(f"{name}: no rows")
    draft: list[Table] = []
    drafting: list[Table] = []
    target: list[Table] = []
    for batch, batch_rows in rows.groupby("batch"):
        tables = _tables(batch_rows, f"{name}: batch {batch}", stepped, drafts)
        draft.append(tables[0])
        drafting.append(tables[1])
        target.append(tables[2])
    return LatencyProfile(
        device=f"an engine: {name}",
        pair=pair,
        draft=draft[0],
        drafting=drafting[0],
        target=target[0],
        verify=dict.fromkeys(verifiers, Verification()),
        decide=dict.fromkeys(LEVELS, 0.0),
        batches=Batches(sorted(set(rows["batch"].tolist())), draft, drafting, target, stepped),
    )


def _tables(
    rows: pd.DataFrame, place: str, stepped: bool, drafts: bool
) -> tuple[Table, Table, Table]:
    """The seconds of the draft's passes, of drafting once, and of the rest of a step, for one batch
    size."""
    lengths: list[int] = []
    draft_seconds: list[list[float]] = []
    once_seconds: list[list[float]] = []
    timed: list[tuple[list[Any], list[float]]] = []
    for context, context_rows in rows.groupby("context"):
        pass_seconds, once, seconds_by_size = _steps(
            context_rows, f"{place}, context {context}", drafts
        )
        lengths.append(int(context))
        draft_seconds.append([pass_seconds])
        once_seconds.append([once])
        timed.append((list(seconds_by_size), list(seconds_by_size.values())))
    all_sizes: set[Any] = set()
    for context_sizes, _ in timed:
        all_sizes |= set(context_sizes)
    sizes = sorted(all_sizes)
    target_seconds: list[list[float]] = []
    for sizes_and_seconds in timed:
        target_seconds.append([along(*sizes_and_seconds, size, stepped) for size in sizes])
    return (
        Table(lengths, [1], draft_seconds),
        Table(lengths, [0], once_seconds),
        Table(lengths, sizes, target_seconds),
    )


def _steps(rows: pd.DataFrame, place: str, drafts: bool) -> tuple[float, float, dict[Any, float]]:
    """Seconds of a draft pass, of drafting once per step, and of the rest of a step by verified
    tokens; the first two are 0 without a drafter. Rows without draft passes are taken as they are.
    The others are fitted by least squares,

        seconds = target(verified) + once + passes x draft,   target(0) = 0,

    without `once` where all rows have as many draft passes, or where it would be below 0.
    """
    sizes = sorted(set(rows["verified"].tolist()) - {0})
    if not sizes:
        raise InputError(f"{place}: no row verifies anything")
    if sizes[0] < 1:
        raise InputError(f"{place}: a row verifies less than a token")
    plain = rows[rows["passes"] == 0]
    drafted = rows[rows["passes"] > 0]
    target = plain[plain["verified"] > 0].groupby("verified")["seconds"].mean().to_dict()
    unknown = [size for size in sizes if size not in target]
    left = drafted["seconds"] - drafted["verified"].map(target).fillna(0)
    fit = None
    if drafts and drafted["passes"].nunique() > 1:
        fit = _least_squares(drafted, left, unknown, drafts, with_once=True)
    if fit is None:
        fit = _least_squares(drafted, left, unknown, drafts, with_once=False)
    if fit is None:
        raise InputError(
            f"{place}: drafting cannot be told from verification: add a row of 0 verified tokens"
        )
    draft, once, unknown_seconds = fit
    target |= dict(zip(unknown, unknown_seconds, strict=True))
    if draft < -1e-12 or min(target.values()) < 1e-12:
        raise InputError(
            f"{place}: by least squares, a pass of the draft or the target takes no time"
        )
    seconds_by_size = {}
    for verified in sorted(target):
        # means of tokens are seldom whole
        size = verified if verified % 1 else int(verified)
        seconds_by_size[size] = target[verified]
    return max(0.0, draft), once, seconds_by_size


def _least_squares(
    drafted: pd.DataFrame, left: pd.Series, unknown: list[float], drafts: bool, with_once: bool
) -> tuple[float, float, list[float]] | None:
    """Seconds of a draft pass, of drafting once per step, and of the rest of a step by the
    `unknown` numbers of verified tokens, fitted to what is `left` of the steps' times; None where
    they are not determined, or `once` would be below 0."""
    columns = []
    if drafts:
        columns.append(drafted["passes"])
    if with_once:
        columns.append(drafted["passes"] > 0)
    constants = len(columns)
    columns += [drafted["verified"] == size for size in unknown]
    if not columns:
        return 0.0, 0.0, []
    matrix = np.stack(columns, axis=1).astype(float)
    solution, _, rank, _ = np.linalg.lstsq(matrix, left.to_numpy())
    if rank < len(columns):
        return None
    draft = once = 0.0
    if drafts:
        draft = float(solution[0])
    if with_once:
        once = float(solution[1])
    if once < 0:
        return None
    return draft, once, solution[constants:].tolist()


def misfit(rows: pd.DataFrame, profile: LatencyProfile) -> str:
    """A remark on the row that the profile misses most, empty where that is little."""
    worst = 0.0
    worst_row = ""
    profiles = {batch: profile.at_batch(batch) for batch in rows["batch"].unique().tolist()}
    for row in rows[rows["verified"] > 0].itertuples(index=False):
        batch_profile = profiles[row.batch]
        length = row.context
        predicted = batch_profile.target.at(length, row.verified)
        if row.passes > 0:
            predicted += batch_profile.drafting.at(length, 0)
            predicted += row.passes * batch_profile.draft.at(length, 1)
        error = abs(predicted / row.seconds - 1)
        if error > worst:
            worst = error
            worst_row = (
                f"batch {row.batch}, context {length}, {row.verified:g} verified, {row.passes} "
                "passes"
            )
    if worst > MISFIT:
        return f"the step times miss a row by {worst:.1%}, the most ({worst_row})"
    return ""
