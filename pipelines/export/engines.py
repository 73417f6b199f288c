"""The engines that settings are written for: what each drafts, and its template with settings, command and limits."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data_gen.models.sampling import Sampling
from selector.schema import InputError
from selector.train.replay import Ratio

STANDARD = ("naive", "naive_tree", "specinfer")  # verifiers that verify a chain token by token
BLOCK = ("block", "traversal", "lifted_uniform")  # verifiers that verify a chain as a block
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters["quote"] = shlex.quote


@dataclass(frozen=True)
class BestLength:
    """The fastest length of chains for one batch size."""

    batch: int
    length: int
    tokens_per_step: float
    tokens_per_second: float  # of all requests together
    gain: Ratio | None  # speed over the engine's default length; None if that was not timed


@dataclass(frozen=True)
class Settings:
    """What an engine is told for requests of one sampling setting."""

    target: str  # directory or hub id
    draft: str
    head: bool  # whether the draft is an EAGLE-3 head
    block: bool  # whether chains are verified as blocks, and not token by token
    sampling: Sampling
    lengths: list[BestLength]  # by batch size, ascending

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """First and last batch size, and their length. A size between two timed ones is padded to the larger one."""
        last = [list(alike)[-1] for _, alike in groupby(self.lengths, key=lambda each: each.length)]
        firsts = [1, *(each.batch + 1 for each in last)]
        return [(first, each.batch, each.length) for first, each in zip(firsts, last, strict=False)]

    @property
    def longest(self) -> int:
        return max(each.length for each in self.lengths)

    @property
    def sampled(self) -> bool:
        """Whether drafts are sampled; else they are the most probable tokens."""
        return self.sampling.draft.temperature > 0


@dataclass(frozen=True)
class Engine:
    """One engine. The macros of its template write its files from `Settings`."""

    name: str  # of the template, too
    read: str  # the version whose source the template follows
    suffix: str  # of the file with the settings
    default: int  # the length over which gains are stated: its own, or its documentation's
    samples: bool = True  # whether it can draft samples at the request's temperature, and not the most probable tokens
    blocks: bool = False  # whether it has block verification
    masks: bool = False  # whether the draft makes the longest chain's passes for every batch
    one_length: bool = False  # whether all batch sizes have the same length

    def files(self, settings: Settings) -> dict[str, str]:
        """The files' contents by name, that of the settings first."""
        sampling = settings.sampling
        name = f"temperature-{sampling.temperature:g}" + (f"-top_p-{sampling.top_p:g}" if sampling.top_p < 1 else "")
        found = {f"{name}.{self.suffix}": self.macros.settings(settings)}
        if settings.head and hasattr(self.macros, "steps"):
            found[f"{name}.steps.json"] = self.macros.steps(settings)
        predicted = json.dumps([asdict(each) for each in settings.lengths], indent=1) + "\n"
        return {**found, f"{name}.prediction.json": predicted}

    def command(self, settings: Settings, folder: Path) -> str:
        """How the files are used where they lie in a folder."""
        return str(self.macros.command(settings, str(folder / next(iter(self.files(settings))))))

    @property
    def macros(self) -> Any:
        return TEMPLATES.get_template(f"{self.name}.j2").module

    def verifiers(self, labelled: tuple[str, ...]) -> tuple[str, str]:
        """Those among the run's whose labels hold for the chains, and for what the engine does by default; InputError
        where there are labels of neither."""
        standard = next((each for each in labelled if each in STANDARD), None)
        block = next((each for each in labelled if each in BLOCK and self.blocks), None)
        chosen = block or standard
        if chosen is None:
            known = ", ".join(STANDARD)
            raise InputError(f"verifiers: {self.name} verifies chains as one of {known} does: add one of them")
        return chosen, standard or chosen

    def refusal(self, sampling: Sampling) -> str:
        """Why it cannot serve a sampling setting as the labels suppose; empty if it can."""
        own, sampled = sampling.draft_temperature in (None, sampling.temperature), sampling.draft.temperature > 0
        if sampling.temperature and sampling.min_p:
            return "the engine does not apply min_p where it speculates"
        if sampled and not own:
            return "the engine has no draft temperature"
        if sampled and not self.samples:
            return "the engine drafts the most probable tokens: make labels with draft_temperature: 0"
        if sampled and not sampling.cuts_nothing:
            return "the engine's drafts follow the temperature alone: make labels with draft_temperature: 0"
        return ""


ENGINES = {
    "vllm": Engine("vllm", "0.33.0", "json", default=5, blocks=True, masks=True),
    "sglang": Engine("sglang", "0.5.23", "yaml", default=3, samples=False, one_length=True),
}


def engine_of(name: str, head: bool) -> Engine:
    """An engine by name, whose draft may be an EAGLE-3 head."""
    return replace(ENGINES[name], masks=False, one_length=False) if head else ENGINES[name]
