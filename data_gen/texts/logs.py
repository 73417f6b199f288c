"""Logs of engines, and a run's own traces read as a log: how many of a drafter's tokens are
accepted at each position.

`log_lines` has the format.

Legend: R positions, D depths, S survivals of all trees, the chain's first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_gen.models.sampling import Sampling
from data_gen.texts.log_lines import (
    DRAFTER,
    NO_DRAFTER,
    AbortedRequest,
    LoggedRecord,
    record_of,
)
from data_gen.texts.log_steps import predicted
from data_gen.texts.prompts import PACKED, joined, parsed_lines, place_of
from data_gen.traces import read_manifest, read_rows, space_of
from selector.schema import InputError, survival_column
from selector.train.data import SPLITS

# drafters that copy; their tokens are computed from the token ids instead
COPYING = ("ngram", "lookup", "suffix")
# of traces
COLUMNS = ("prompt", "kind", "source", "temperature", "top_p", "tokens", "start", "roots")
POSITIONS = 1_000_000  # of all texts that are read, which take 1 kB each in training
MOST_BAD = 0.05  # of a log's lines; where more are bad, the log is not what it is taken for


@dataclass(frozen=True)
class LoggedText:
    name: str
    source: str
    kind: str
    tokens: list[int]  # prompt and generated text
    start: int  # tokens of the prompt; position r of the generated text is token `start + r`
    # by drafter, P(accepted >= t) at each position, [R, D]; NaN if unknown
    survivals: dict[str, NDArray[np.float32]]
    origin: str  # file and line
    note: str = ""  # why nothing is known of its drafter's steps
    arrived: float | None = None  # seconds
    temperature: float | None = None

    @property
    def roots(self) -> int:
        """Positions at which every drafter has an entry; the text is cut after the last of them."""
        return min([len(self.tokens) - self.start, *map(len, self.survivals.values())])

    def is_sparse(self, drafter: str) -> bool:
        """Whether a drafter's labels are not known at every root."""
        survivals_RD = self.of(drafter)
        return survivals_RD.shape[1] == 0 or bool(np.isnan(survivals_RD).any())

    def of(self, drafter: str) -> NDArray[np.float32]:
        """A drafter's survivals at every root, float32 [R, D]; D is 0 for `NO_DRAFTER`."""
        if drafter == NO_DRAFTER:
            return np.zeros((self.roots, 0), np.float32)
        return self.survivals[drafter][: self.roots]

    def hits(self, drafter: str) -> list[float]:
        """Whether the drafter predicted each generated token, 1 or 0; 1 where that is not known,
        as of a step's additional token where the whole chain was accepted."""
        survivals_RD = self.of(drafter)
        if not survivals_RD.shape[1]:
            return [0.0] * self.roots
        return np.nan_to_num(predicted(survivals_RD).hit_R, nan=1.0).tolist()


class _Drawn:
    """Texts up to a number of positions in all: of more, those of sources that a hash draws."""

    def __init__(self, positions: int, arrived: list[float] | None) -> None:
        self._most = positions
        self._positions = 0.0
        self._limit = 1.0  # sources at places from here on are left out
        self._heap: list[tuple[float, int, LoggedText]] = []  # the last place first
        self.count = 0  # of all texts
        self._arrived = [] if arrived is None else arrived  # of all texts whose lines tell it

    def add(self, text: LoggedText) -> None:
        self.count += 1
        if text.arrived is not None:
            self._arrived.append(text.arrived)
        place = place_of(f"drawn {text.source}")
        if place >= self._limit:
            return
        heapq.heappush(self._heap, (-place, self.count, text))
        self._positions += _positions(text)
        while self._positions > self._most and len(self._heap) > 1:
            last, _, dropped = heapq.heappop(self._heap)
            self._limit = -last
            self._positions -= _positions(dropped)
        while self._heap and -self._heap[0][0] >= self._limit:  # of the same source
            self._positions -= _positions(heapq.heappop(self._heap)[2])

    @property
    def texts(self) -> list[LoggedText]:
        """In the order of the log."""
        return [text for _, _, text in sorted(self._heap, key=itemgetter(1))]


def _positions(text: LoggedText) -> float:
    """A text's share of the room: that of its positions, and an eighth of that for its prompt."""
    return len(text.tokens) - text.start + text.start / 8


