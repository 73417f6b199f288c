"""Stage `latency`: measure this machine's latency profile, and check it against real decoding steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import product
from typing import Any

from rich.table import Table

from data_gen import timing
from data_gen.decoding import EAGER
from data_gen.decoding.loop import Step
from data_gen.drafting.sampled import different_nodes
from data_gen.models.checkpoints import RANDOM
from data_gen.models.pair import ModelPair
from data_gen.texts.written import seed_of, written_by_target
from pipelines.config import Config
from pipelines.latency import timings
from pipelines.latency.profile import (
    DECISIONS,
    ENDED,
    NODES,
    WIDTHS,
    context_lengths,
    decision_seconds,
    decoder_of,
    profile_path,
)
from pipelines.pair.loading import encode, known_fingerprint, load_pair, prompts_depend, prompts_of
from pipelines.run import Stage, console, table, ticking, watched, write_json
from pipelines.tracking import describe, mlflow_run
from selector.actions import Action
from selector.latency import LatencyProfile
from selector.schema import InputError

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "latency", "train")

TREES = (
    *((1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 4, 0), (1, 8, 0), (1, 8, 8)),
    *((2, 0, 2), (2, 2, 4), (2, 4, 2), (2, 8, 8), (3, 0, 4), (3, 4, 4), (3, 2, 8)),
    *((4, 0, 1), (4, 0, 4), (4, 0, 8), (4, 4, 2), (4, 4, 8), (4, 8, 4)),
)
OTHERS = (1, 3, 0), (1, 6, 0), (1, 8, 4), (2, 0, 6), (2, 3, 3), (3, 1, 6), (3, 6, 2), (4, 1, 3), (4, 2, 6)
FITTED = [*map(Action.of, TREES), *map(Action.copy, (2, 8, 16))]
CHECKED = [*map(Action.of, OTHERS), Action.copy(4)]
FORMAT = 9  # of `latency.json`; a profile of another format is measured anew
REAL_STEPS = 8  # timed steps of each text and tree
UNSTEADY = 0.1  # mean distance of predicted step times from measured ones, as a share, that is warned of
PLAIN_ROUNDS = 24  # of each text, for plain decoding in a run of its own
LATE_ROUNDS = 3  # of all texts for each of `latency.repeats`, for drafts after plain steps
_PLAIN = str.maketrans({"(": "", ")": "", ",": "", " ": "-"})


def plan(config: Config) -> list[str]:
    if reads_only(config):
        return [f"read the step times of an engine from {config.latency.timings}"]
    cells = 3 * (len(WIDTHS) + len(NODES))  # of three contexts
    return [f"{cells} pass sizes and {len(config.verifiers)} verifiers, {config.latency.repeats} times each"]


def reads_only(config: Config) -> bool:
    """Whether only an engine's times are read, because this machine's profile exists."""
    return config.latency.timings is not None and profile_path(config).exists()


def run(config: Config) -> None:
    if config.latency.timings is not None:
        timings.run(config, config.latency.timings)
        if reads_only(config):
            return
    pair = load_pair(config, shapes=True)
    stage = stage_of(config, pair.fingerprint)
    if not stage.begin():
        return
    device = stage.depends["device"]
    grid = timing.Grid(context_lengths(config), WIDTHS, NODES, config.latency.repeats)
    count = max(1, config.latency.repeats // 5)
    prompts = [encode(config, pair, prompt) for prompt in prompts_of(config, pair, "train", count)]
    with mlflow_run(config, "latency", SECTIONS) as mlflow:
        with ticking("timing passes", grid.repeats) as tick:
            profile = timing.measure(pair, grid, config.verifiers, device, tick)
        pair.decoder = decoder_of(config, pair)
        profile = replace(profile, decide=dict.fromkeys(DECISIONS, 0.0), decoder=pair.decoder)
        decide = {
            level: decision_seconds(config, pair, profile, level, prompts[0], config.data.tokens, count)
            for level in watched(DECISIONS, "timing decisions")
        }
        profile = replace(profile, decide=decide)
        actions = [each for each in FITTED + CHECKED if pair.trees.max_K >= each.K]
        own = config.train.verifier  # of other verifiers only the branching takes a time of its own
        cases = [
            (name, each)
            for name, each in product(config.verifiers, actions)
            if name == own or (each.K > 1 and each in FITTED)
        ]
        with ticking("timing decoding steps", timing.rounds(cases, prompts)) as tick:
            steps = timing.real_steps(pair, cases, prompts, REAL_STEPS, config.data.tokens, tick)
        if any(case not in steps for case in cases if not case[1].copies):
            raise InputError(ENDED)
        profile = replace(profile, different=different(config, pair, prompts))
        profile = timing.fitted(profile, {key: taken for key, taken in steps.items() if key[1] in FITTED})
        plain = timing.plain_alone(pair, config.train.verifier, prompts, PLAIN_ROUNDS, config.data.tokens)
        turns = math.ceil(LATE_ROUNDS * config.latency.repeats / len(prompts))
        with ticking("timing late drafts", turns * len(prompts)) as tick:
            late = timing.late_drafts(pair, config.train.verifier, prompts, turns, config.data.tokens, tick)
        profile = replace(profile, plain=plain, late=late)
        rows = check(profile, config.train.verifier, {key: taken for key, taken in steps.items() if key[1] in CHECKED})
        stage.replace()
        write_json(profile_path(config), {**profile.to_json(), "check": rows})
        mlflow.log_artifact(str(profile_path(config)))
        for row in rows:
            mlflow.log_metric(f"predicted over measured/{row['action']}".translate(_PLAIN), row["ratio"])
        describe(mlflow, passes(profile))
    console.print(summary(profile, rows))
    if doubt := unsteady(rows):
        stage.say(f"[bold yellow]warning[/]: {doubt} (remove {profile_path(config)} first)")
    stage.finish()


def stage_of(config: Config, pair: str | None = None) -> Stage:
    """The stage with what it depends on, among this the pair's fingerprint: the recorded one if it is not given."""
    depends = {
        "format": FORMAT,
        "device": timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads),
        "pair": pair or known_fingerprint(config),
        "decoder": config.pair.decoder,
        "repeats": config.latency.repeats,
        "lengths": list(context_lengths(config)),
        "verifiers": list(config.verifiers),
        "sampling": [setting.model_dump() for setting in config.sampling],
        "seed": config.seed,
        "tokens": config.data.tokens,
        "selector": config.train.network,
        "prompts": prompts_depend(config, "train"),
        "checked": config.train.verifier,
    }
    return Stage("latency", config, depends, (profile_path(config),))


