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
    rows, config, (output,) = read_timings(path), stage.config, stage.outputs
    profile = profile_of(
        rows, str(path), config.latency.stepped, stage.depends["pair"], config.verifiers, drafts
    )
    if not stage.begin():
        return
    stage.replace()
    write_json(output, profile.to_json())
    if remark := misfit(rows if drafts else rows[rows["passes"] == 0], profile):
        stage.say(remark)
    stage.say(
        f"{output}: {len(rows)} timed steps, of up to {rows['batch'].max()} requests together"
    )
    stage.finish()


def stage_of(config: Config, name: str, path: Path, pair: str, output: Path) -> Stage:
    """The stage with what it depends on: the step times in `path` (else InputError), and the pair's
    fingerprint."""
    depends = {"timings": sha256(path), "stepped": config.latency.stepped, "pair": pair}
    return Stage(name, config, {**depends, "verifiers": list(config.verifiers)}, (output,))


def read_timings(path: Path) -> pd.DataFrame:
    """The rows of a CSV file with the columns of `Row`; InputError where the file or a row is not
    valid."""
    try:
        # pandas would drop the cells beyond the header
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = TypeAdapter(list[Row]).validate_python(
                [*csv.DictReader(file, restkey="a cell too many")]
            )
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first, (number, column) = error.errors()[0], error.errors()[0]["loc"]
        raise InputError(f"{path} line {int(number) + 2}: {column}: {first['msg']}") from error
    except (ValueError, csv.Error) as error:
        raise InputError(
            f"{path}: not a CSV file in UTF-8: {' '.join(str(error).split())}"
        ) from error
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
    rows = rows if drafts else rows[rows["passes"] == 0]
    if rows.empty:
        raise InputError(f"{name}: no rows")
    draft, target = list[Table](), list[Table]()
    for batch, together in rows.groupby("batch"):
        steps = {
            int(context): _steps(own, f"{name}: batch {batch}, context {context}", drafts)
            for context, own in together.groupby("context")
        }
        # a step's first draft pass has width 2 (`draft_passes`), and what drafting costs once per
        # step goes with it
        draft.append(
            Table(list(steps), [1, 2], [[own, own + once] for own, once, _ in steps.values()])
        )
        timed = [(list(seconds), list(seconds.values())) for *_, seconds in steps.values()]
        sizes = sorted({size for own, _ in timed for size in own})
        target.append(
            Table(
                list(steps),
                sizes,
                [[along(*own, size, stepped) for size in sizes] for own in timed],
            )
        )
    return LatencyProfile(
        device=f"an engine: {name}",
        pair=pair,
        draft=draft[0],
        target=target[0],
        verify=dict.fromkeys(verifiers, Verification()),
        decide=dict.fromkeys(LEVELS, 0.0),
        batches=Batches(sorted(set(rows["batch"].tolist())), draft, target, stepped),
    )


def _steps(rows: pd.DataFrame, place: str, drafts: bool) -> tuple[float, float, dict[Any, float]]:
    """Seconds of a draft pass, of drafting once per step, and of the rest of a step by verified
    tokens; the first two are 0 without a drafter. Rows without draft passes are taken as they are.
    The others are fitted by least squares,

        seconds = target(verified) + once + passes x draft,   target(0) = 0,

    without `once` where all rows have as many draft passes, or where it would be below 0.
    """
    sizes = sorted(set(rows["verified"].tolist()) - {0})
    if not sizes or sizes[0] < 1:
        raise InputError(
            f"{place}: "
            f"{'a row verifies less than a token' if sizes else 'no row verifies anything'}"
        )
    plain, drafted = rows[rows["passes"] == 0], rows[rows["passes"] > 0]
    target = plain[plain["verified"] > 0].groupby("verified")["seconds"].mean().to_dict()
    left = drafted["seconds"] - drafted["verified"].map(target).fillna(0)
    unknown = [size for size in sizes if size not in target]
    draft = once = 0.0
    for constant in (True, False) if drafts and drafted["passes"].nunique() > 1 else (False,):
        columns = [drafted["passes"]] * drafts + [drafted["passes"] > 0] * constant
        columns += [drafted["verified"] == size for size in unknown]
        if not columns:
            break
        solution, _, rank, _ = np.linalg.lstsq(
            np.stack(columns, axis=1).astype(float), left.to_numpy()
        )
        if rank == len(columns) and not (constant and solution[1] < 0):
            draft, once = (
                (float(solution[0]) if drafts else 0.0),
                float(solution[1]) if constant else 0.0,
            )
            target |= dict(zip(unknown, solution[drafts + constant :].tolist(), strict=True))
            break
    else:
        raise InputError(
            f"{place}: drafting cannot be told from verification: add a row of 0 verified tokens"
        )
    if draft < -1e-12 or min(target.values()) < 1e-12:
        raise InputError(
            f"{place}: by least squares, a pass of the draft or the target takes no time"
        )
    return (
        max(0.0, draft),
        once,
        {
            verified if verified % 1 else int(verified): target[verified]
            for verified in sorted(target)
        },
    )


def misfit(rows: pd.DataFrame, profile: LatencyProfile) -> str:
    """A remark on the row that the profile misses most, empty where that is little."""
    worst, worst_row = 0.0, ""
    profiles = {batch: profile.at_batch(batch) for batch in rows["batch"].unique().tolist()}
    for row in rows[rows["verified"] > 0].itertuples(index=False):
        batch_profile, length = profiles[row.batch], row.context
        predicted = batch_profile.target.at(length, row.verified) + (
            row.passes > 0
        ) * batch_profile.draft.at(length, 2)
        predicted += max(row.passes - 1, 0) * batch_profile.draft.at(length, 1)
        if (error := abs(predicted / row.seconds - 1)) > worst:
            worst, worst_row = (
                error,
                f"batch {row.batch}, context {length}, {row.verified:g} verified, {row.passes} "
                "passes",
            )
    return (
        f"the step times miss a row by {worst:.1%}, the most ({worst_row})"
        if worst > MISFIT
        else ""
    )