def read_logs(
    paths: Sequence[Path],
    remarks: list[str] | None = None,
    positions: int = POSITIONS,
    arrived: list[float] | None = None,
) -> list[LoggedText]:
    """The texts of some files, in their order, without lines that do not fit and aborted requests;
    of more than so many positions those of some sources. What is left out is added to `remarks`,
    and the arrivals of all requests, also of those sources that are left out, to `arrived`.
    InputError where a file is missing or empty, nothing is left, or more than `MOST_BAD` of the
    finished requests' lines do not fit."""
    drawn = _Drawn(positions, arrived)
    bad: list[InputError] = []
    aborted = 0
    for path in paths:
        for parsed in parsed_lines(path, _text):
            if isinstance(parsed, InputError):
                bad.append(parsed)
            elif parsed is None:
                aborted += 1
            else:
                drawn.add(parsed)
    lines = drawn.count + len(bad)
    if bad and (not drawn.count or len(bad) > max(1, MOST_BAD * lines)):
        raise InputError(
            f"{bad[0]}; {len(bad)} of {lines} lines do not fit, and {MOST_BAD:.0%} may be left out"
        )
    if aborted and not drawn.count:
        raise InputError(f"{paths[0]}: all {aborted} requests were aborted")
    texts = drawn.texts
    left_out: list[str] = [] if remarks is None else remarks
    if bad:
        left_out.append(f"{len(bad)} of {lines} lines are left out, the first one is {bad[0]}")
    if aborted:
        left_out.append(f"{aborted} aborted requests are left out")
    if len(texts) < drawn.count:
        left_out.append(
            f"{len(texts)} of {drawn.count} texts are read, of sources that a hash draws, because "
            f"of logs.positions={positions}"
        )
    return texts


def _text(origin: str, line: Any) -> LoggedText | None:
    """The text of a line; None of an aborted request."""
    try:
        record = LoggedRecord.model_validate(record_of(line) if isinstance(line, dict) else line)
    except AbortedRequest:
        return None
    prompt = record.prompt_token_ids
    generated = record.generated_token_ids
    survivals: dict[str, NDArray[np.float32]] = {}
    for drafter, drafted in record.drafters.items():
        survivals[drafter] = drafted.survivals_RD(drafter, len(generated))
    file = Path(origin.rpartition(":")[0])
    if file.suffix in PACKED:
        file = file.with_suffix("")
    name = record.id or origin
    return LoggedText(
        name=name,
        source=record.source or f"{file.stem} {name}",
        kind=record.kind or file.stem,
        tokens=prompt + generated,
        start=len(prompt),
        survivals=survivals,
        origin=origin,
        note=record.note,
        arrived=record.arrived,
        temperature=record.temperature,
    )


def read_trace_log(folder: Path, sampling: Sampling) -> list[LoggedText]:
    """The texts of a trace store under one sampling setting, of all splits; InputError where it is
    not a trace store of this version, a file is damaged, or it has no such texts."""
    texts: list[LoggedText] = []
    column = survival_column(read_manifest(folder)["depends"]["verifiers"][0])
    for split in sorted(SPLITS):
        table = read_rows(folder, split)
        depth = space_of(table).depth
        for number, row in enumerate(table.select([*COLUMNS, column]).to_pylist()):
            if (row["temperature"], row["top_p"]) != (sampling.temperature, sampling.top_p):
                continue
            survivals_RS = np.array(row[column], np.float32).reshape(row["roots"], -1)
            survivals_RD = survivals_RS[:, :depth]
            texts.append(
                LoggedText(
                    name=row["prompt"],
                    source=row["source"],
                    kind=row["kind"],
                    tokens=row["tokens"],
                    start=row["start"] + 1,
                    survivals={DRAFTER: survivals_RD},
                    origin=f"{folder / split}:{number}",
                )
            )
    if not texts:
        raise InputError(
            f"{folder}: no texts of temperature {sampling.temperature:g}, top-p "
            f"{sampling.top_p:g} there"
        )
    return texts


def drafter_of(texts: Sequence[LoggedText], wanted: str | None) -> str:
    """The name of the drafter whose chains are candidates: a wanted one or `NO_DRAFTER`, else the
    only one that does not copy, if there are any and the steps of most texts are known. InputError
    where a text has no entry of it and no note says why, or several are there and none is
    wanted."""
    names: Counter[str] = Counter()  # in the order of the log
    for text in texts:
        names.update(list(text.survivals))
    unknown = sum(bool(text.note) for text in texts)
    few = 2 * unknown >= len(texts)
    if wanted == NO_DRAFTER or (wanted is None and (few or not names)):
        return NO_DRAFTER
    drafting = [name for name in names if name not in COPYING]
    listed = ", ".join(sorted(names))
    if wanted is None and len(drafting) != 1:
        raise InputError(f"logs.drafter: name one of the log's drafters ({listed})")
    drafter = wanted or drafting[0]
    if drafter not in names:
        raise InputError(f"logs.drafter: {drafter!r} is not in the log, which has {listed}")
    for text in texts:
        if drafter not in text.survivals and not text.note:
            raise InputError(f"{text.origin}: no entry of {drafter}")
    return drafter


