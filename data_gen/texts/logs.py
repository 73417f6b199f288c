"""Logs of engines, and a run's own traces read as a log: how many of a drafter's tokens are accepted at each position.

A log has JSON lines. A line is a text:

    prompt_token_ids, generated_token_ids   lists of token ids
    drafters      {name: {"accepted": [..]}}: for each position of the generated text, how many drafted tokens of a
                  step that begins there are accepted; or
                  {name: {"survivals": [[..], ..]}}: for each position, P(accepted >= t) for t = 1, 2, ..; or
                  {name: {"steps": [[position, drafted, accepted], ..]}}: the steps that were decoded
    id, source, kind   optional: a name; texts of one source are not independent; the kind of work

A step commits the accepted tokens, the first one at the step's position, and one more token. Logs of SpecDecode-Bench's
simulator have `acc_<name>: {"acc_len": [..]}` instead, the number of tokens that a step commits. A line may also be an
engine's response (`data_gen.texts.responses`).

Legend: R positions, D depths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_gen.models.sampling import Sampling
from data_gen.texts.prompts import joined, lines_of, record_of
from data_gen.texts.responses import record_of_response
from data_gen.traces import check_shard, read_manifest
from selector.actions import LARGEST, ActionSpace
from selector.schema import InputError, survival_column

SIMULATOR = "acc_"  # prefix of drafters' names in the simulator's logs
COPYING = ("ngram", "lookup", "suffix")  # drafters that copy; their tokens are computed from the token ids instead
NO_DRAFTER = "none"  # a drafter's name: lookups alone
DRAFTER = "draft"  # the drafter's name in traces
COLUMNS = ("prompt", "kind", "source", "temperature", "top_p", "tokens", "start", "roots")  # of traces
LARGEST_ID = 2**31 - 1
LISTED = 20  # bad lines that are named
FOREIGN = 0.2  # share of a file's tokens that others have; below it, another tokenizer probably wrote the file


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
    """The texts of some files, in their order.

    Raises:
        InputError: a file is missing or empty, or lines do not fit; names each file and line.
    """
    texts: list[LoggedText] = []
    bad: list[str] = []
    for path in paths:
        before = len(texts) + len(bad)
        for place, line in lines_of(path):
            try:
                texts.append(_text(place, path.stem, line))
            except (ValueError, TypeError) as error:
                bad.append(f"{place}: {error}")
        if len(texts) + len(bad) == before:
            raise InputError(f"{path}: no texts there")
    if bad:
        more = [f"and {len(bad) - LISTED} more lines"] if len(bad) > LISTED else []
        raise InputError("\n".join([*bad[:LISTED], *more]))
    return texts


def _text(place: str, file: str, line: bytes) -> LoggedText:
    """The text of one line; ValueError or TypeError where the line does not fit."""
    record = record_of(line, "prompt_token_ids and generated_token_ids")
    response = record_of_response(record)
    record = response or record
    prompt, generated = (_ids(record, key) for key in ("prompt_token_ids", "generated_token_ids"))
    survivals = {name: _survivals(name, entry, len(generated)) for name, entry in _entries(record)}
    if not survivals and response is None:
        raise ValueError("no drafter: drafters, or acc_<name>, is missing")
    if not all(map(len, survivals.values())):
        raise ValueError("a drafter has no positions")
    if not prompt or not generated:
        raise ValueError("the prompt and the generated text must hold at least one token each")
    name = str(record.get("id", place))
    source, kind = (str(record.get(key, default)) for key, default in (("source", f"{file} {name}"), ("kind", file)))
    return LoggedText(name, source, kind, prompt + generated, len(prompt), survivals, place)


def _ids(record: dict[str, Any], key: str) -> list[int]:
    if key not in record:
        raise ValueError(f"{key} is missing")
    ids = record[key]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{key}: token ids are whole numbers")
    if ids and not 0 <= min(ids) <= max(ids) < LARGEST_ID:
        raise ValueError(f"{key}: a token id is below 0 or too large")
    return ids


def _entries(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    named = record.get("drafters", {})
    simulated = {key.removeprefix(SIMULATOR): value for key, value in record.items() if key.startswith(SIMULATOR)}
    for entries in (named, simulated):
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ValueError("drafters: an object with one object for each drafter")
    yield from chain(named.items(), simulated.items())


def _survivals(name: str, entry: dict[str, Any], positions: int) -> NDArray[np.float32]:
    """Survivals of one drafter, float32 [R, D]."""
    known = [key for key in READERS if key in entry]
    if len(known) != 1:
        raise ValueError(f"{name}: needs one of {', '.join(READERS)}")
    key = known[0]
    if not isinstance(entry[key], list):
        raise ValueError(f"{name}.{key}: a list")
    return READERS[key](f"{name}.{key}", entry[key], positions)


def _of_counts(name: str, values: list[Any], positions: int, least: int) -> NDArray[np.float32]:
    """From accepted tokens at each position; if `least` is 1, they include the additional one."""
    if not all(type(count) is int and least <= count < LARGEST for count in values):
        raise ValueError(f"{name}: whole numbers from {least} to {LARGEST - 1}")
    accepted_R = np.array(values, np.int64) - least
    return (accepted_R[:, None] > np.arange(accepted_R.max(initial=0))).astype(np.float32)


def _of_survivals(name: str, values: list[Any], positions: int) -> NDArray[np.float32]:
    depth = max((len(row) if isinstance(row, list) else LARGEST for row in values), default=0)
    if depth >= LARGEST:
        raise ValueError(f"{name}: a list of fewer than {LARGEST} probabilities for each position")
    rows = np.array([[*row, *[0.0] * (depth - len(row))] for row in values], dtype=np.float32).reshape(-1, depth)
    if not ((rows >= 0) & (rows <= 1)).all() or (np.diff(rows, axis=1) > 0).any():
        raise ValueError(f"{name}: probabilities from 0 to 1 that never rise with the depth")
    return rows


def _of_steps(name: str, values: list[Any], positions: int) -> NDArray[np.float32]:
    for step in values:
        if not isinstance(step, list) or len(step) != 3 or not all(type(number) is int for number in step):
            raise ValueError(f"{name}: [position, drafted, accepted] for each step")
        position, drafted, accepted = step
        if not (0 <= position < positions and 0 <= accepted <= drafted < LARGEST):
            raise ValueError(f"{name}: step {step} has a position outside of the text, or more accepted than drafted")
    rows = np.full((positions, max((drafted for _, drafted, _ in values), default=0)), np.nan, np.float32)
    for position, drafted, accepted in values:
        rows[position, :accepted] = 1
        if accepted < drafted:
            rows[position, accepted:] = 0
    return rows


Reader = Callable[[str, list[Any], int], NDArray[np.float32]]
READERS: dict[str, Reader] = {
    "accepted": partial(_of_counts, least=0),
    "acc_len": partial(_of_counts, least=1),
    "survivals": _of_survivals,
    "steps": _of_steps,
}


def read_trace_log(folder: Path, sampling: Sampling) -> list[LoggedText]:
    """The texts of a trace store under one sampling setting, of all splits.

    Raises:
        InputError: it is not a trace store of this version, a file is damaged, or it has no such texts.
    """
    manifest, depth = read_manifest(folder), ActionSpace.default().depth
    column = survival_column(manifest["depends"]["verifiers"][0])
    wanted, texts = (sampling.temperature, sampling.top_p), []
    for name, listed in sorted(manifest["shards"].items()):
        check_shard(folder, name, listed)
        for number, row in enumerate(pq.read_table(folder / name, columns=[*COLUMNS, column]).to_pylist()):
            if (row["temperature"], row["top_p"]) != wanted or not row["roots"]:
                continue
            survivals_RD = np.array(row[column], np.float32).reshape(row["roots"], -1)[:, :depth]
            facts = row["prompt"], row["source"], row["kind"], row["tokens"], row["start"] + 1
            texts.append(LoggedText(*facts, {DRAFTER: survivals_RD}, f"{folder / name}:{number}"))
    if not texts:
        raise InputError(f"{folder}: no texts of temperature {sampling.temperature:g}, top-p {sampling.top_p:g} there")
    return texts


def drafter_of(texts: Sequence[LoggedText], wanted: str | None) -> str:
    """The name of the drafter whose chains are candidates.

    Args:
        wanted: a drafter, or `NO_DRAFTER`; None for the only one that does not copy, if there are any.

    Raises:
        InputError: a text has no entry of it, or there are several and none is named.
    """
    names = Counter(name for text in texts for name in text.survivals)
    if wanted == NO_DRAFTER or (wanted is None and not names):
        return NO_DRAFTER
    drafting = [name for name in names if name not in COPYING]
    listed = ", ".join(sorted(names))
    if wanted is None and len(drafting) != 1:
        raise InputError(f"logs.drafter: name one of the log's drafters ({listed})")
    drafter = wanted or drafting[0]
    if drafter not in names:
        raise InputError(f"logs.drafter: {drafter!r} is not in the log, which has {listed}")
    without = next((text for text in texts if drafter not in text.survivals), None)
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


def read_all(paths: Sequence[Path], held_out: Sequence[Path], sampling: Sampling) -> Logs:
    """The texts of log files and of folders with traces; InputError as `read_logs` and `read_trace_log`."""
    texts, tested = (_read(each, sampling) for each in (paths, held_out))
    kept, places = distinct([*texts, *tested]), {text.place for text in tested}
    remarks = []
    if twice := len(texts) + len(tested) - len(kept):
        remarks.append(f"{twice} texts are duplicates and are left out")
    if shared := len({text.source for text in (*texts, *tested)}) - len({text.source for text in kept}):
        remarks.append(f"sources that are joined to others, because they have prompts in common: {shared}")
    for file in foreign(kept):
        said = "hardly any of its tokens occur in the other files: did another tokenizer write it?"
        remarks.append(f"{file}: {said}")
    texts, tested = ([text for text in kept if (text.place in places) == of] for of in (False, True))
    return Logs(texts, tested, remarks)


def _read(paths: Sequence[Path], sampling: Sampling) -> list[LoggedText]:
    stores = [path for path in paths if (path / "manifest.json").exists()]
    own = [text for folder in stores for text in read_trace_log(folder, sampling)]
    return [*read_logs([path for path in paths if path not in stores]), *own]


def foreign(texts: Sequence[LoggedText]) -> list[str]:
    """Files whose tokens are rare in the other files, so that another tokenizer probably wrote them."""
    by_file: dict[str, Counter[int]] = {}
    for text in texts:
        by_file.setdefault(text.place.rpartition(":")[0], Counter()).update(text.tokens)
    result = []
    for file, own in by_file.items():
        others = set().union(*(counts for name, counts in by_file.items() if name != file))
        shared = sum(count for token, count in own.items() if token in others)
        if len(by_file) > 1 and shared < FOREIGN * own.total():
            result.append(file)
    return result
