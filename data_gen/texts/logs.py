"""Logs of engines, and a run's own traces read as a log: how many of a drafter's tokens are accepted at each position.

A log has JSON lines. A line is a text:

    prompt_token_ids, generated_token_ids   lists of token ids
    drafters      {name: {"accepted": [..]}}: for each position of the generated text, how many drafted tokens of a
                  step that begins there are accepted; or
                  {name: {"survivals": [[..], ..]}}: for each position, P(accepted >= t) for t = 1, 2, ..; or
                  {name: {"steps": [[position, drafted, accepted], ..]}}: the steps that were decoded
    id, source, kind   optional: a name; texts of one source are not independent; the kind of work

A step commits the accepted tokens, the first one at the step's position, and one more token. `data_gen.texts.responses`
makes such lines of what engines answer.

Legend: R positions, D depths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from data_gen.models.sampling import Sampling
from data_gen.texts.prompts import Record, joined, read_lines
from data_gen.texts.responses import record_of
from data_gen.traces import check_shard, read_manifest, space_of
from selector.actions import LARGEST
from selector.schema import InputError, survival_column

COPYING = ("ngram", "lookup", "suffix")  # drafters that copy; their tokens are computed from the token ids instead
NO_DRAFTER = "none"  # a drafter's name: lookups alone
DRAFTER = "draft"  # the drafter's name in traces
COLUMNS = ("prompt", "kind", "source", "temperature", "top_p", "tokens", "start", "roots")  # of traces

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31 - 1)]], Field(min_length=1)]
Count = Annotated[int, Field(ge=0, lt=LARGEST)]
Probabilities = Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=LARGEST - 1)]
Step = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]


class Drafted(BaseModel):
    """What a line says of one drafter, in one of three ways."""

    accepted: list[Count] | None = None
    survivals: list[Probabilities] | None = None
    steps: list[Step] | None = None

    def survivals_RD(self, name: str, positions: int) -> NDArray[np.float32]:
        """P(accepted >= t) at each position; NaN where it is not known."""
        if sum(each is not None for each in (self.accepted, self.survivals, self.steps)) != 1:
            raise ValueError(f"drafters.{name}: one of accepted, survivals and steps")
        if self.steps is not None:
            return _of_steps(name, self.steps, positions)
        rows = self.survivals if self.accepted is None else [[1.0] * count for count in self.accepted]
        assert rows is not None
        if not rows:
            raise ValueError(f"drafters.{name}: no positions")
        depth = max(map(len, rows))
        found_RD = np.array([[*row, *[0.0] * (depth - len(row))] for row in rows], np.float32).reshape(len(rows), depth)
        if (np.diff(found_RD, axis=1) > 0).any():
            raise ValueError(f"drafters.{name}.survivals: they never rise with the depth")
        return found_RD


def _of_steps(name: str, steps: list[list[int]], positions: int) -> NDArray[np.float32]:
    found_RD = np.full((positions, max((drafted for _, drafted, _ in steps), default=0)), np.nan, np.float32)
    for position, drafted, accepted in steps:
        if position >= positions or not accepted <= drafted < LARGEST:
            raise ValueError(
                f"drafters.{name}.steps: step {[position, drafted, accepted]} has a position outside of the text, or "
                "more accepted than drafted"
            )
        found_RD[position, :accepted] = 1
        if accepted < drafted:
            found_RD[position, accepted:] = 0
    return found_RD


class LoggedRecord(Record):
    prompt_token_ids: TokenIds
    generated_token_ids: TokenIds
    drafters: dict[str, Drafted]
    note: str = ""


@dataclass(frozen=True)
class LoggedText:
    """A text, and what was logged of its drafters."""

    name: str
    source: str
    kind: str
    tokens: list[int]  # prompt and generated text
    start: int  # tokens of the prompt; position r of the generated text is token `start + r`
    survivals: dict[str, NDArray[np.float32]]  # by drafter, P(accepted >= t) at each position, [R, D]; NaN if unknown
    place: str  # file and line
    note: str = ""  # why nothing is known of its drafter's steps

    @property
    def roots(self) -> int:
        """Positions at which every drafter has an entry; the text is cut after the last of them."""
        return min([len(self.tokens) - self.start, *map(len, self.survivals.values())])

    def of(self, drafter: str) -> NDArray[np.float32]:
        """A drafter's survivals at every root, float32 [R, D]; D is 0 for `NO_DRAFTER`."""
        return np.zeros((self.roots, 0), np.float32) if drafter == NO_DRAFTER else self.survivals[drafter][: self.roots]

    def hits(self, drafter: str) -> list[float]:
        """Whether the drafter predicted each generated token, 1 or 0.

        Where only steps were logged, accepted tokens count as hits. A step's additional token counts as a hit only if
        the whole chain was accepted.
        """
        survivals_RD = self.of(drafter)
        if not survivals_RD.shape[1]:
            return [0.0] * self.roots
        hits_R = survivals_RD[:, 0].copy()
        for root in np.flatnonzero(~np.isnan(hits_R) & (hits_R > 0)):
            accepted = int(np.nansum(survivals_RD[root]))
            end = root + accepted
            hits_R[root:end] = np.nan_to_num(hits_R[root:end], nan=1.0)
            if end < self.roots and np.isnan(hits_R[end]):
                hits_R[end] = float(np.isnan(survivals_RD[root]).any() or accepted == survivals_RD.shape[1])
        return np.nan_to_num(hits_R, nan=1.0).tolist()


