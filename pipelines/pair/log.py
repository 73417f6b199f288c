"""An engine's log as the source of a run's texts, in place of a pair of models: `latency` reads the
engine's step times, `data` stores what each text says of every position, and nothing is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_gen.texts.log_labels import Labeller, read_log_texts, splits_of
from data_gen.texts.logs import NO_DRAFTER, LoggedText, Logs, drafter_of, read_all
from data_gen.texts.written import Work
from pipelines.config import Config
from selector.actions import ActionSpace
from selector.schema import DRAFTER, LOG, sha256
from selector.train.data import Texts

LONGEST_LOOKUP = 20  # tokens
# speed of drafting over that of copies alone, since an engine's step times lack its passes over
# prompts and over tokens that were copied
DRAFTING_LEAD = 1.1
RECORDED_LEAD = 1.03  # where they are those of traffic, which lack its passes over prompts
TIMELESS = (
    "No step times were given: add --timings FILE to train a selector, to measure its gain and to "
    "export it."
)


@dataclass(frozen=True)
class LogSource:
    """A `pipelines.pair.source.Source`: the logs that `logs.files` names.

    Attributes:
        checksums: of the logs, by path.
        splits: the texts by split.
        labeller: what they are labelled for.
    """

    config: Config
    checksums: dict[str, str]
    logs: Logs
    splits: dict[str, list[LoggedText]]
    labeller: Labeller
    schema = LOG
    decodes = False
    selectors = (("regressor", DRAFTER),)
    # with 1, lookups of 20 tokens would outweigh the drafter's chains
    squared_weight = 0.03

    @property
    def drafter(self) -> str:
        return self.labeller.drafter

    @property
    def drafts(self) -> bool:
        return self.drafter != NO_DRAFTER

    @property
    def drafting_lead(self) -> float:
        if not self.drafts:
            return 1.0
        return RECORDED_LEAD if self.config.latency.is_recorded else DRAFTING_LEAD

    @property
    def why_untrained(self) -> str:
        if self.config.latency.timings is None:
            return TIMELESS
        return ""

    @property
    def fingerprint(self) -> str:
        return f"log:{self.drafter}"

    @property
    def names(self) -> dict[str, Any]:
        return {"target": "of the log", "draft": self.drafter}

    @property
    def processes(self) -> int:
        return self.config.processes

    def depends(self) -> dict[str, Any]:
        config = self.config
        return {
            "pair": self.fingerprint,
            "sampling": [sampling_setting.model_dump() for sampling_setting in config.sampling],
            "verifiers": list(config.verifiers),
            "log": self.checksums,
            "held out": [str(path) for path in config.logs.test],
            "positions": config.logs.positions,
            "prompts": {"shares": [config.prompts.validation, config.prompts.test]},
        }

    def plan(self) -> list[str]:
        texts = self.logs.all
        roots = sum(text.roots for text in texts)
        summary = (
            f"{len(texts)} texts, {len(self.splits['test'])} held out, {roots:,} positions; "
            f"{self.drafter} of up to {self.labeller.space.depth} tokens, lookups of up to "
            f"{LONGEST_LOOKUP}"
        )
        return [summary, *self.logs.remarks]

    def work(self) -> list[Work]:
        whole = []
        for split, texts in self.splits.items():
            whole.append(Work(split, self.labeller.sampling, (), logged=tuple(texts)))
        return whole

    def make(self, work: Work) -> pa.Table:
        return self.labeller.table(work.logged)

    def texts(self, folder: Path) -> dict[str, Texts]:
        return read_log_texts(folder, sha256(folder / "manifest.json"))


def log_source(config: Config) -> LogSource:
    """The run's logs, read once as long as they do not change; InputError where a file is missing,
    no log, or holds too few texts."""
    checksums = []
    for path in [*config.logs.files, *config.logs.test]:
        manifest = path / "manifest.json"
        checksums.append((str(path), sha256(manifest if manifest.exists() else path)))
    return _read(config, tuple(checksums))


@lru_cache(maxsize=1)
def _read(config: Config, checksums: tuple[tuple[str, str], ...]) -> LogSource:
    sampling = config.sampling[0].build()
    logs = read_all(config.logs.files, config.logs.test, sampling, config.logs.positions)
    drafter = drafter_of(logs.all, config.logs.drafter)
    logs = logs.of(drafter)
    longest_chain = max(text.of(drafter).shape[1] for text in logs.all)
    space = ActionSpace.chains(longest_chain, LONGEST_LOOKUP)
    splits = splits_of(logs, config.prompts.validation, config.prompts.test)
    return LogSource(config, dict(checksums), logs, splits, Labeller(drafter, space, sampling))
