"""`espalier export --engine NAME`: an engine's settings, and what they are predicted to gain.

All requests of a batch draft chains of one length, and a step takes as long as the engine's timings
say for that batch and length. So with b requests and chains of L tokens,
`tokens per second = b E[tokens | L] / T(b, L)`, by replay. For every batch size the draft makes as
many forward passes as the longest chain needs.

Legend: R roots, A actions.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from data_gen.models.sampling import Sampling
from data_gen.traces import read_manifest
from pipelines.config import Config, Pair
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.latency.stage import profile_path
from pipelines.latency.timings import engine_path
from pipelines.pair.source import source_of
from pipelines.pair.stage import pair_names
from pipelines.run import Stage, templates_beside
from pipelines.tracking import mlflow_run
from selector.actions import ActionSpace
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import InputError, sha256
from selector.tables import FREE
from selector.train.data import Texts, Timed
from selector.train.replay import Ratio, Replayed, ratio_of_speeds, replay
from selector.train.tuning import SURE

# verifiers that verify a chain token by token
STANDARD = ("naive", "naive_tree", "specinfer", "spectr", "priority")
# verifiers that verify a chain as a block
BLOCK = ("block", "traversal", "lifted_spectr", "lifted_priority", "lifted_uniform", "lifted_best")
TEMPLATES = templates_beside(__file__, keep_trailing_newline=True)
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
class EngineSettings:
    """What an engine is told for requests of one sampling setting."""

    target: str  # directory or hub id
    draft: str
    drafter: str  # what kind of drafter it is, as in `config.Export`
    block: bool  # whether chains are verified as blocks, and not token by token
    sampling: Sampling
    lengths: list[BestLength]  # by batch size, ascending
    refused: str = ""  # why it is told nothing; empty where it is

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """First and last batch size, and their length. A size between two timed ones is padded to
        the larger one."""
        ranges = []
        first = 1
        for length, alike in groupby(self.lengths, key=lambda best: best.length):
            *_, last = alike
            ranges.append((first, last.batch, length))
            first = last.batch + 1
        return ranges

    @property
    def without_drafter(self) -> str:
        """From how many requests on nothing is drafted, in words; empty where something is."""
        first, _, length = self.ranges[-1]
        if length > 0:
            return ""
        return f"serve this without a drafter from {first} requests on"

    @property
    def longest(self) -> int:
        return max(best.length for best in self.lengths)

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
    # whether it can draft samples at the request's temperature, and not the most probable tokens
    samples: bool = True
    blocks: bool = False  # whether it has block verification
    one_length: bool = False  # whether all batch sizes have the same length

    def files(self, settings: EngineSettings) -> dict[str, str]:
        """The files' contents by name, that of the settings first."""
        sampling = settings.sampling
        name = f"temperature-{sampling.temperature:g}"
        if sampling.top_p < 1:
            name += f"-top_p-{sampling.top_p:g}"
        predicted = json.dumps([asdict(best) for best in settings.lengths], indent=1) + "\n"
        return {
            f"{name}.{self.suffix}": self.macros.settings(settings),
            f"{name}.prediction.json": predicted,
        }

    def command(self, settings: EngineSettings, folder: Path) -> str:
        settings_file = next(iter(self.files(settings)))
        return str(self.macros.command(settings, str(folder / settings_file)))

    @property
    def macros(self) -> Any:
        return TEMPLATES.get_template(f"{self.name}.j2").module

    def verifiers(self, labelled: tuple[str, ...], temperature: float) -> tuple[str, str]:
        """The labelled verifiers that verify chains as the engine does with the exported settings,
        and by default: at temperature 0 each does. InputError where there is none."""
        standard = [verifier for verifier in labelled if verifier in STANDARD or temperature == 0]
        block = [verifier for verifier in labelled if verifier in BLOCK and self.blocks]
        if not (standard or block):
            choices = ", ".join(STANDARD)
            raise InputError(
                f"verifiers: {self.name} verifies chains as one of {choices} does: add one of them"
            )
        return (block + standard)[0], (standard + block)[0]

    def refusal(self, sampling: Sampling) -> str:
        """Why it cannot serve a sampling setting as the labels suppose; empty if it can."""
        same_temperature = sampling.draft_temperature in (None, sampling.temperature)
        sampled = sampling.draft.temperature > 0
        if sampling.temperature and sampling.min_p:
            return "the engine does not apply min_p where it speculates"
        if sampled and not same_temperature:
            return "the engine has no draft temperature"
        if sampled and not self.samples:
            return (
                "the engine drafts the most probable tokens: make labels with draft_temperature: 0"
            )
        if sampled and not sampling.cuts_nothing:
            return (
                "the engine's drafts follow the temperature alone: make labels with "
                "draft_temperature: 0"
            )
        return ""


