"""Stage `latency`: this machine's latency profile, checked against real decoding steps; or an
engine's step times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice, product, repeat
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from data_gen import timing
from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Overruled
from data_gen.drafting.sampled import distinct_nodes
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.generated import generated_by_target, seed_of
from data_gen.texts.logs import NO_DRAFTER
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.latency import timings
from pipelines.pair import stage as pairs
from pipelines.pair.log import log_of
from pipelines.run import Stage, console, table, ticking, verify, watched, write_json
from pipelines.tracking import describe, mlflow_run
from selector.actions import GREEDY, IID, Action, ActionSpace
from selector.decision import LookupRule, Mode
from selector.export.writer import config_of
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector, Tuned
from selector.schema import FEATURES, FULL, LIGHT, MATCH, InputError
from selector.train.module import SelectorModule

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "latency", "train")
TREES = (
    *((1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 4, 0), (1, 8, 0), (1, 8, 8)),
    *((2, 0, 2), (2, 2, 4), (2, 4, 2), (2, 8, 8), (3, 0, 4), (3, 4, 4), (3, 2, 8)),
    *((4, 0, 1), (4, 0, 4), (4, 0, 8), (4, 4, 2), (4, 4, 8), (4, 8, 4)),
)
OTHERS = (
    *((1, 3, 0), (1, 6, 0), (1, 8, 4), (2, 0, 6), (2, 3, 3), (2, 6, 8)),
    *((3, 1, 6), (3, 6, 2), (4, 1, 3), (4, 0, 6), (4, 2, 6)),
)
GREEDY_TREES = (4, 0, 1), (3, 0, 2), (2, 2, 4), (4, 0, 4)
FITTED = [
    *map(Action.of, TREES),
    *(Action(*shape, GREEDY) for shape in GREEDY_TREES),
    *map(Action.copy, (2, 8, 16)),
]
CHECKED = [*map(Action.of, OTHERS), Action.copy(4)]
PROMPTS = 4  # whose texts are timed, and on which distinct nodes are counted
UNSTEADY = 0.1  # the mean relative error of predicted step times above which there is a warning
PLAIN = str.maketrans({"(": "", ")": "", ",": "", " ": "-"})
DRAFTED = 6  # tokens of every step in which a decision is timed
DECISIONS = (MATCH, *FEATURES)  # the feature levels at which decisions are timed


def profile_path(config: Config) -> Path:
    return config.folder / "latency.json"


def context_lengths(config: Config) -> tuple[int, ...]:
    """The contexts that are timed, in tokens, ascending: a short prompt, half-way through the text
    of a prompt of mean length, and the end of the longest text. Times are linear in between."""
    tokenizer, form, new = pairs.tokenizer_of(config), config.prompts.form, config.data.tokens
    kept, _ = form.fit(tokenizer, pairs.all_prompts(config))
    ordered = sorted(len(form.cut(tokenizer, ids)) for ids in form.whole(tokenizer, kept))
    short, mean = max(1, ordered[len(ordered) // 10]), sum(ordered) // len(ordered) + new // 2
    return tuple(sorted({short, max(short, mean), max(short, ordered[-1]) + new}))


def load_profile(config: Config, pair: ModelPair | None = None) -> LatencyProfile:
    """The run's profile; InputError where it was measured on another machine or with another
    pair."""
    path = profile_path(config)
    verify(config, "latency")
    profile = LatencyProfile.load(path)
    device = timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    if profile.device != device and not config.logs.files:
        raise InputError(
            f"{path} was measured on {profile.device}; this is {device}: "
            "run the latency stage again"
        )
    if pair is not None and profile.pair != pair.fingerprint:
        raise InputError(f"{path} was measured with another pair: run the latency stage again")
    return profile


def decision_seconds(
    config: Config, pair: ModelPair, profile: LatencyProfile, level: str, prompt: list[int]
) -> float:
    """Seconds of a decision in real decoding, features included: the mean without the slowest
    tenth. The lookup rule decides at the level `match`, else an untrained network, which may choose
    chains and lookups. `data.tokens` new tokens are decoded, and every step drafts `DRAFTED` of
    them. InputError where they end too early."""
    space, verifier = ActionSpace.of_pairs(), config.train.verifier
    level_and_widths = (FULL, pairs.hidden_widths(config)) if level == FULL else (LIGHT, [])
    module = SelectorModule(
        "regressor", *level_and_widths, config.train.network, space=space.to_json()
    ).eval()
    chains = map(space.index, map(space.chain, range(space.depth + 1)))
    allowed = (*chains, *range(len(space.trees), len(space)))
    rule = LookupRule(2, space.lookups[-1]) if level == MATCH else None
    mode = Mode(
        Sampling(), space.chain(4), () if rule else (level,), 100.0, allowed=allowed, rule=rule
    )
    selector = Selector(
        module.state_dict(), config_of(module, verifier, mode.action, [mode]), profile, [mode]
    )
    chooser = Overruled(Tuned(mode, selector), repeat(space.chain(DRAFTED)))
    decoder = Decoder(pair, Sampling(), get_verifier(verifier), chooser, timed=True)
    generator = torch.Generator(device=pair.device).manual_seed(0)
    if not (steps := decoder.decode(prompt, config.data.tokens, generator).steps[2:]):
        raise InputError(
            "prompts: their continuations end before a third decoding step, which could be timed"
        )
    return timing.usual([step.seconds["select"] for step in steps])


def plan(config: Config) -> list[str]:
    path = config.latency.timings
    if config.logs.files or reads_only(config):
        return (
            [f"read {len(timings.read_timings(path))} step times of an engine from {path}"]
            if path
            else []
        )
    return [
        f"{config.latency.repeats} decoding steps with each of {len(FITTED + CHECKED)} trees and "
        "lookups"
    ]


def reads_only(config: Config) -> bool:
    """Whether only an engine's times are read, because this machine's profile exists."""
    return config.latency.timings is not None and profile_path(config).exists()


def run(config: Config) -> None:
    path = config.latency.timings
    if config.logs.files:
        log = log_of(config)  # a log that cannot be read ends the run before anything is written
        if path is not None:
            timings.run(stage_of(config), path, log.labeller.drafter != NO_DRAFTER)
        return
    pair = pairs.load_pair(config)
    if path is not None:
        pair_and_output = pair.fingerprint, timings.engine_path(config)
        timings.run(timings.stage_of(config, "engine-latency", path, *pair_and_output), path)
        if reads_only(config):
            return
    stage = stage_of(config, pair.fingerprint)
    if not stage.begin():
        return
    prompts = [
        pairs.encode(config, pair, prompt)
        for prompt in pairs.prompts_of(config, pair, "train")[:PROMPTS]
    ]
    lengths, tokens = context_lengths(config), [token for prompt in prompts for token in prompt]
    # they grow to these
    texts = [list(islice(cycle(tokens), max(2, length - timing.GROWN))) for length in lengths]
    with mlflow_run(config, "latency", SECTIONS) as mlflow:
        # they differ only at branches
        other_verifiers = [name for name in config.verifiers if name != config.train.verifier]
        cases: list[timing.Case] = [*product([config.train.verifier], FITTED + CHECKED)]
        cases += product(
            other_verifiers, (each for each in FITTED if each.K > 1 and each.style == IID)
        )
        steps = config.latency.repeats * len(cases)
        with ticking("timing decoding steps", steps) as tick:
            samples = timing.real_steps(pair, cases, texts, lengths[-1], steps, tick)
        fitted = [each for each in samples if each.step.action in FITTED]
        profile = timing.fitted(pair, fitted, lengths, stage.depends["device"])
        profile = replace(profile, decide=dict.fromkeys(DECISIONS, 0.0))
        decide = {
            level: decision_seconds(config, pair, profile, level, prompts[0])
            for level in watched(DECISIONS, "timing decisions")
        }
        profile = replace(profile, decide=decide, distinct=distinct(config, pair, prompts))
        rows, matrices = (
            check(profile, config.train.verifier, samples),
            timing.matrix_seconds(pair.target),
        )
        stage.replace()
        write_json(profile_path(config), {**profile.to_json(), "check": rows, "matrices": matrices})
        mlflow.log_artifact(str(profile_path(config)))
        for row in rows:
            mlflow.log_metric(
                f"predicted over measured/{row['action']}".translate(PLAIN), row["ratio"]
            )
        describe(mlflow, in_words(profile))
    if matrices:
        console.print(of_matrices(matrices))
    console.print(summary(profile, rows))
    if doubt := unsteady(rows):
        stage.say(f"warning: {doubt} (remove {profile_path(config)} first)")
    stage.finish()


def stage_of(config: Config, pair: str | None = None) -> Stage:
    """The stage with what it depends on. `pair` is the pair's fingerprint: the recorded one if it
    is not given."""
    if config.logs.files and config.latency.timings:
        path_pair_output = config.latency.timings, log_of(config).fingerprint, profile_path(config)
        return timings.stage_of(config, "latency", *path_pair_output)
    depends = {
        "device": timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads),
        "pair": pair or pairs.known_fingerprint(config),
        "repeats": config.latency.repeats,
        "lengths": list(context_lengths(config)),
        "verifiers": list(config.verifiers),
        "sampling": [setting.model_dump() for setting in config.sampling],
        "seed": config.seed,
        "tokens": config.data.tokens,
        "selector": config.train.network,
        "prompts": pairs.prompts_depend(config, "train"),
        "checked": config.train.verifier,
    }
    return Stage("latency", config, depends, (profile_path(config),))


def check(
    profile: LatencyProfile, verifier: str, samples: Sequence[timing.Sample]
) -> list[dict[str, Any]]:
    """Predicted and measured step times in seconds with one verifier, of trees and lookups outside
    of the fit."""
    rows = []
    for action in CHECKED:
        if action_samples := [
            sample
            for sample in samples
            if (sample.verifier, sample.step.action, sample.lag) == (verifier, action, 0)
        ]:
            predicted, measured = timing.times(profile, action_samples)
            row = {
                "action": str(action),
                "predicted": predicted,
                "measured": measured,
                "ratio": predicted / measured,
            }
            rows.append({**row, "steps": len(action_samples)})
    return rows


def unsteady(rows: list[dict[str, Any]]) -> str:
    """A warning where predicted step times are far from measured ones, else an empty string."""
    error = statistics.mean(abs(row["ratio"] - 1) for row in rows) if rows else 0.0
    words = (
        f"predicted step times are {error:.0%} away from measured ones, in the mean: measure again "
        "at a quiet hour"
    )
    return words if error > UNSTEADY else ""


def distinct(
    config: Config, pair: ModelPair, prompts: list[list[int]]
) -> dict[str, list[list[float]]]:
    """`LatencyProfile.distinct` of every sampling setting."""
    nodes_by_setting = {}
    for setting in watched(config.sampling, "counting distinct nodes"):
        sampling = setting.build()
        written = generated_by_target(
            pair, prompts, config.data.tokens, sampling, seed_of(config.seed, "distinct")
        )
        texts = [(text.tokens, text.start) for text in written]
        nodes_by_setting[str(sampling)] = distinct_nodes(
            pair.draft, texts, sampling.draft, config.seed
        )
    return nodes_by_setting


def in_words(profile: LatencyProfile) -> str:
    length, verifier = (
        profile.draft.lengths[len(profile.draft.lengths) // 2],
        next(iter(profile.verify)),
    )
    chains = (
        1e3 * profile.action_seconds(Action(1, drafted, 0), length, verifier)
        for drafted in (0, 1, 8)
    )
    steps = (
        "a step of {:.2f} ms plain, {:.2f} ms with one drafted token, {:.2f} ms with eight".format(
            *chains
        )
    )
    decisions = ", ".join(
        f"{1e3 * seconds:.3f} ms ({level})" for level, seconds in profile.decide.items()
    )
    return f"{steps};\na decision {decisions}"


def of_matrices(matrices: list[dict[str, float]]) -> Table:
    rows = []
    for times in matrices:
        cells = {
            f"{name} ms": f"{1e3 * seconds:.1f}"
            for name, seconds in times.items()
            if name != "rows"
        }
        rows.append({"rows": f"{times['rows']:.0f}", **cells})
    title = (
        "The target's matrices, by rows: as torch multiplies them, and laid out once, as they are "
        "used here"
    )
    return table(rows, title)


def summary(profile: LatencyProfile, rows: list[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        times = {f"{key} ms": f"{1e3 * row[key]:.2f}" for key in ("predicted", "measured")}
        cells.append({"action": row["action"], **times, "ratio": f"{row['ratio']:.2f}"})
    return table(cells, f"Step times on {profile.device}\n{in_words(profile)}")
