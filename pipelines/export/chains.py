"""What an engine reads, and how it is used: the fastest chain lengths by batch size, or a rule (`export.rules`).

All requests of a batch draft chains of one length, and a step takes as long as the engine's timings say for that batch
and length. So with b requests and chains of L tokens, `tokens per second = b E[tokens | L] / T(b, L)`. An engine that
makes the passes of its longest chain for every batch (`Engine.masks`) pays `T(b, L)` and the draft passes beyond L.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from data_gen.traces import read_manifest
from pipelines.config import Config, SamplingSetting
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.export.engines import ENGINES, Engine, Range, Served, engine_of, samples
from pipelines.export.rules import RULES, RuleEngine, tuned
from pipelines.latency.timings import engine_path, load_engine_profile
from pipelines.pair.loading import pair_names
from pipelines.run import Stage
from pipelines.tracking import mlflow_run
from selector.actions import ActionSpace
from selector.files import atomically
from selector.latency import LatencyProfile, Table
from selector.schema import InputError, sha256
from selector.train.data import Texts, Timed
from selector.train.replay import Ratio, Replayed, ratio_of_speeds, replay

# verifiers that verify chains alike: token by token, or as a block
STANDARD = ("naive", "naive_tree", "specinfer")
BLOCK = ("block", "traversal", "lifted_uniform")
NEVER_PAYS = "drafting pays at no batch size"
TABLE = """\
Each table says how many tokens every request drafts, by the number of requests decoded together. The prediction is
`b E[tokens | L] / T(b, L)` tokens per second for b requests with chains of L tokens, where T was timed and E follows
from the labels. It assumes that all requests of a batch decode (prompts are not counted), that contexts are as long as
those of the texts, and that a request's accepted tokens are independent of when the others end. A batch size between
two timed ones takes the length of the larger one.