def read_logs(paths: Sequence[Path]) -> list[LoggedText]:
    """The texts of some files, in their order; InputError as `read_lines`."""
    return [text for path in paths for text in read_lines(path, _text)]


def _text(place: str, line: Any) -> LoggedText:
    record = LoggedRecord.model_validate(record_of(line))
    prompt, generated, file = record.prompt_token_ids, record.generated_token_ids, Path(place.rpartition(":")[0]).stem
    survivals = {name: own.survivals_RD(name, len(generated)) for name, own in record.drafters.items()}
    name = record.id or place
    source, kind = record.source or f"{file} {name}", record.kind or file
    return LoggedText(name, source, kind, prompt + generated, len(prompt), survivals, place, record.note)


def read_trace_log(folder: Path, sampling: Sampling) -> list[LoggedText]:
    """The texts of a trace store under one sampling setting, of all splits; InputError where it is not a trace store of
    this version, a file is damaged, or it has no such texts."""
    manifest, texts = read_manifest(folder), []
    column = survival_column(manifest["depends"]["verifiers"][0])
    for name, listed in sorted(manifest["shards"].items()):
        check_shard(folder, name, listed)
        table = pq.read_table(folder / name, columns=[*COLUMNS, column])
        for number, row in enumerate(table.to_pylist()):
            if (row["temperature"], row["top_p"]) != (sampling.temperature, sampling.top_p) or not row["roots"]:
                continue
            survivals_RD = np.array(row[column], np.float32).reshape(row["roots"], -1)[:, : space_of(table).depth]
            facts = row["prompt"], row["source"], row["kind"], row["tokens"], row["start"] + 1
            texts.append(LoggedText(*facts, {DRAFTER: survivals_RD}, f"{folder / name}:{number}"))
    if not texts:
        raise InputError(f"{folder}: no texts of temperature {sampling.temperature:g}, top-p {sampling.top_p:g} there")
    return texts


def drafter_of(texts: Sequence[LoggedText], wanted: str | None) -> str:
    """The name of the drafter whose chains are candidates: a wanted one or `NO_DRAFTER`, else the only one that does
    not copy, if there are any and the steps of most texts are known. InputError where a text has no entry of it and no
    note says why, or several are there and none is wanted."""
    names = Counter(name for text in texts for name in text.survivals)
    few = 2 * sum(bool(text.note) for text in texts) >= len(texts)
    if wanted == NO_DRAFTER or (wanted is None and (few or not names)):
        return NO_DRAFTER
    drafting = [name for name in names if name not in COPYING]
    listed = ", ".join(sorted(names))
    if wanted is None and len(drafting) != 1:
        raise InputError(f"logs.drafter: name one of the log's drafters ({listed})")
    drafter = wanted or drafting[0]
    if drafter not in names:
        raise InputError(f"logs.drafter: {drafter!r} is not in the log, which has {listed}")
    without = next((text for text in texts if drafter not in text.survivals and not text.note), None)
    if without is not None:
        raise InputError(f"{without.place}: no entry of {drafter}")
    return drafter


def distinct(texts: Sequence[LoggedText]) -> list[LoggedText]:
    """The texts without repeated ones, where sources with equal prompts are one: neither may be in several splits."""
    found: dict[tuple[int, ...], LoggedText] = {}
    for text in texts:
        found.setdefault((text.start, *text.tokens), text)
    sources = joined((text.source, tuple(text.tokens[: text.start])) for text in found.values())
    return [replace(text, source=sources[text.source]) for text in found.values()]


class Logs(NamedTuple):
    """The distinct texts of some files and of held-out files, and what is to be said of them."""

    texts: list[LoggedText]
    held_out: list[LoggedText]
    remarks: list[str]

    @property
    def all(self) -> list[LoggedText]:
        return [*self.texts, *self.held_out]

    def of(self, drafter: str) -> Logs:
        """What a drafter's chains can be learned from: without the texts of whose steps nothing is known. Lookups are
        learned from all texts."""
        if drafter == NO_DRAFTER:
            return self
        known, held_out = ([text for text in own if not text.note] for own in (self.texts, self.held_out))
        return Logs(known, held_out, self.remarks)


def read_all(paths: Sequence[Path], held_out: Sequence[Path], sampling: Sampling) -> Logs:
    """The texts of log files and of folders with traces; InputError as `read_logs` and `read_trace_log`."""
    texts, tested = (_read(each, sampling) for each in (paths, held_out))
    kept, places = distinct([*texts, *tested]), {text.place for text in tested}
    remarks = []
    if twice := len(texts) + len(tested) - len(kept):
        remarks.append(f"{twice} texts are duplicates and are left out")
    if shared := len({text.source for text in (*texts, *tested)}) - len({text.source for text in kept}):
        remarks.append(f"sources that are joined to others, because they have prompts in common: {shared}")
    notes = Counter(text.note for text in kept if text.note)
    remarks += [f"{count} of {len(kept)} texts are for lookups alone: {note}" for note, count in notes.items()]
    texts, tested = ([text for text in kept if (text.place in places) == of] for of in (False, True))
    return Logs(texts, tested, remarks)


def _read(paths: Sequence[Path], sampling: Sampling) -> list[LoggedText]:
    stores = [path for path in paths if (path / "manifest.json").exists()]
    own = [text for folder in stores for text in read_trace_log(folder, sampling)]
    return [*read_logs([path for path in paths if path not in stores]), *own]
