"""The engines that settings are written for: what each drafts, and its template with settings, command and limits."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data_gen.models.sampling import Sampling
from selector.decision import LookupRule
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
    rule: LookupRule | None = None  # when a lookup is copied instead


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
    def rule(self) -> LookupRule | None:
        """When a lookup is copied, where each request drafts for itself."""
        return self.lengths[0].rule

    @property
    def sampled(self) -> bool:
        """Whether drafts are sampled; else they are the most probable tokens."""
        return self.sampling.draft.temperature > 0


@dataclass(frozen=True)
class Engine:
    """One engine. The macros of its template write its files from `Settings`."""

    name: str  # of the template, too
    read: str  # the version whose source the template follows
    suffix: Literal["json", "yaml", "sh"] = "json"  # of the file with the settings
    default: int = 0  # the length over which gains are stated: its own, or its documentation's; 0 for plain decoding
    # the most probable tokens alone; also samples at the request's temperature; always by the whole sampling setting
    drafts: Literal["greedy", "temperature", "sampling"] = "temperature"
    blocks: bool = False  # whether it has block verification
    masks: bool = False  # whether the draft makes the longest chain's passes for every batch
    one_length: bool = False  # whether all batch sizes have the same length
    falling: bool = False  # whether the smallest batch must have the longest chains, and 0 is no length
    alone: bool = False  # whether each request drafts for itself
    copies: bool = False  # whether it also copies from the text, by a lookup rule

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
        if self.drafts == "sampling":
            return "" if own else "assisted generation has no draft temperature"
        if sampling.temperature and sampling.min_p and not self.alone:
            return "the engine does not apply min_p where it speculates"
        if sampled and not own:
            return "the engine has no draft temperature"
        if sampled and self.drafts == "greedy":
            return "the engine drafts the most probable tokens: make labels with draft_temperature: 0"
        if sampled and not sampling.cuts_nothing:
            return "the engine's drafts follow the temperature alone: make labels with draft_temperature: 0"
        return ""


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("vllm", "0.33.0", default=5, blocks=True, masks=True),
        Engine("sglang", "0.5.23", "yaml", default=3, drafts="greedy", one_length=True),
        Engine("tensorrt-llm", "1.3", "yaml", default=3, falling=True),
        Engine("llama-server", "of llama.cpp 0c1e570", "sh", drafts="greedy", alone=True, copies=True),
        Engine("transformers", "5.23.0", drafts="sampling", alone=True),
    )
}
OF_HEADS = ("vllm", "sglang")


def engine_of(name: str, head: bool) -> Engine:
    """An engine by name, whose draft may be an EAGLE-3 head; InputError where there are no settings for a head."""
    if head and name not in OF_HEADS:
        raise InputError(f"export.engine: there is no file for {name} with a head, only for {', '.join(OF_HEADS)}")
    return replace(ENGINES[name], masks=False, one_length=False) if head else ENGINES[name]