def distinct(texts: Sequence[LoggedText]) -> list[LoggedText]:
    """The texts without repeated ones, where sources with equal prompts are one: neither may be in
    several splits."""
    texts_by_tokens: dict[tuple[int, ...], LoggedText] = {}
    for text in texts:
        texts_by_tokens.setdefault((text.start, *text.tokens), text)
    sources = joined(
        (text.source, tuple(text.tokens[: text.start])) for text in texts_by_tokens.values()
    )
    return [replace(text, source=sources[text.source]) for text in texts_by_tokens.values()]


class Logs(NamedTuple):
    """The distinct texts of some files and of held-out files, what is to be said of them, and when
    all requests came, in seconds, where lines tell it."""

    texts: list[LoggedText]
    held_out: list[LoggedText]
    remarks: list[str]
    arrived: list[float]

    @property
    def name(self) -> str:
        """The file of the first text."""
        return self.all[0].origin.rpartition(":")[0]

    @property
    def all(self) -> list[LoggedText]:
        return [*self.texts, *self.held_out]

    def of(self, drafter: str) -> Logs:
        """The texts from which a drafter's chains are learned, those with known steps; for
        `NO_DRAFTER`, all."""
        if drafter == NO_DRAFTER:
            return self
        texts = [text for text in self.texts if not text.note]
        held_out = [text for text in self.held_out if not text.note]
        return Logs(texts, held_out, self.remarks, self.arrived)


def read_all(
    paths: Sequence[Path],
    held_out: Sequence[Path],
    sampling: Sampling,
    positions: int = POSITIONS,
) -> Logs:
    """The texts of log files and of folders with traces; InputError as `read_logs` and
    `read_trace_log`, and for steps of sampled drafts."""
    remarks: list[str] = []
    arrived: list[float] = []
    texts = _read(paths, sampling, positions, remarks, arrived)
    tested = _read(held_out, sampling, positions, remarks, arrived)
    everything = [*texts, *tested]
    kept = distinct(everything)
    repeated = len(everything) - len(kept)
    if repeated:
        remarks.append(f"{repeated} texts are duplicates and are left out")
    noted: dict[str, list[LoggedText]] = {}
    for text in kept:
        if text.note:
            noted.setdefault(text.note, []).append(text)
    for note, concerned in noted.items():
        remarks.append(
            f"{len(concerned)} of {len(kept)} texts are for lookups alone: {note}; the first one "
            f"is {concerned[0].origin}"
        )
    tested_origins = {text.origin for text in tested}
    tested = [text for text in kept if text.origin in tested_origins]
    others = [text for text in kept if text.origin not in tested_origins]
    tested_sources = {text.source for text in tested}
    texts = [text for text in others if text.source not in tested_sources]
    left_out = len(others) - len(texts)
    if left_out:
        remarks.append(f"{left_out} texts are left out, because their sources are held out")
    return Logs(texts, tested, remarks, arrived)


def _read(
    paths: Sequence[Path],
    sampling: Sampling,
    positions: int,
    remarks: list[str],
    arrived: list[float],
) -> list[LoggedText]:
    stores = [path for path in paths if (path / "manifest.json").exists()]
    traced_texts: list[LoggedText] = []
    for folder in stores:
        traced_texts += read_trace_log(folder, sampling)
    files = [path for path in paths if path not in stores]
    texts = read_logs(files, remarks, positions, arrived)
    logged = [text for text in texts if text.temperature in (None, sampling.temperature)]
    if len(logged) < len(texts):
        remarks.append(
            f"{len(texts) - len(logged)} texts of another temperature than "
            f"{sampling.temperature:g} are left out"
        )
    if texts and not (logged or traced_texts):
        raise InputError(f"{files[0]}: no texts of temperature {sampling.temperature:g} there")
    are_greedy = sampling.temperature == 0 or sampling.draft_temperature == 0
    for text in logged:
        if not are_greedy and any(_are_steps(labels_RD) for labels_RD in text.survivals.values()):
            raise InputError(
                f"{text.origin}: above temperature 0, steps tell of other drafts only where drafts "
                "are greedy: set draft_temperature to 0 in `sampling` if the engine's are, else "
                "log survivals"
            )
    return [*logged, *traced_texts]


def _are_steps(survivals_RD: NDArray[np.float32]) -> bool:
    is_known_RD = ~np.isnan(survivals_RD)
    return not is_known_RD.all() and bool(np.isin(survivals_RD[is_known_RD], (0, 1)).all())
