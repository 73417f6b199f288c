"""An engine's logs: for every text what a drafter would have had accepted at each of its positions.

A file holds JSON lines. A line is a text:

    prompt_token_ids, generated_token_ids   lists of token ids
    drafters      {name: {"accepted": [..]}}: for each position of the generated text, how many drafted tokens a step
                  that begins there would have had accepted; or
                  {name: {"survivals": [[..], ..]}}: there P(accepted >= t) by depth t = 1, 2, ..; or
                  {name: {"steps": [[position, drafted, accepted], ..]}}: the steps that were decoded, and no others
    id, source, kind   optional: a name, what it is not independent of (by default it stands alone), the kind of work

A step that begins at a position commits the accepted tokens, from the token at that position on, and one more. The logs
of SpecDecode-Bench's simulator are read as they are: `acc_<name>: {"acc_len": [..]}` counts the tokens that a step
commits, the additional one included.

Legend: R positions, D depths.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.actions import LARGEST
from selector.schema import InputError

SIMULATOR = "acc_"  # how the simulator's names of drafters begin
COPYING = ("ngram", "lookup", "suffix")  # names of drafters that copy: lookups are computed from the token ids instead
NO_DRAFTER = "none"  # a drafter's name: lookups alone
LARGEST_ID = 2**31 - 1
LISTED = 20  # bad lines that are named
FOREIGN = 0.2  # a file of whose tokens fewer occur in the others was probably written with another tokenizer


@dataclass(frozen=True)
class LoggedText:
    """A text, and what was logged of its drafters.

    Attributes:
        tokens: prompt and generated text.
        start: tokens of the prompt; position r of the generated text is token `start + r`.
        survivals: by drafter, P(accepted >= t) at each position, float32 [R, D]; NaN where that is not known.
        place: file and line.
    """

    name: str
    source: str
    kind: str
    tokens: list[int]
    start: int
    survivals: dict[str, NDArray[np.float32]]
    place: str

    @property
    def roots(self) -> int:
        """Positions for which there is an entry of every drafter: the text ends with the last of them."""
        return min(len(self.tokens) - self.start, *map(len, self.survivals.values()))

    def of(self, drafter: str) -> NDArray[np.float32]:
        """A drafter's survivals at every root, float32 [R, D]; of no depth where lookups alone are drafted."""
        return np.zeros((self.roots, 0), np.float32) if drafter == NO_DRAFTER else self.survivals[drafter][: self.roots]

    def hits(self, drafter: str) -> list[float]:
        """Of each generated token, whether the drafter had it right where it was committed.

        Where only steps were logged, accepted tokens count as hits, and the token that replaced a rejected one does
        not; one that followed a chain that was accepted whole counts as a hit.
        """
        survivals_RD = self.of(drafter)
        if not survivals_RD.shape[1]:
            return [0.0] * self.roots
        hits_R = survivals_RD[:, 0].copy()
        for root in np.flatnonzero(~np.isnan(hits_R) & (hits_R > 0)):
            accepted = int(np.nansum(survivals_RD[root]))
            inside_R = hits_R[root : root + accepted]
            inside_R[np.isnan(inside_R)] = 1.0
            end = root + accepted
            if end < self.roots and np.isnan(hits_R[end]):
                hits_R[end] = float(np.isnan(survivals_RD[root]).any() or accepted == survivals_RD.shape[1])
        return np.nan_to_num(hits_R, nan=1.0).tolist()

    def is_dense(self, drafter: str) -> bool:
        """Whether everything is known of a drafter at every root."""
        return not bool(np.isnan(self.of(drafter)).any())


def read_logs(paths: Sequence[Path]) -> list[LoggedText]:
    """The texts of some files, in their order.

    Raises:
        InputError: a file is missing or empty, or lines do not fit: each with its file and number. Nothing of such a
            log is used.
    """
    texts: list[LoggedText] = []
    bad: list[str] = []
    for path in paths:
        before = len(texts) + len(bad)
        for place, line in _lines(path):
            try:
                texts.append(_text(place, path.stem, line))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                bad.append(f"{place}: {_reason(error)}")
        if len(texts) + len(bad) == before:
            raise InputError(f"{path}: no texts there")
    if bad:
        more = [f"and {len(bad) - LISTED} more lines"] if len(bad) > LISTED else []
        raise InputError("\n".join([*bad[:LISTED], *more]))
    return texts


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file that hold anything, each with its place."""
    try:
        with path.open(encoding="utf-8-sig", errors="strict") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not a JSON object ({error.msg})"
    if isinstance(error, RecursionError):
        return "nested too deep"
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _text(place: str, file: str, line: str) -> LoggedText:
    """One line; ValueError, TypeError or KeyError where it does not fit."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    prompt, generated = (_ids(record, key) for key in ("prompt_token_ids", "generated_token_ids"))
    survivals = {name: _survivals(name, entry, len(generated)) for name, entry in _entries(record)}
    if not survivals:
        raise ValueError("no drafter: drafters, or acc_<name>, is missing")
    if not all(map(len, survivals.values())):
        raise ValueError("a drafter has no positions")
    if not prompt or not generated:
        raise ValueError("the prompt and the generated text hold at least one token each")
    name = str(record.get("id", place))
    source, kind = (str(record.get(key, default)) for key, default in (("source", f"{file} {name}"), ("kind", file)))
    return LoggedText(name, source, kind, prompt + generated, len(prompt), survivals, place)


