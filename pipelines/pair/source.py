"""Where the texts of a run come from: a pair of models, or an engine's log in its place.

This is the one place that knows which it is; stages ask a `Source` for what they need.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from data_gen.texts.written import Work
from pipelines.config import Config
from pipelines.pair.log import log_source
from pipelines.pair.models import PairSource
from selector.schema import Schema
from selector.train.data import Texts


class Source(Protocol):
    """What stages ask of a pair or of a log. Every part raises InputError where a file or a model
    cannot be read.

    Attributes:
        schema: what is known at a root, by level of features.
        decodes: whether there are models, which decode held-out prompts and are timed; else
            held-out texts are replayed, with an engine's step times.
        drafts: whether there is a drafter; else lookups alone are chosen.
        selectors: objective and feature level of those that are trained.
        squared_weight: of the squared error in a regressor's loss.
        drafting_lead: how many times the speed of copies alone a policy must have that drafts.
        processes: how many make rows at once.
    """

    @property
    def schema(self) -> Schema: ...

    @property
    def decodes(self) -> bool: ...

    @property
    def drafts(self) -> bool: ...

    @property
    def selectors(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def squared_weight(self) -> float: ...

    @property
    def drafting_lead(self) -> float: ...

    @property
    def processes(self) -> int: ...

    @property
    def why_untrained(self) -> str:
        """Why no selector can be trained on the texts; empty where it can."""

    @property
    def fingerprint(self) -> str:
        """What stands for the source in traces, latency profiles and artefacts."""

    @property
    def names(self) -> dict[str, Any]:
        """What an artefact says of its target and draft."""

    def depends(self) -> dict[str, Any]:
        """Everything that the rows of traces depend on; JSON values."""

    def plan(self) -> list[str]:
        """What the data stage would do."""

    def work(self) -> Iterable[Work]:
        """All texts, by split and sampling setting."""

    def make(self, work: Work) -> pa.Table:
        """The rows of some texts."""

    def texts(self, folder: Path) -> dict[str, Texts]:
        """The texts of a trace store, by split."""


def source_of(config: Config) -> Source:
    return log_source(config) if config.logs.files else PairSource(config)
