"""Reads an engine's step times into a latency profile for several batch sizes: from a CSV file with
a row for each kind of step, or from the JSON lines of all steps that a plug-in recorded."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from scipy.optimize import nnls

from pipelines.config import RECORDED, Config
from pipelines.latency import traffic
from pipelines.run import Stage, write_json
from selector.latency import Batches, LatencyProfile, Verification
from selector.schema import LEVELS, InputError, sha256
from selector.tables import Table, along

MISFIT = 0.005  # the relative error of the profile at a row above which there is a remark
UNSTEADY = 0.1  # the mean relative error of predicted step times above which there is a warning
KIND = ["batch", "context", "verified", "passes", "drafter"]  # of a step
MOST_REQUESTS = 4096  # in a batch: replay walks along each, and engines take a few hundred
Count = Annotated[int, Field(ge=0, lt=2**31)]


class Row(BaseModel, extra="forbid"):
    """One timed step of an engine; its fields are the columns of the file."""

    batch: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]  # requests that are decoded together
    context: Annotated[Count, Field(gt=0)]  # tokens of each request before the step
    # mean tokens of a request, with the root; 0 without a pass
    verified: Annotated[float, Field(ge=0, lt=2**31)]
    passes: Count  # forward passes of the draft
    drafter: bool = True  # whether the server has one
    tokens: Count = 0  # that the step yielded, of all requests
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
    if not stage.begin():
        return
    plain = rows[~rows["drafter"]]
    rows = rows[rows["drafter"]]
    if not drafts:
        rows = rows[rows["passes"] == 0]
    (output,) = stage.outputs
    config = stage.config
    make = partial(
        profile_of,
        name=str(path),
        stepped=config.latency.stepped,
        pair=stage.depends["pair"],
        verifiers=config.verifiers,
        drafts=drafts,
    )
    remarks: list[str] = []
    checks: list[dict[str, Any]] = []
    if path.suffix == RECORDED:
        rows = traffic.enough(rows, str(path), drafts)
        profile, checks = of_traffic(rows, make)
        for check in checks:
            remarks.append(f"{check['action']}: {check['ratio']:.2f} of the measured time")
        doubt = unsteady(checks)
        remarks.append(f"warning: {doubt}" if doubt else "")
    else:
        profile = make(rows)
        remarks.append(misfit(rows, profile))
    if not plain.empty:
        context = round(plain["context"].mean())
        seconds = plain.groupby("batch")["seconds"].mean()
        table = Table([context], seconds.index.tolist(), [seconds.tolist()])
        profile = replace(profile, plain=table)
    stage.replace()
    write_json(output, {**complete(profile).to_json(), "check": checks})
    for remark in filter(None, remarks):
        stage.say(remark)
    largest = rows["batch"].max()
    stage.say(f"{output}: {len(rows)} timed steps, of up to {largest} requests together")
    stage.finish()


def of_traffic(
    steps: pd.DataFrame, make: Callable[..., LatencyProfile]
) -> tuple[LatencyProfile, list[dict[str, Any]]]:
    """The profile of recorded steps, with draws; and predicted and measured means of steps that
    were held out from another fit, by requests and whether they draft."""

    def fitted(some: pd.DataFrame) -> LatencyProfile:
        return make(traffic.binned(some), stepped=False, knots=traffic.KNOTS)

    profile = fitted(steps)
    draws = [batches for draw in traffic.drawn(steps) if (batches := fitted(draw).batches)]
    shown, held_out = traffic.halves(steps)
    unseen = traffic.binned(held_out)
    unseen["predicted"] = predicted_seconds(unseen, fitted(shown))
    checks = []
    for (batch, drafts), part in unseen.groupby(["batch", unseen["verified"] > 1]):
        is_quick = traffic.quick(part["seconds"], part["predicted"])
        predicted, measured = part[is_quick][["predicted", "seconds"]].mean()
        name = f"held-out steps of {batch} requests{', drafting' if drafts else ''}"
        checks.append(checked(name, predicted, measured))
    return replace(profile, draws=draws), checks


def checked(name: str, predicted: float, measured: float) -> dict[str, Any]:
    """Predicted and measured mean seconds of some steps, as a profile's file holds them."""
    ratio = predicted / measured
    return {"action": name, "predicted": predicted, "measured": measured, "ratio": ratio}


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
    """The rows of a CSV file with the columns of `Row`, or of a plug-in's JSON lines with these
    keys; InputError where the file or a row is not valid."""
    is_recorded = path.suffix == RECORDED
    try:
        text = path.read_text(encoding="utf-8-sig")
        if is_recorded:
            whole_lines = text[: text.rfind("\n") + 1].splitlines()  # a server may be writing
            cells = [json.loads(line) for line in whole_lines]
        else:  # pandas would drop the cells beyond the header
            cells = list(csv.DictReader(StringIO(text, newline=""), restkey="a cell too many"))
        rows = TypeAdapter(list[Row]).validate_python(cells)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        number, *column = first["loc"]
        line = int(number) + (1 if is_recorded else 2)
        raise InputError(
            f"{path} line {line}: {'.'.join(map(str, column))}: {first['msg']}"
        ) from error
    except (ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: neither CSV nor JSON lines in UTF-8: {reason}") from error
    frame = pd.DataFrame([row.model_dump() for row in rows], columns=list(Row.model_fields))
    repeated = frame.duplicated(KIND)
    if repeated.any() and not is_recorded:
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
    knots: Sequence[float] = (),
) -> LatencyProfile:
    """The latency profile of an engine, from the rows of `read_timings`; `stepped` as in
    `selector.tables.along`. Without a drafter (`drafts`), only rows without draft passes count.
    Verification is part of the timed steps, so it costs nothing more. InputError where drafting
    cannot be told from it, or one of them would take no time."""
    rows = rows[rows["drafter"]]
    if not drafts:
        rows = rows[rows["passes"] == 0]
    if rows.empty:
        raise InputError(f"{name}: no rows")
    tables: dict[int, tuple[Table, Table, Table]] = {}
    for batch, batch_rows in rows.groupby("batch"):
        tables[int(batch)] = _tables(batch_rows, f"{name}: batch {batch}", stepped, drafts, knots)
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
    rows: pd.DataFrame, name: str, stepped: bool, drafts: bool, knots: Sequence[float]
) -> tuple[Table, Table, Table]:
    """The seconds of the draft's passes, of drafting once, and of the rest of a step, for one batch
    size."""
    draft_seconds: list[list[float]] = []
    once_seconds: list[list[float]] = []
    timed: dict[int, dict[float, float]] = {}
    for context, context_rows in rows.groupby("context"):
        pass_seconds, once, by_size = _steps(
            context_rows, f"{name}, context {context}", drafts, knots
        )
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