def _ids(record: dict[str, Any], key: str) -> list[int]:
    ids = record[key]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{key}: token ids are whole numbers")
    if ids and not 0 <= min(ids) <= max(ids) < LARGEST_ID:
        raise ValueError(f"{key}: a token id is below 0 or too large")
    return ids


def _entries(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Drafters by name, in either format."""
    named = record.get("drafters", {})
    simulated = {key.removeprefix(SIMULATOR): value for key, value in record.items() if key.startswith(SIMULATOR)}
    for entries in (named, simulated):
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ValueError("drafters: an object with one object for each drafter")
    yield from chain(named.items(), simulated.items())


def _survivals(name: str, entry: dict[str, Any], positions: int) -> NDArray[np.float32]:
    """Survivals of one drafter, float32 [R, D]."""
    known = {key: read for key, read in READERS.items() if key in entry}
    if len(known) != 1:
        raise ValueError(f"{name}: needs one of {', '.join(READERS)}")
    key, read = next(iter(known.items()))
    values = entry[key]
    if not isinstance(values, list):
        raise ValueError(f"{name}.{key}: a list")
    return read(f"{name}.{key}", values, positions)


def _of_committed(name: str, values: list[Any], positions: int) -> NDArray[np.float32]:
    return _of_counts(name, values, 1)


def _of_accepted(name: str, values: list[Any], positions: int) -> NDArray[np.float32]:
    return _of_counts(name, values, 0)


def _of_counts(name: str, values: list[Any], least: int) -> NDArray[np.float32]:
    """Of how many tokens were accepted at each position, the additional one included if `least` is 1."""
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
    """Only what was drafted is known: of a chain that was accepted whole not how far a longer one would have come."""
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


READERS = {"accepted": _of_accepted, "acc_len": _of_committed, "survivals": _of_survivals, "steps": _of_steps}


def drafter_of(texts: Sequence[LoggedText], wanted: str | None) -> str:
    """The drafter whose chains are chosen from.

    Args:
        wanted: its name, or `NO_DRAFTER`; None where there is only one that does not copy.

    Raises:
        InputError: a text has no entry of it, or there are several and none is named.
    """
    if wanted == NO_DRAFTER:
        return wanted
    names = Counter(name for text in texts for name in text.survivals)
    drafting = [name for name in names if name not in COPYING]
    if wanted is None and len(drafting) != 1:
        listed = ", ".join(sorted(names))
        raise InputError(f"logs.drafter: name one of the log's drafters ({listed})")
    drafter = wanted or drafting[0]
    if drafter not in names:
        raise InputError(f"logs.drafter: {drafter!r} is not in the log, which has {', '.join(sorted(names))}")
    without = next((text for text in texts if drafter not in text.survivals), None)
    if without is not None:
        raise InputError(f"{without.place}: no entry of {drafter}")
    return drafter


def distinct(texts: Sequence[LoggedText]) -> list[LoggedText]:
    """The texts without those that stand there a second time: they would fall into several splits."""
    found: dict[tuple[int, ...], LoggedText] = {}
    for text in texts:
        found.setdefault((text.start, *text.tokens), text)
    return list(found.values())


def foreign(texts: Sequence[LoggedText]) -> list[str]:
    """Files whose tokens hardly occur in the others, by name: probably another tokenizer wrote them."""
    by_file: dict[str, Counter[int]] = {}
    for text in texts:
        by_file.setdefault(text.place.rpartition(":")[0], Counter()).update(text.tokens)
    result = []
    for file, own in by_file.items():
        others = set().union(*(set(counts) for name, counts in by_file.items() if name != file))
        shared = sum(count for token, count in own.items() if token in others)
        if len(by_file) > 1 and shared < FOREIGN * own.total():
            result.append(file)
    return result