def check(profile: LatencyProfile, verifier: str, steps: dict[tuple[str, Action], list[Step]]) -> list[dict[str, Any]]:
    """Predicted and measured step times with one verifier, of trees and lookups outside of the fit."""
    rows = []
    for (name, action), taken in steps.items():
        if name == verifier:
            predicted, measured = timing.times(profile, verifier, action, taken)
            row = {"action": str(action), "predicted": predicted, "measured": measured, "ratio": predicted / measured}
            rows.append({**row, "steps": len(taken)})
    return rows


def unsteady(rows: list[dict[str, Any]]) -> str:
    """In words, by how much predicted step times differ from measured ones; empty where that is little."""
    error = statistics.mean(abs(row["ratio"] - 1) for row in rows) if rows else 0.0
    if error <= UNSTEADY:
        return ""
    return f"predicted step times are {error:.0%} away from measured ones, in the mean: measure again at a quiet hour"


def different(config: Config, pair: ModelPair, prompts: list[list[int]]) -> dict[str, list[list[float]]]:
    """`LatencyProfile.different` of every sampling setting; empty where the decoder passes fixed slots, and for a head,
    which drafts no branches."""
    found = {}
    counted = pair.decoder == EAGER and not pair.has_head
    for setting in watched(config.sampling, "counting different nodes") if counted else ():
        sampling = setting.build()
        written = written_by_target(pair, prompts, config.data.tokens, sampling, seed_of(config.seed, "different"))
        texts = [(text.tokens, text.start) for text in written]
        means = different_nodes(pair.draft, texts, sampling.draft, config.seed)
        found[str(sampling)] = means
    return found


def passes(profile: LatencyProfile) -> str:
    length = profile.draft.lengths[len(profile.draft.lengths) // 2]
    draft, target = profile.draft.at(length, 1), profile.target.at(length, 1)
    decisions = ", ".join(f"{1e3 * seconds:.3f} ms ({level})" for level, seconds in profile.decide.items())
    ratio = f"1/{target / draft:.1f}"
    return f"draft pass {1e3 * draft:.2f} ms, target pass {1e3 * target:.2f} ms ({ratio});\na decision {decisions}"


def summary(profile: LatencyProfile, rows: list[dict[str, Any]]) -> Table:
    random = ", random weights" if profile.pair.startswith(RANDOM) else ""
    cells = [
        {
            "action": row["action"],
            **{f"{key} ms": f"{1e3 * row[key]:.2f}" for key in ("predicted", "measured")},
            "ratio": f"{row['ratio']:.2f}",
        }
        for row in rows
    ]
    return table(cells, f"Step times on {profile.device}{random}\n{passes(profile)}")