ENGINES = {
    "vllm": Engine("vllm", "0.33.0", "json", default=5, blocks=True),
    "sglang": Engine("sglang", "0.5.23", "yaml", default=3, samples=False, one_length=True),
}


def best_lengths(
    engine: Engine, texts: Texts, verifiers: tuple[str, str], profile: LatencyProfile
) -> list[BestLength]:
    """The best timed length for each timed batch size, ascending. The texts are of one sampling
    setting; `verifiers` are those of `Engine.verifiers`.

    The longest chain is the one with the largest geometric mean of the speeds over all batch sizes.
    Nothing is drafted where that is not surely faster than a server without a drafter, unless all
    batch sizes have one length.
    """
    assert profile.batches is not None
    longest_timed = {}
    replays = {}
    for batch, target in zip(profile.batches.sizes, profile.batches.target, strict=True):
        longest_timed[batch] = min(int(target.sizes[-1]) - 1, chains_of(texts).depth)
        replays[batch] = _replay_of_chains(texts, verifiers[0], profile.at_batch(batch))

    def fastest(longest: int) -> dict[int, int]:
        """Lengths by batch size; fewer where the engine takes none of those that were timed."""
        length_of = {}
        for batch, replayed in replays.items():
            shortest = longest if engine.one_length else 0
            lengths = range(shortest, min(longest, longest_timed[batch]) + 1)
            speeds = [replayed(length, longest).speed for length in lengths]
            if speeds:
                length_of[batch] = lengths[speeds.index(max(speeds))]
        return length_of

    log_speeds: dict[int, float] = {}
    for longest in range(max(longest_timed.values()) + 1):
        length_of = fastest(longest)
        if len(length_of) == len(replays):
            log_speeds[longest] = sum(
                math.log(replays[batch](length, longest).speed)
                for batch, length in length_of.items()
            )
    longest = max(log_speeds, key=log_speeds.__getitem__)
    result = []
    for batch, length in fastest(longest).items():
        best = replays[batch](length, longest)
        presence = profile.at_batch(batch).presence
        plain = replays[batch](0, 0).charged(-presence)
        over_plain = ratio_of_speeds(best, plain, texts.source_number_X)
        if not (over_plain.is_ahead(SURE) or engine.one_length):
            length = 0
            best = replays[batch](0, longest)
        gain = None
        if engine.default <= longest_timed[batch]:
            replayed = _replay_of_chains(texts, verifiers[1], profile.at_batch(batch))
            by_default = replayed(engine.default, engine.default)
            gain = ratio_of_speeds(best, by_default, texts.source_number_X)
        result.append(BestLength(batch, length, best.block_efficiency, batch * best.speed, gain))
    return result


def chains_of(texts: Texts) -> ActionSpace:
    """The chains that texts have labels of."""
    return ActionSpace(1, texts.space.max_L1, texts.space.max_L2)


