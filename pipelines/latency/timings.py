"""Reads an engine's step times from a CSV file into a latency profile for several batch sizes."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
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


def run(
    stage: Stage,
    path: Path,
    drafts: bool = True,
    complete: Callable[[LatencyProfile], LatencyProfile] = lambda profile: profile,
) -> None:
    """Read an engine's step times into the profile that is the stage's output; `drafts` as in
    `profile_of`. `complete` adds what the engine has not timed."""
    rows = read_timings(path)
    config = stage.config
    (output,) = stage.outputs
    profile = profile_of(
        rows, str(path), config.latency.stepped, stage.depends["pair"], config.verifiers, drafts
    )
    if not stage.begin():
        return
    stage.replace()
    write_json(output, complete(profile).to_json())
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
    tables: dict[int, tuple[Table, Table, Table]] = {}
    for batch, batch_rows in rows.groupby("batch"):
        tables[int(batch)] = _tables(batch_rows, f"{name}: batch {batch}", stepped, drafts)
    draft, drafting, target = map(list, zip(*tables.values(), strict=True))
    return LatencyProfile(
        device=f"an engine: {name}",
        pair=pair,
        draft=draft[0],
        drafting=drafting[0],
        target=target[0],
        verify=dict.fromkeys(verifiers, Verification()),
        decide=dict.fromkeys(LEVELS, 0.0),
        batches=Batches(list(tables), draft, drafting, target, stepped),
    )


def _tables(
    rows: pd.DataFrame, name: str, stepped: bool, drafts: bool
) -> tuple[Table, Table, Table]:
    """The seconds of the draft's passes, of drafting once, and of the rest of a step, for one batch
    size."""
    draft_seconds: list[list[float]] = []
    once_seconds: list[list[float]] = []
    timed: dict[int, dict[float, float]] = {}
    for context, context_rows in rows.groupby("context"):
        pass_seconds, once, by_size = _steps(context_rows, f"{name}, context {context}", drafts)
        draft_seconds.append([pass_seconds])
        once_seconds.append([once])
        timed[int(context)] = by_size
    sizes: list[Any] = sorted(set().union(*timed.values()))  # means of tokens are seldom whole
    target_seconds: list[list[float]] = []
    for by_size in timed.values():
        grid = sorted(by_size)
        values = [by_size[size] for size in grid]
        target_seconds.append([along(grid, values, size, stepped) for size in sizes])
    lengths = list(timed)
    return (
        Table(lengths, [1], draft_seconds),
        Table(lengths, [0], once_seconds),
        Table(lengths, sizes, target_seconds),
    )


def _steps(rows: pd.DataFrame, name: str, drafts: bool) -> tuple[float, float, dict[float, float]]:
    """Seconds of a draft pass, of drafting once per step, and of the rest of a step by verified
    tokens; the first two are 0 without a drafter. Rows without draft passes are taken as they are.
    The others are fitted by least squares,

        seconds = target(verified) + once + passes x draft,   target(0) = 0,

    without `once` where all rows have as many draft passes, or where it would be below 0.
    """
    verifying = rows[rows["verified"] > 0]
    if verifying.empty:
        raise InputError(f"{name}: no row verifies anything")
    if verifying["verified"].min() < 1:
        raise InputError(f"{name}: a row verifies less than a token")
    plain = verifying[verifying["passes"] == 0]
    target = plain.groupby("verified")["seconds"].mean().to_dict()
    fit: dict[Any, float] | None = {"draft": 0.0}
    if drafts:
        drafted = rows[rows["passes"] > 0]
        columns = pd.DataFrame({"draft": drafted["passes"], "once": 1.0})
        for size in sorted(set(verifying["verified"]) - set(target)):
            columns[size] = drafted["verified"] == size
        left = drafted["seconds"] - drafted["verified"].map(target).fillna(0)
        fit = _least_squares(columns, left)
        if fit is None or fit["once"] < 0:
            fit = _least_squares(columns.drop(columns="once"), left)
    if fit is None:
        raise InputError(
            f"{name}: drafting cannot be told from verification: add a row of 0 verified tokens"
        )
    draft = fit.pop("draft")
    once = fit.pop("once", 0.0)
    target |= fit
    if draft < -1e-12 or min(target.values()) < 1e-12:
        raise InputError(
            f"{name}: by least squares, a pass of the draft or the target takes no time"
        )
    return max(0.0, draft), once, target


def _least_squares(columns: pd.DataFrame, left: pd.Series) -> dict[Any, float] | None:
    """The weights of the columns whose sum is nearest to `left`; None where they are not
    determined."""
    solution, _, rank, _ = np.linalg.lstsq(columns.to_numpy(float), left.to_numpy(float))
    if rank < columns.shape[1]:
        return None
    return dict(zip(columns.columns, solution.tolist(), strict=True))


def misfit(rows: pd.DataFrame, profile: LatencyProfile) -> str:
    """A remark on the row that the profile misses most, empty where that is little."""
    worst = 0.0
    remark = ""
    for batch, batch_rows in rows[rows["verified"] > 0].groupby("batch"):
        batch_profile = profile.at_batch(batch)
        for row in batch_rows.itertuples(index=False):
            predicted = batch_profile.target.at(row.context, row.verified)
            if row.passes > 0:
                predicted += batch_profile.drafting.at(row.context, 0)
                predicted += row.passes * batch_profile.draft.at(row.context, 1)
            error = abs(predicted / row.seconds - 1)
            if error > max(worst, MISFIT):
                worst = error
                remark = (
                    f"the step times miss a row by {error:.1%}, the most (batch {batch}, context "
                    f"{row.context}, {row.verified:g} verified, {row.passes} passes)"
                )
    return remark