"""
RULE = "Each section has one rule for all steps."


@dataclass(frozen=True)
class BestLength:
    """The fastest length for one batch size.

    Attributes:
        tokens_per_second: of all requests together.
        gain: speed over the engine's default length; None if that was not timed.
    """

    batch: int
    length: int
    tokens_per_step: float
    tokens_per_second: float
    gain: Ratio | None


def run(config: Config, name: str) -> None:
    """Write what an engine reads under `engines/<name>/`, for each sampling setting."""
    head = config.pair.head is not None
    engine = engine_of(name, head) if head or name in ENGINES else RULES[name]
    profile = load_engine_profile(config)
    folder = config.folder / "engines" / name
    pair = pair_names(config)
    depends = {
        "latency": sha256(engine_path(config)),
        "traces": {file: shard["sha256"] for file, shard in read_manifest(traces_folder(config))["shards"].items()},
        "pair": list(pair),
        "read": engine.read,
    }
    stage = Stage(f"export-{name}", config, depends, (folder,))
    texts = load_traces(config, profile.pair)["validation"]
    verifiers = chain_verifiers(engine, config.verifiers, name)
    if not stage.begin():
        return
    with mlflow_run(config, f"export-{name}", ("sampling", "verifiers")) as mlflow:
        stage.replace()
        with atomically(folder) as partial:
            partial.mkdir(parents=True)
            files, sections = _Files(texts, verifiers, profile, pair, partial, folder, head), []
            for setting in config.sampling:
                reason, lines = files.of(engine, setting)
                if reason:
                    stage.say(f"{setting.build()}: nothing is written, {reason}")
                    lines = [f"Nothing is written: {reason}."]
                sections.append("\n".join([f"## {setting.build()}", "", *lines, ""]))
            (partial / "README.md").write_text(_readme(name, engine, profile, sections))
        mlflow.log_artifacts(str(folder), f"engines/{name}")
    stage.say(f"{folder}: README.md says how to use it, and what it is predicted to gain")
    stage.finish()


def chain_verifiers(engine: Engine | RuleEngine, verifiers: tuple[str, ...], name: str) -> tuple[str, str]:
    """The one of the run's verifiers that the engine should use on chains, and the one that it uses by default.

    Raises:
        InputError: there are labels of neither.
    """
    standard = next((each for each in verifiers if each in STANDARD), None)
    block = next((each for each in verifiers if each in BLOCK), None)
    chosen = (block if isinstance(engine, Engine) and engine.blocks else None) or standard
    if chosen is None:
        raise InputError(f"verifiers: {name} verifies chains as one of {', '.join(STANDARD)} does: add one of them")
    return chosen, standard or chosen


def refusal(engine: Engine, setting: SamplingSetting) -> str:
    """Why the engine cannot serve a setting as its labels suppose; empty if it can."""
    if setting.temperature and setting.min_p:
        return "the engine does not apply min_p where it speculates"
    if not samples(setting):
        return ""
    if setting.draft_temperature not in (None, setting.temperature):
        return "the engine has no draft temperature"
    if not engine.samples:
        return "the engine drafts the most probable tokens: make labels with draft_temperature: 0"
    if setting.top_p < 1 or setting.top_k:
        return "the engine's drafts follow the temperature alone: make labels with draft_temperature: 0"
    return ""


def best_lengths(texts: Texts, verifiers: tuple[str, str], profile: LatencyProfile, engine: Engine) -> list[BestLength]:
    """One for each batch size that was timed, ascending, among the lengths that were timed.

    The longest chain is the one with which the mean logarithm of the speed over all batch sizes is largest.

    Args:
        texts: of one sampling setting.
        verifiers: whose labels hold for the chains, and for the engine's default.
    """
    assert profile.batches is not None
    batches = profile.batches.sizes
    timed = [min(target.sizes[-1] - 1, ActionSpace.default().depth) for target in profile.batches.target]
    each = [_Chains(texts, verifiers[0], profile.at_batch(batch)) for batch in batches]
    found: list[tuple[float, list[tuple[int, Replayed]]]] = []
    for longest in range(max(timed) + 1):
        lengths = [[own for own in engine.lengths(longest) if own <= most] for most in timed]
        if engine.first_is_longest:
            lengths[0] = [own for own in lengths[0] if own == longest]
        if all(lengths):
            passes = longest if engine.masks else None
            chosen = [chains.fastest(own, passes) for chains, own in zip(each, lengths, strict=True)]
            found.append((statistics.mean(math.log(own.speed) for _, own in chosen), chosen))
    _, best = max(found, key=lambda tried: tried[0])
    result = []
    for batch, most, (length, own) in zip(batches, timed, best, strict=True):
        gain = None
        if engine.default <= most:
            usual = _Chains(texts, verifiers[1], profile.at_batch(batch)).replayed(engine.default)
            gain = ratio_of_speeds(own, usual, texts.source_number_X)
        result.append(BestLength(batch, length, own.block_efficiency, batch * own.speed, gain))
    return result


class _Chains:
    """All chains of the traces' action space on some texts, by length."""

    def __init__(self, texts: Texts, verifier: str, profile: LatencyProfile) -> None:
        self.space = replace(ActionSpace.default(), max_K=1)
        self.timed = Timed(texts, verifier, profile, self.space)
        nothing = Table([1], [1], [[0.0]])
        drafting = replace(profile, target=nothing, verify={verifier: nothing}, corrections={}, step=0.0, nucleus=0.0)
        self.seconds_RA, self.drafting_RA = self.timed.seconds(), self.timed.on(drafting).seconds()

    def replayed(self, length: int, passes: int | None = None) -> Replayed:
        """One length everywhere, with so many passes of the draft; None for one pass a token."""
        beyond_R = self.drafting_RA[:, length if passes is None else passes] - self.drafting_RA[:, length]
        action_R = torch.full((len(beyond_R),), length)
        seconds_R, size_X = self.seconds_RA[:, length] + beyond_R, self.timed.texts.size_X
        return replay(self.timed.survivals_RS, action_R, seconds_R, size_X, self.space)

    def fastest(self, lengths: Sequence[int], passes: int | None) -> tuple[int, Replayed]:
        """The fastest of some lengths, the first of equally fast ones, and its replay."""
        tried = [(length, self.replayed(length, passes)) for length in lengths]
        return max(tried, key=lambda each: each[1].speed)


