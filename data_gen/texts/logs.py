"""Logs of engines, and a run's own traces read as a log: how many of a drafter's tokens are
accepted at each position.

A log has JSON lines. A line is a text:

    prompt_token_ids, generated_token_ids   lists of token ids
    drafters      {name: {"accepted": [..]}}: for each position of the generated text, how many
                  drafted tokens of a step that begins there are accepted; or
                  {name: {"survivals": [[..], ..]}}: for each position, P(accepted >= t) for
                  t = 1, 2, ..; of decoded steps alone, null at the other positions; or
                  {name: {"steps": [[position, drafted, accepted], ..]}}: the steps that were
                  decoded
    id, source, kind   optional: a name; texts of one source are not independent; the kind of work

A step commits the accepted tokens, the first one at the step's position, and one more token.

An importer makes such lines of what another program writes: vLLM 0.33.0, SGLang 0.5.23, llama.cpp
0c1e570 and the simulator of SpecDecode-Bench. Of the engines, vLLM says how many tokens a step
drafted and accepted, of steps that drafted something, and SGLang will (pull request 34814, commit
622d048d). A text whose steps are not known is enough for lookups; its `note` says what is missing.

Legend: R positions, D depths, S survivals of all trees, the chain's first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from data_gen.models.sampling import Sampling
from data_gen.texts.prompts import PACKED, Record, joined, parsed_lines
from data_gen.traces import check_shard, read_manifest, space_of
from selector.actions import LARGEST
from selector.schema import InputError, survival_column

# drafters that copy; their tokens are computed from the token ids instead
COPYING = ("ngram", "lookup", "suffix")
NO_DRAFTER = "none"  # a drafter's name: lookups alone
# the drafter's name in traces and in responses, which do not say which one it was
DRAFTER = "draft"
# of traces
COLUMNS = ("prompt", "kind", "source", "temperature", "top_p", "tokens", "start", "roots")
SIMULATOR = "acc_"  # prefix of drafters' names in logs of SpecDecode-Bench's simulator
LEFT_OUT = "the engine left out steps that draft nothing, so it is not known where the others began"
NO_STEPS = "the engine gave sums over steps alone (the level `detailed` gives each step)"
MOST_BAD = 0.05  # of a log's lines; where more are bad, the log is not what it is taken for

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31 - 1)]], Field(min_length=1)]
Count = Annotated[int, Field(ge=0, lt=LARGEST)]
Probabilities = Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=LARGEST - 1)]
Step = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]


class Drafted(BaseModel):
    """What a line says of one drafter, in one of three ways."""

    accepted: list[Count] | None = None
    survivals: list[Probabilities | None] | None = None
    steps: list[Step] | None = None
    other_length: bool = False  # whether there may be more or fewer entries than positions

    def survivals_RD(self, name: str, positions: int) -> NDArray[np.float32]:
        """P(accepted >= t) at each position; NaN where it is not known. ValueError for what cannot
        be."""
        if sum(entries is not None for entries in (self.accepted, self.survivals, self.steps)) != 1:
            raise ValueError(f"drafters.{name}: one of accepted, survivals and steps")
        if self.steps is not None:
            return _of_steps(name, self.steps, positions)
        rows: list[list[float] | None] = self.survivals or []
        if self.accepted is not None:
            rows = [[1.0] * count for count in self.accepted]
        if not rows or (len(rows) != positions and not self.other_length):
            raise ValueError(
                f"drafters.{name}: {len(rows)} entries for {positions} generated tokens"
            )
        depth = max((len(row) for row in rows if row is not None), default=0)
        # where all positions have an entry, nothing beyond it is accepted
        beyond = np.nan if None in rows else 0.0
        survivals_RD = np.full((len(rows), depth), beyond, np.float32)
        for survivals_D, row in zip(survivals_RD, rows, strict=True):
            if row is not None:
                survivals_D[: len(row)] = row
        if (np.diff(survivals_RD, axis=1) > 0).any():
            raise ValueError(f"drafters.{name}.survivals: they never rise with the depth")
        return survivals_RD


def _of_steps(name: str, steps: list[list[int]], positions: int) -> NDArray[np.float32]:
    depth = max((drafted for _, drafted, _ in steps), default=0)
    survivals_RD = np.full((positions, depth), np.nan, np.float32)
    for position, drafted, accepted in steps:
        if position >= positions or not accepted <= drafted < LARGEST:
            raise ValueError(
                f"drafters.{name}.steps: step {[position, drafted, accepted]} has a position "
                "outside of the text, or more accepted than drafted"
            )
        survivals_RD[position, :accepted] = 1
        if accepted < drafted:
            survivals_RD[position, accepted:] = 0
    for step, following in pairwise(sorted(steps)):
        if following[0] <= step[0] + step[2]:
            raise ValueError(f"drafters.{name}.steps: step {following} begins within step {step}")
    return survivals_RD


class LoggedRecord(Record):
    prompt_token_ids: TokenIds
    generated_token_ids: TokenIds
    drafters: dict[str, Drafted] = Field({})
    note: str = ""


@dataclass(frozen=True)
class LoggedText:
    name: str
    source: str
    kind: str
    tokens: list[int]  # prompt and generated text
    start: int  # tokens of the prompt; position r of the generated text is token `start + r`
    # by drafter, P(accepted >= t) at each position, [R, D]; NaN if unknown
    survivals: dict[str, NDArray[np.float32]]
    place: str  # file and line
    note: str = ""  # why nothing is known of its drafter's steps

    @property
    def roots(self) -> int:
        """Positions at which every drafter has an entry; the text is cut after the last of them."""
        return min([len(self.tokens) - self.start, *map(len, self.survivals.values())])

    def of(self, drafter: str) -> NDArray[np.float32]:
        """A drafter's survivals at every root, float32 [R, D]; D is 0 for `NO_DRAFTER`."""
        if drafter == NO_DRAFTER:
            return np.zeros((self.roots, 0), np.float32)
        return self.survivals[drafter][: self.roots]

    def hits(self, drafter: str) -> list[float]:
        """Whether the drafter predicted each generated token, 1 or 0.

        Where only steps were logged, accepted tokens count as hits. A step's additional token
        counts as a hit only if the whole chain was accepted.
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
                short_chain = np.isnan(survivals_RD[root]).any()
                all_accepted = short_chain or accepted == survivals_RD.shape[1]
                hits_R[end] = float(all_accepted)
        return np.nan_to_num(hits_R, nan=1.0).tolist()


def read_logs(paths: Sequence[Path], remarks: list[str] | None = None) -> list[LoggedText]:
    """The texts of some files, in their order, without lines that do not fit; what is left out is
    added to `remarks`. InputError where a file is missing or empty, or more than `MOST_BAD` of all
    lines do not fit."""
    texts: list[LoggedText] = []
    bad: dict[str, list[InputError]] = {}  # by reason
    for path in paths:
        for text_or_error in parsed_lines(path, _text):
            if isinstance(text_or_error, InputError):
                reason = re.sub(r"\d+", "0", str(text_or_error).removeprefix(str(path)))
                bad.setdefault(reason, []).append(text_or_error)
            else:
                texts.append(text_or_error)
    count = sum(map(len, bad.values()))
    lines = len(texts) + count
    if bad and (not texts or count > max(1, MOST_BAD * lines)):
        first = next(iter(bad.values()))[0]
        raise InputError(
            f"{first}; {count} of {lines} lines do not fit, and {MOST_BAD:.0%} may be left out"
        )
    if remarks is not None:
        for same in bad.values():
            remarks.append(f"{len(same)} of {lines} lines are left out, the first one is {same[0]}")
    return texts


def _text(place: str, line: Any) -> LoggedText:
    record = LoggedRecord.model_validate(record_of(line))
    prompt = record.prompt_token_ids
    generated = record.generated_token_ids
    survivals: dict[str, NDArray[np.float32]] = {}
    for drafter, drafted in record.drafters.items():
        survivals[drafter] = drafted.survivals_RD(drafter, len(generated))
    file = Path(place.rpartition(":")[0])
    if file.suffix in PACKED:
        file = file.with_suffix("")
    name = record.id or place
    return LoggedText(
        name=name,
        source=record.source or f"{file.stem} {name}",
        kind=record.kind or file.stem,
        tokens=prompt + generated,
        start=len(prompt),
        survivals=survivals,
        place=place,
        note=record.note,
    )


def read_trace_log(folder: Path, sampling: Sampling) -> list[LoggedText]:
    """The texts of a trace store under one sampling setting, of all splits; InputError where it is
    not a trace store of this version, a file is damaged, or it has no such texts."""
    manifest = read_manifest(folder)
    texts: list[LoggedText] = []
    column = survival_column(manifest["depends"]["verifiers"][0])
    for name, listed in sorted(manifest["shards"].items()):
        check_shard(folder, name, listed)
        table = pq.read_table(folder / name, columns=[*COLUMNS, column])
        for number, row in enumerate(table.to_pylist()):
            row_setting = (row["temperature"], row["top_p"])
            if row_setting != (sampling.temperature, sampling.top_p) or not row["roots"]:
                continue
            survivals_RS = np.array(row[column], np.float32).reshape(row["roots"], -1)
            survivals_RD = survivals_RS[:, : space_of(table).depth]
            texts.append(
                LoggedText(
                    name=row["prompt"],
                    source=row["source"],
                    kind=row["kind"],
                    tokens=row["tokens"],
                    start=row["start"] + 1,
                    survivals={DRAFTER: survivals_RD},
                    place=f"{folder / name}:{number}",
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
            raise InputError(f"{text.place}: no entry of {drafter}")
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
    """The distinct texts of some files and of held-out files, and what is to be said of them."""

    texts: list[LoggedText]
    held_out: list[LoggedText]
    remarks: list[str]

    @property
    def name(self) -> str:
        """The file of the first text."""
        return self.all[0].place.rpartition(":")[0]

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
        return Logs(texts, held_out, self.remarks)


def read_all(paths: Sequence[Path], held_out: Sequence[Path], sampling: Sampling) -> Logs:
    """The texts of log files and of folders with traces; InputError as `read_logs` and
    `read_trace_log`."""
    remarks: list[str] = []
    texts = _read(paths, sampling, remarks)
    tested = _read(held_out, sampling, remarks)
    everything = [*texts, *tested]
    kept = distinct(everything)
    repeated = len(everything) - len(kept)
    if repeated:
        remarks.append(f"{repeated} texts are duplicates and are left out")
    sources_joined = _sources(everything) - _sources(kept)
    if sources_joined:
        remarks.append(
            "sources that are joined to others, because they have prompts in common: "
            f"{sources_joined}"
        )
    notes = Counter(text.note for text in kept if text.note)
    for note, count in notes.items():
        remarks.append(f"{count} of {len(kept)} texts are for lookups alone: {note}")
    tested_places = {text.place for text in tested}
    tested = [text for text in kept if text.place in tested_places]
    others = [text for text in kept if text.place not in tested_places]
    tested_sources = {text.source for text in tested}
    texts = [text for text in others if text.source not in tested_sources]
    left_out = len(others) - len(texts)
    if left_out:
        remarks.append(f"{left_out} texts are left out, because their sources are held out")
    return Logs(texts, tested, remarks)


def _sources(texts: Sequence[LoggedText]) -> int:
    """How many sources the texts have."""
    return len({text.source for text in texts})


def _read(paths: Sequence[Path], sampling: Sampling, remarks: list[str]) -> list[LoggedText]:
    stores = [path for path in paths if (path / "manifest.json").exists()]
    traced_texts: list[LoggedText] = []
    for folder in stores:
        traced_texts += read_trace_log(folder, sampling)
    files = [path for path in paths if path not in stores]
    return [*read_logs(files, remarks), *traced_texts]


class Simulated(BaseModel):
    """The tokens that a step at each position commits, the additional one included."""

    acc_len: list[Annotated[int, Field(ge=1, strict=True)]]


class Metrics(BaseModel):
    """Of vLLM, and of SGLang, whose lengths count the root or the additional token."""

    num_spec_steps: int = 0
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None
    num_verified_draft_tokens: int = 0
    verify_lengths: list[Annotated[int, Field(ge=1)]] | None = None
    accept_lengths: list[Annotated[int, Field(ge=1)]] | None = None


def record_of(line: Any) -> Any:
    """The line of a log; a line of no known program is taken as it is. ValueError where a response
    holds no token ids or fewer than it had, several answers, or steps of which lists of different
    lengths tell."""
    if not isinstance(line, dict):
        return line
    # SGLang's request log
    if line.get("event") == "request.finished" and isinstance(line.get("out"), dict):
        prompt = _object_or_empty(line, "obj").get("input_ids")
        return _record(line["out"], "output_ids", {"prompt_token_ids": prompt, **line["out"]})
    # vLLM, SGLang: /v1/completions and /v1/chat/completions
    choices = line.get("choices")
    if isinstance(choices, list):
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise ValueError("choices: one answer to one prompt is needed (n = 1)")
        return _record(line, "token_ids", {**line, **choices[0]})
    if isinstance(line.get("meta_info"), dict):  # SGLang: /generate
        return _record(line, "output_ids", line)
    if isinstance(line.get("timings"), dict):  # llama.cpp: /completion
        return _record(line, "tokens", line)
    drafters = {}
    for key in line:
        if key.startswith(SIMULATOR):
            counts = [count - 1 for count in Simulated.model_validate(line[key]).acc_len]
            drafters[key.removeprefix(SIMULATOR)] = {"accepted": counts, "other_length": True}
    for key in ("prompt_token_ids", "generated_token_ids"):
        if key not in line:
            raise ValueError(f"{key} is missing: a log holds token ids, and text is not enough")
    return {**line, "drafters": drafters} if drafters else line


def _record(answer: dict[str, Any], ids: str, fields: dict[str, Any]) -> dict[str, Any]:
    for key in ("prompt_token_ids", ids):
        if not isinstance(fields.get(key), list):
            raise ValueError(
                f"{key} is missing in the engine's response; docs/logs.md says how to ask for "
                "token ids"
            )
    tokens = len(fields[ids])
    meta = _object_or_empty(answer, "meta_info")
    usage = _object_or_empty(answer, "usage")
    reported_counts = (
        usage.get("completion_tokens"),
        meta.get("completion_tokens"),
        answer.get("tokens_predicted"),
    )
    for count in reported_counts:
        if isinstance(count, int) and count > tokens:
            raise ValueError(f"{ids}: {tokens} token ids of an answer of {count} tokens")
    record: dict[str, Any] = {
        "prompt_token_ids": fields["prompt_token_ids"],
        "generated_token_ids": fields[ids],
        "id": answer.get("id") or meta.get("id"),
        "source": answer.get("source"),
        "kind": answer.get("kind"),
        "drafters": {},
    }
    metrics = _object_or_empty(_object_or_empty(answer, "metrics"), "speculative_decoding")
    if not metrics:  # of SGLang
        extension = {**meta, **_object_or_empty(answer, "sglext")}
        metrics = _object_or_empty(extension, "speculative_decoding_stats")
    if metrics:
        steps_or_reason = _steps(Metrics.model_validate(metrics), tokens)
        if isinstance(steps_or_reason, str):
            record["note"] = steps_or_reason
        else:
            record["drafters"] = {DRAFTER: {"steps": steps_or_reason}}
    return record


def _object_or_empty(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _steps(metrics: Metrics, tokens: int) -> list[list[int]] | str:
    """Position, drafted and accepted tokens of each step; or why they are not known. The forward
    pass over the prompt gives the first token, so steps begin at position 1. They may go beyond the
    text's end, where the engine cut it."""
    accepted = metrics.per_step_accepted or []
    if not accepted and metrics.accept_lengths is not None:
        accepted = [length - 1 for length in metrics.accept_lengths]
    drafted = metrics.per_step_drafted or []
    if not drafted and metrics.verify_lengths is not None:
        drafted = [length - 1 for length in metrics.verify_lengths]
    if not accepted and (metrics.num_spec_steps or metrics.num_verified_draft_tokens):
        return NO_STEPS
    if len(accepted) != len(drafted):
        raise ValueError("the steps' drafted and accepted tokens differ in length")
    position = 1
    steps: list[list[int]] = []
    for more, kept in zip(drafted, accepted, strict=True):
        if position < tokens:
            steps.append([position, more, kept])
        position += kept + 1
    if position < tokens:
        return LEFT_OUT
    return steps