def _replay_of_chains(
    texts: Texts, verifier: str, profile: LatencyProfile
) -> Callable[[int, int], Replayed]:
    timed = Timed(replace(texts, space=chains_of(texts)), verifier, profile)
    seconds_RA = timed.seconds()
    drafting_RA = timed.on(replace(profile, target=FREE)).seconds()

    @cache
    def replayed(length: int, passes: int) -> Replayed:
        seconds_R = seconds_RA[:, length] + drafting_RA[:, passes] - drafting_RA[:, length]
        return replay(
            timed.survivals_RS,
            torch.full_like(texts.length_R, length),
            seconds_R,
            texts.size_X,
            timed.space,
        )

    return replayed


def serve(config: Config, name: str) -> None:
    """Write an engine's settings under `engines/<name>/`, for each sampling setting."""
    is_log = not source_of(config).decodes
    timings_path = profile_path(config) if is_log else engine_path(config)
    folder = config.folder / "engines" / name
    engine = ENGINES[name]
    if not timings_path.exists():
        command = "espalier logs .. --timings" if is_log else "espalier latency --from"
        raise InputError(f"{timings_path}: no engine's times there: {command} timings.csv")
    drafter = drafter_of(config)
    profile = LatencyProfile.load(timings_path)
    shards = read_manifest(traces_folder(config))["shards"]
    depends = {
        "latency": sha256(timings_path),
        "traces": {file: shard["sha256"] for file, shard in shards.items()},
        "pair": list(pair_names(config)),
        "drafter": drafter,
        "read": engine.read,
    }
    stage = Stage(f"export-{name}", config, depends, (folder,))
    texts = load_traces(config)["validation"]
    if not stage.begin():
        return
    files: dict[str, str] = {}
    sections = []
    for sampling_setting in config.sampling:
        settings = _settings(config, engine, texts, sampling_setting.build(), profile, drafter)
        sections.append(settings)
        if settings.refused:
            stage.say(f"{settings.sampling}: nothing is written, {settings.refused}")
            continue
        files |= engine.files(settings)
        if settings.without_drafter:
            stage.say(f"{settings.sampling}: {settings.without_drafter}")
    page = TEMPLATES.get_template("README.j2")
    files["README.md"] = page.render(
        engine=engine, device=profile.device, sections=sections, folder=folder
    )
    with mlflow_run(config, f"export-{name}") as mlflow:
        stage.replace()
        with atomically(folder) as partial_path:
            partial_path.mkdir(parents=True)
            for file, content in files.items():
                (partial_path / file).write_text(content)
        mlflow.log_artifacts(str(folder), f"engines/{name}")
    stage.say(f"{folder}: README.md says how to use it, and what it is predicted to gain")
    stage.finish()


def drafter_of(config: Config) -> str:
    """What kind of drafter an engine loads, as in `config.Export`. InputError for a log that has
    none, or whose models are not named."""
    source = source_of(config)
    if source.decodes:
        return config.export.drafter or "draft_model"
    if not source.drafts:
        raise InputError(
            "export.engine: the log has no drafter, and lengths are chosen for a drafter's chains: "
            "of copies, the selector decides in a plug-in (docs/plugins.md)"
        )
    if config.pair == Pair():
        raise InputError(
            "export.engine: the log does not say which models the engine loads: add "
            "pair.target=NAME pair.draft=NAME"
        )
    by_name = "eagle3" if str(source.names["draft"]).startswith("eagle") else "draft_model"
    return config.export.drafter or by_name


def _settings(
    config: Config,
    engine: Engine,
    texts: Texts,
    sampling: Sampling,
    profile: LatencyProfile,
    drafter: str,
) -> EngineSettings:
    """What an engine is told under one sampling setting."""
    target, draft = pair_names(config)
    refused = engine.refusal(sampling)
    if refused:
        return EngineSettings(target, draft, drafter, False, sampling, [], refused)
    verifiers = engine.verifiers(config.verifiers, sampling.temperature)
    lengths = best_lengths(engine, texts.of_sampling(sampling), verifiers, profile)
    if not any(best.length for best in lengths):
        refused = "drafting pays at no batch size"
    block = verifiers[0] in BLOCK
    return EngineSettings(target, draft, drafter, block, sampling, lengths, refused)