def ranges_of(lengths: list[BestLength]) -> list[Range]:
    """Lengths by ranges of batch sizes. A size between two timed ones takes the length of the larger one, because it is
    padded to that one's graph."""
    last = [list(alike)[-1] for _, alike in groupby(lengths, key=lambda each: each.length)]
    firsts = [1, *(each.batch + 1 for each in last)]
    return [Range(first, each.batch, each.length) for first, each in zip(firsts, last, strict=False)]


@dataclass(frozen=True)
class _Files:
    """Writes one engine's files to `partial`, which becomes `folder`.

    Attributes:
        verifiers: as `chain_verifiers` returns them.
    """

    texts: Texts
    verifiers: tuple[str, str]
    profile: LatencyProfile
    pair: tuple[str, str]
    partial: Path
    folder: Path
    head: bool = False

    def of(self, engine: Engine | RuleEngine, setting: SamplingSetting) -> tuple[str, list[str]]:
        """Why nothing is written for a sampling setting, or the lines of its section."""
        own = self.texts.setting_of((setting.temperature, setting.top_p))
        if isinstance(engine, RuleEngine):
            return self._rule(engine, setting, own)
        if reason := refusal(engine, setting):
            return reason, []
        lengths, block = best_lengths(own, self.verifiers, self.profile, engine), self.verifiers[0] in BLOCK
        served = Served(*self.pair, block, samples(setting), ranges_of(lengths), self.head)
        if not served.longest:
            return NEVER_PAYS, []
        file = self._write(setting, engine.suffix, engine.write(served), [asdict(each) for each in lengths])
        if engine.steps is not None:
            Path(self.partial / Path(file).name).with_suffix(".steps.json").write_text(json.dumps(engine.steps(served)))
        table = [["requests", "drafted", "tokens a step", "tokens/s", f"over {engine.default} tokens"], ["---"] * 5]
        for each in lengths:
            numbers = str(each.batch), str(each.length), f"{each.tokens_per_step:.2f}", f"{each.tokens_per_second:.0f}"
            table.append([*numbers, "not timed" if each.gain is None else str(each.gain)])
        rows = ("| " + " | ".join(cells) + " |" for cells in table)
        return "", ["```sh", engine.command(served, file), "```", "", *rows]

    def _rule(self, engine: RuleEngine, setting: SamplingSetting, own: Texts) -> tuple[str, list[str]]:
        if reason := engine.refusal(setting):
            return reason, []
        assert self.profile.batches is not None
        times = self.profile.at_batch(self.profile.batches.sizes[0])
        rule, over_plain, over_fixed = tuned(engine, own, self.verifiers[1], times)
        if not rule.copied and not rule.drafted:
            return NEVER_PAYS, []
        predicted = {**rule._asdict(), "over_plain": asdict(over_plain), "over_fixed": asdict(over_fixed)}
        file = self._write(setting, engine.suffix, engine.write(rule, *self.pair), predicted)
        copies = f"Copy {rule.copied} tokens where the match has {rule.least} or more, else draft {rule.drafted}."
        words = copies if rule.copied else f"Draft {rule.drafted} tokens."
        gains = f"Predicted: {over_plain} times plain decoding, {over_fixed} times the best fixed length."
        return "", [f"```{engine.language}", engine.command(file), "```", "", f"{words} {gains}"]

    def _write(self, setting: SamplingSetting, suffix: str, content: str, predicted: Any) -> str:
        """Write a setting's file and prediction; the file's path in `folder`."""
        nucleus = f"-top_p-{setting.top_p:g}" if setting.top_p < 1 else ""
        name = f"temperature-{setting.temperature:g}{nucleus}"
        (self.partial / f"{name}.{suffix}").write_text(content)
        (self.partial / f"{name}.prediction.json").write_text(json.dumps(predicted, indent=1) + "\n")
        return str(self.folder / f"{name}.{suffix}")


def _readme(name: str, engine: Engine | RuleEngine, profile: LatencyProfile, sections: list[str]) -> str:
    kind = RULE if isinstance(engine, RuleEngine) else TABLE
    return f"""# {name}

{kind} All is chosen by replay of the run's validation texts with the step times of {profile.device}. There is one file
for each sampling setting, and the engine takes one for all requests: choose the setting that most of them have.
The files follow {name} {engine.read}. ± is one standard error over the texts' sources.

{engine.limits}

""" + "\n".join(sections)
