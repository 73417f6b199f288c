"""An engine's log as the source of a run's texts, in place of a pair of models.

The stages are those of a pair. Where `logs.files` names logs, `latency` reads the engine's step
times, `data` stores what each text says of every position, and nothing is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa

from data_gen.texts.log_labels import Labeller, splits_of
from data_gen.texts.logs import LoggedText, Logs, drafter_of, read_all
from data_gen.texts.written import Work
from pipelines.config import Config
from selector.actions import ActionSpace
from selector.schema import InputError, sha256

OF_LOG = "log:"
LONGEST_LOOKUP = 20  # tokens
# weight of the squared error; with 1, lookups of 20 tokens would outweigh the drafter's chains
SQUARED = 0.03
TIMELESS = (
    "No step times were given: add --timings FILE to train a selector, to measure its gain and to "
    "export it."
)
UNMEASURED = (
    "WARNING: no selector is written, because a log of steps alone cannot tell whether it gains. "
    "Log dense steps, set "
    "logs.drafter=none for copies, whose labels are always exact, or export it all the same with "
    "logs.force=true."
)


@dataclass(frozen=True)
class Log:
    """The texts of a run's logs by split, and what they are labelled for."""

    logs: Logs
    splits: dict[str, list[LoggedText]]
    labeller: Labeller

    @property
    def fingerprint(self) -> str:
        """What stands in the place of a pair's."""
        return OF_LOG + self.labeller.drafter

    @cached_property
    def is_dense(self) -> bool:
        """Whether it is known at every position what would have been accepted, so that every policy
        can be replayed."""
        if not self.labeller.space.depth:
            return True
        for text in self.logs.all:
            survivals_RD = text.of(self.labeller.drafter)
            # NaN stands for what is not known
            if survivals_RD.shape[1] == 0 or (survivals_RD != survivals_RD).any():
                return False
        return True

    @property
    def work(self) -> list[Work]:
        """All texts by split, as the data stage takes them."""
        return [
            Work(split, self.labeller.sampling, (), logged=tuple(texts))
            for split, texts in self.splits.items()
        ]

    def shard(self, work: Work) -> pa.Table:
        """The rows of some texts."""
        return self.labeller.table(work.logged)

    def __str__(self) -> str:
        texts = self.logs.all
        roots = sum(text.roots for text in texts)
        held_out = len(self.splits["test"])
        drafter = self.labeller.drafter
        depth = self.labeller.space.depth
        return (
            f"{len(texts)} texts, {held_out} held out, {roots:,} positions; "
            f"{drafter} of up to {depth} tokens, lookups of up to {LONGEST_LOOKUP}"
        )


def log_of(config: Config) -> Log:
    """The run's log; InputError where a file is missing, no log, or holds too few texts."""
    return _read(config, tuple(files_of(config).values()))


@lru_cache(maxsize=1)
def _read(config: Config, _: tuple[str, ...]) -> Log:
    sampling = config.sampling[0].build()
    logs = read_all(config.logs.files, config.logs.test, sampling)
    drafter = drafter_of(logs.all, config.logs.drafter)
    logs = logs.of(drafter)
    longest_chain = max(text.of(drafter).shape[1] for text in logs.all)
    space = ActionSpace.chains(longest_chain, LONGEST_LOOKUP)
    splits = splits_of(logs, config.prompts.validation, config.prompts.test)
    return Log(logs, splits, Labeller(drafter, space, sampling))


def files_of(config: Config) -> dict[str, str]:
    """The checksums of the logs by path."""
    checksums = {}
    for path in [*config.logs.files, *config.logs.test]:
        is_pipe = path.exists() and not (path.is_file() or path.is_dir())
        if is_pipe:  # it would be empty once it is read
            raise InputError(f"{path}: a pipe, no file: write the log to a file first")
        manifest = path / "manifest.json"
        checksums[str(path)] = sha256(manifest if manifest.exists() else path)
    return checksums


def depends(config: Config) -> dict[str, Any]:
    """Everything that the rows depend on."""
    return {
        "pair": log_of(config).fingerprint,
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "log": files_of(config),
        "held out": [str(path) for path in config.logs.test],
        "prompts": {"shares": [config.prompts.validation, config.prompts.test]},
    }


def why_untrained(config: Config) -> str:
    """Why a selector cannot be trained on the run's log; empty where it can, and where there is no
    log."""
    if not config.logs.files:
        return ""
    if not (log_of(config).is_dense or config.logs.force):
        return UNMEASURED
    if config.latency.timings is None:
        return TIMELESS
    return ""