def _steps(
    rows: pd.DataFrame, name: str, drafts: bool, knots: Sequence[float]
) -> tuple[float, float, dict[float, float]]:
    """Seconds of a draft pass, of drafting once per step, and of the rest of a step by verified
    tokens: by non-negative least squares of

        seconds = target(verified) + once [passes > 0] + passes x draft,   target(0) = 0,

    where the target's time is linear between `knots`, by default the verified tokens of the rows,
    and never falls. With `knots` the slowest tenth of the steps does not count. The first two are 0
    without a drafter (`drafts`), and `once` is 0 where the rows cannot tell it from the passes.
    """
    is_traffic = len(knots) > 0
    verified = rows["verified"]
    knots = knots or sorted(set(verified) - {0})
    if verified.max() == 0:
        raise InputError(f"{name}: no row verifies anything")
    if knots[0] < 1:
        raise InputError(f"{name}: a row verifies less than a token")
    # those up to which there is something behind the one before
    sizes = [knots[at] for at in np.unique(np.digitize(verified, knots[:-1], right=True))]
    parts = pd.DataFrame({sizes[0]: (verified > 0).astype(float)})
    for low, high in pairwise(sizes):
        parts[high] = ((verified - low) / (high - low)).clip(0, 1)
    if is_traffic and rows["more"].any():
        parts["more"] = rows["more"]
    if drafts:
        parts["draft"] = rows["passes"]
        parts["once"] = (rows["passes"] > 0).astype(float)
        if np.linalg.matrix_rank(parts) < parts.shape[1]:
            parts = parts.drop(columns="once")
    if np.linalg.matrix_rank(parts) < parts.shape[1]:
        raise InputError(
            f"{name}: drafting cannot be told from verification: add a row of 0 verified tokens"
        )
    if is_traffic:
        is_usual = traffic.usual(rows, np.digitize(verified, sizes))
        rises, _ = nnls(parts[is_usual], rows["seconds"][is_usual])
        is_quick = traffic.quick(rows["seconds"], parts @ rises)
        rises, _ = nnls(parts[is_quick], rows["seconds"][is_quick])
    else:
        rises, _ = nnls(parts, rows["seconds"])
    seconds = dict(zip(parts, rises.tolist(), strict=True))
    target = dict(zip(sizes, np.cumsum(rises[: len(sizes)]).tolist(), strict=True))
    if min(seconds[sizes[0]], seconds.get("draft", 1.0)) < 1e-12:
        raise InputError(
            f"{name}: by least squares, a pass of the draft or the target takes no time"
        )
    return seconds.get("draft", 0.0), seconds.get("once", 0.0), target


def misfit(rows: pd.DataFrame, profile: LatencyProfile) -> str:
    """A remark on the row that the profile misses most, empty where that is little."""
    rows = rows[(rows["verified"] > 0) & rows["drafter"]]
    error = (predicted_seconds(rows, profile) / rows["seconds"] - 1).abs()
    if error.max() <= MISFIT:
        return ""
    row = rows.loc[error.idxmax()]
    return (
        f"the step times miss a row by {error.max():.1%}, the most (batch {row.batch}, context "
        f"{row.context}, {row.verified:g} verified, {row.passes} passes)"
    )


def predicted_seconds(rows: pd.DataFrame, profile: LatencyProfile) -> pd.Series:
    """The profile's seconds of steps that verify something."""
    at_batch = cache(profile.at_batch)
    seconds = []
    for row in rows.itertuples():
        batch_profile = at_batch(row.batch)
        predicted = batch_profile.target.at(row.context, row.verified)
        if row.passes > 0:
            predicted += batch_profile.drafting.at(row.context, 0)
            predicted += row.passes * batch_profile.draft.at(row.context, 1)
        seconds.append(predicted)
    return pd.Series(seconds, rows.index, float)


def unsteady(rows: list[dict[str, Any]]) -> str:
    """A warning where predicted step times are far from measured ones, else an empty string."""
    if not rows:
        return ""
    error = statistics.mean(abs(row["ratio"] - 1) for row in rows)
    if error > UNSTEADY:
        return (
            f"predicted step times are {error:.0%} away from measured ones, in the mean: measure "
            "again at a quiet hour"
        )
    return ""
