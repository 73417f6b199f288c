"""Stage `latency`: this machine's latency profile, checked against real decoding steps; or an
engine's step times."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from rich.table import Table

from data_gen import timing
from data_gen.drafting.sampled import distinct_nodes
from data_gen.models.matrices import matrix_seconds
from data_gen.models.pair import ModelPair
from data_gen.texts.generated import generated_by_target, seed_of
from pipelines.config import Config
from pipelines.latency import timings
from pipelines.latency.decisions import (
    DECISIONS,
    DECISIONS_OF_LOGS,
    SPACE,
    decision_seconds,
    with_decisions,
)
from pipelines.pair import stage as pairs
from pipelines.pair.log import log_source
from pipelines.pair.source import source_of
from pipelines.run import Stage, read_json, verify, write_json
from pipelines.terminal import console, table, ticking, watched
from pipelines.tracking import describe, metric_name, mlflow_run
from selector.actions import GREEDY, IID, Action
from selector.latency import LatencyProfile
from selector.schema import InputError
from selector.train.ranked import balanced

GREEDY_TREES = ((4, 0, 1), (3, 0, 2), (2, 2, 4), (4, 0, 4))
FITTED = [
    *map(SPACE.chain, (0, 1, 2, 4, 8, 16)),
    *map(Action.of, product((2, 4), (0, 8), (1, 4, 8))),
    *(Action(*shape, GREEDY) for shape in GREEDY_TREES),
    *map(Action.copy, (2, 8, 16)),
    balanced(4, 2),
    balanced(16, 4),
]
CHECKED = [
    *map(SPACE.chain, (3, 6, 12)),
    *map(Action.of, product((2, 3), (0, 2), (3, 6))),
    Action.copy(4),
    balanced(8, 3),
]
# besides, where the labelled trees are wide
FITTED_WIDE = [
    *map(Action.of, product((8, 16, 32), (0,), (1, 3))),
    *map(Action.of, product((8, 16, 32), (0,), (2,), (GREEDY,))),
    balanced(32, 4),
    balanced(48, 6),
]
CHECKED_WIDE = [*map(Action.of, product((6, 12, 24), (0,), (2, 3)))]
PROMPTS = 4  # whose texts are timed, and on which distinct nodes are counted
COUNTING = "distinct nodes are counted again, under each sampling setting"


def fitted_actions(config: Config) -> list[Action]:
    """The actions whose steps are timed for the profile."""
    return FITTED + (FITTED_WIDE if config.data.is_wide else [])


def checked_actions(config: Config) -> list[Action]:
    """Further actions, by which the profile is checked."""
    return CHECKED + (CHECKED_WIDE if config.data.is_wide else [])


def profile_path(config: Config) -> Path:
    return config.folder / "latency.json"


def context_lengths(config: Config) -> tuple[int, ...]:
    """The contexts that are timed, in tokens, ascending: a short prompt, half-way through the text
    of a prompt of mean length, and the end of the longest text. Times are linear in between."""
    tokenizer = pairs.tokenizer_of(config)
    form = pairs.form_of(config)
    new = config.data.tokens
    kept, _ = form.fit(tokenizer, pairs.all_prompts(config))
    ordered = sorted(len(form.cut(tokenizer, ids)) for ids in form.whole(tokenizer, kept))
    short = max(1, ordered[len(ordered) // 10])
    middle = max(short, sum(ordered) // len(ordered) + new // 2)
    longest = max(short, ordered[-1]) + new
    return tuple(sorted({short, middle, longest}))


def load_profile(config: Config, pair: ModelPair | None = None) -> LatencyProfile:
    """The run's profile; InputError where it was measured on another machine or with another
    pair."""
    path = profile_path(config)
    verify(config, "latency")
    profile = LatencyProfile.load(path)
    device = timing.device_name(config.pair.device, config.pair.dtype)
    if profile.device != device and source_of(config).decodes:
        raise InputError(
            f"{path} was measured on {profile.device}; this is {device}: "
            "run the latency stage again"
        )
    if pair is not None and profile.pair != pair.fingerprint:
        raise InputError(f"{path} was measured with another pair: run the latency stage again")
    return profile


def plan(config: Config) -> list[str]:
    path = config.latency.timings
    if reads_only(config):
        if path is None:
            return []
        count = len(timings.read_timings(path))
        return [f"read {count} step times of an engine from {path}"]
    with suppress(InputError):  # nothing is known of the pair yet
        if stage_of(config).differs_only_in("sampling"):
            return [f"the times stay, and {COUNTING}"]
    repeats = config.latency.repeats
    count = len(fitted_actions(config) + checked_actions(config))
    return [f"{repeats} decoding steps with each of {count} trees and lookups"]


def reads_only(config: Config) -> bool:
    """Whether only an engine's times are read: there are no models, or this machine's profile
    exists."""
    has_timings = config.latency.timings is not None
    return not source_of(config).decodes or (has_timings and profile_path(config).exists())


def run(config: Config) -> None:
    path = config.latency.timings
    source = source_of(config)  # a log that cannot be read ends the run before it writes anything
    if not source.decodes:
        if path is not None:
            complete = partial(with_decisions, config, log_source(config))
            timings.run(stage_of(config), path, source.drafts, complete)
        return
    pair = pairs.load_pair(config)
    if path is not None:
        engine_stage = timings.stage_of(
            config, "engine-latency", path, pair.fingerprint, timings.engine_path(config)
        )
        timings.run(engine_stage, path)
        if reads_only(config):
            return
    stage = stage_of(config, pair.fingerprint)
    if not stage.begin():
        return
    prompts = []
    for prompt in pairs.prompts_of(config, pair, "train")[:PROMPTS]:
        prompts.append(pairs.encode(config, pair, prompt))
    if stage.differs_only_in("sampling"):
        _count_again(stage, pair, prompts)
    else:
        _measure(stage, pair, prompts)
    stage.finish()


def _measure(stage: Stage, pair: ModelPair, prompts: list[list[int]]) -> None:
    config = stage.config
    lengths = context_lengths(config)
    with mlflow_run(config, "latency") as mlflow:
        samples = _timed_steps(config, pair, prompts, lengths)
        actions = fitted_actions(config)
        samples_to_fit = [sample for sample in samples if sample.step.action in actions]
        profile = timing.fitted(pair, samples_to_fit, lengths, stage.depends["device"])
        profile = _with_decisions(config, pair, profile, prompts)
        rows = check(profile, config.train.verifier, samples, checked_actions(config))
        matrices = matrix_seconds(pair.target)
        stage.replace()
        write_json(profile_path(config), {**profile.to_json(), "check": rows, "matrices": matrices})
        mlflow.log_artifact(str(profile_path(config)))
        for row in rows:
            mlflow.log_metric(metric_name(f"predicted over measured/{row['action']}"), row["ratio"])
        describe(mlflow, in_words(profile))
    if matrices:
        console.print(of_matrices(matrices))
    console.print(summary(profile, rows))
    doubt = timings.unsteady(rows)
    if doubt:
        stage.say(f"warning: {doubt} (remove {profile_path(config)} first)")


def _count_again(stage: Stage, pair: ModelPair, prompts: list[list[int]]) -> None:
    """Complete a profile after a change of the sampling settings, on which its times do not
    depend."""
    config = stage.config
    (path,) = stage.outputs
    contents = read_json(path, "latency")
    stage.replace()
    write_json(path, {**contents, "distinct": distinct(config, pair, prompts)})
    stage.say(f"{path}: its times stay, and {COUNTING}")


def _timed_steps(
    config: Config, pair: ModelPair, prompts: list[list[int]], lengths: Sequence[int]
) -> list[timing.Sample]:
    """Decoding steps with all actions, behind texts that grow to the `lengths`."""
    tokens = [token for prompt in prompts for token in prompt]
    texts = []
    for length in lengths:
        texts.append(list(islice(cycle(tokens), max(2, length - timing.GROWN))))
    cases: list[timing.Case] = []
    fitted = fitted_actions(config)
    for action in fitted + checked_actions(config):
        cases.append((config.train.verifier, action))
    branching = [action for action in fitted if action.K > 1 and action.style == IID]
    for verifier in config.verifiers:
        if verifier != config.train.verifier:  # the others differ only at branches
            cases += [(verifier, action) for action in branching]
    steps = config.latency.repeats * len(cases)
    with ticking("timing decoding steps", steps) as tick:
        return timing.real_steps(pair, cases, texts, lengths[-1], steps, tick)


def _with_decisions(
    config: Config, pair: ModelPair, profile: LatencyProfile, prompts: list[list[int]]
) -> LatencyProfile:
    """The profile with the times of decisions, and the counts of distinct nodes."""
    profile = replace(profile, decide=dict.fromkeys(DECISIONS, 0.0))
    decide = {}
    for level in watched(DECISIONS, "timing decisions"):
        decide[level] = decision_seconds(config, pair, profile, level, prompts[0])
    return replace(profile, decide=decide, distinct=distinct(config, pair, prompts))


def stage_of(config: Config, pair: str | None = None) -> Stage:
    """The stage with what it depends on. `pair` is the pair's fingerprint: the recorded one if it
    is not given."""
    source = source_of(config)
    path = config.latency.timings
    if path is not None and not source.decodes:
        stage = timings.stage_of(config, "latency", path, source.fingerprint, profile_path(config))
        decisions = {"selector": config.train.network, "decisions": list(DECISIONS_OF_LOGS)}
        return replace(stage, depends={**stage.depends, **decisions})
    device = timing.device_name(config.pair.device, config.pair.dtype)
    if pair is None:
        pair = source.fingerprint
    depends = {
        "device": device,
        "pair": pair,
        "repeats": config.latency.repeats,
        "lengths": list(context_lengths(config)),
        "verifiers": list(config.verifiers),
        "sampling": [sampling_setting.model_dump() for sampling_setting in config.sampling],
        "seed": config.seed,
        "tokens": config.data.tokens,
        "selector": config.train.network,
        "prompts": pairs.prompts_depend(config, "train"),
        "checked": config.train.verifier,
        "actions": list(map(str, fitted_actions(config) + checked_actions(config))),
    }
    return Stage("latency", config, depends, (profile_path(config),))


def check(
    profile: LatencyProfile,
    verifier: str,
    samples: Sequence[timing.Sample],
    actions: Sequence[Action],
) -> list[dict[str, Any]]:
    """Predicted and measured step times in seconds with one verifier, of trees and lookups outside
    of the fit."""
    rows = []
    for action in actions:
        key = verifier, 0, action
        checked = [s for s in samples if (s.verifier, s.lag, s.step.action) == key]
        if checked:
            rows.append(timings.checked(str(action), *timing.times(profile, checked)))
    return rows


def distinct(
    config: Config, pair: ModelPair, prompts: list[list[int]]
) -> dict[str, dict[str, list[float]]]:
    """`LatencyProfile.distinct` of every sampling setting."""
    nodes_by_sampling = {}
    for sampling_setting in watched(config.sampling, "counting distinct nodes"):
        sampling = sampling_setting.build()
        seed = seed_of(config.seed, "distinct")
        written = generated_by_target(pair, prompts, config.data.tokens, sampling, seed)
        texts = [(text.tokens, text.start) for text in written]
        nodes_by_sampling[str(sampling)] = distinct_nodes(
            pair.draft, texts, sampling.draft, config.seed, config.data.space
        )
    return nodes_by_sampling


def in_words(profile: LatencyProfile) -> str:
    lengths = profile.draft.lengths
    length = lengths[len(lengths) // 2]
    verifier = next(iter(profile.verify))
    milliseconds = []
    for drafted in (0, 1, 8):
        seconds = profile.action_seconds(Action(1, drafted, 0), length, verifier)
        milliseconds.append(f"{1e3 * seconds:.2f} ms")
    plain, with_one, with_eight = milliseconds
    decisions = []
    for level, seconds in profile.decide.items():
        decisions.append(f"{1e3 * seconds:.3f} ms ({level})")
    return (
        f"a step of {plain} plain, {with_one} with one drafted token, {with_eight} with eight;\n"
        f"a decision {', '.join(decisions)}"
    )


def of_matrices(matrices: list[dict[str, float]]) -> Table:
    rows = []
    for times in matrices:
        cells = {"rows": f"{times['rows']:.0f}"}
        for name, seconds in times.items():
            if name != "rows":
                cells[f"{name} ms"] = f"{1e3 * seconds:.1f}"
        rows.append(cells)
    title = (
        "The target's matrices, by rows: as torch multiplies them, and laid out once, as they are "
        "used here"
    )
    return table(rows, title)


def summary(profile: LatencyProfile, rows: list[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        cells.append(
            {
                "action": row["action"],
                "predicted ms": f"{1e3 * row['predicted']:.2f}",
                "measured ms": f"{1e3 * row['measured']:.2f}",
                "ratio": f"{row['ratio']:.2f}",
            }
        )
    return table(cells, f"Step times on {profile.device}\n{in_words(profile)}")
