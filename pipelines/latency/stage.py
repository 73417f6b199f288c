"""Stage `latency`: measure this machine's latency profile, and check it against real decoding steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

from rich.table import Table

from data_gen import timing
from data_gen.decoding import EAGER
from data_gen.drafting.sampled import different_nodes
from data_gen.models.checkpoints import RANDOM
from data_gen.models.pair import ModelPair
from data_gen.texts.written import seed_of, written_by_target
from pipelines.config import Config
from pipelines.latency import timings
from pipelines.latency.profile import (
    DECISIONS,
    context_lengths,
    decision_seconds,
    profile_path,
)
from pipelines.pair.loading import encode, known_fingerprint, load_pair, prompts_depend, prompts_of
from pipelines.run import Stage, console, table, ticking, watched, write_json
from pipelines.tracking import describe, mlflow_run
from selector.actions import Action
from selector.latency import LatencyProfile

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
FITTED = [*map(Action.of, TREES), *map(Action.copy, (2, 8, 16))]
CHECKED = [*map(Action.of, OTHERS), Action.copy(4)]
PROMPTS = 4  # on which different nodes are counted
UNSTEADY = 0.1  # mean distance of predicted step times from measured ones, as a share, that is warned of
_PLAIN = str.maketrans({"(": "", ")": "", ",": "", " ": "-"})


def plan(config: Config) -> list[str]:
    if reads_only(config):
        return [f"read the step times of an engine from {config.latency.timings}"]
    return [f"{config.latency.repeats} decoding steps with each of {len(FITTED + CHECKED)} trees and lookups"]


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
    prompts = [encode(config, pair, prompt) for prompt in prompts_of(config, pair, "train")[:PROMPTS]]
    lengths = context_lengths(config)
    with mlflow_run(config, "latency", SECTIONS) as mlflow:
        cases = timed_cases(config, pair)
        steps = config.latency.repeats * len(cases)
        with ticking("timing decoding steps", steps) as tick:
            samples = timing.real_steps(pair, cases, contexts(prompts, lengths), lengths[-1], steps, tick)
        profile = timing.fitted(
            pair, [each for each in samples if each.step.action in FITTED], lengths, stage.depends["device"]
        )
        profile = replace(profile, decide=dict.fromkeys(DECISIONS, 0.0))
        decide = {
            level: decision_seconds(config, pair, profile, level, prompts[0], config.data.tokens, texts=1)
            for level in watched(DECISIONS, "timing decisions")
        }
        profile = replace(profile, decide=decide, different=different(config, pair, prompts))
        rows = check(profile, config.train.verifier, samples)
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


def timed_cases(config: Config, pair: ModelPair) -> list[timing.Case]:
    """All actions with the selector's verifier; with the others, trees with branches, of which alone they differ."""
    drafted, own = [each for each in FITTED + CHECKED if pair.trees.max_K >= each.K], config.train.verifier
    others = [name for name in config.verifiers if name != own]
    branching = [each for each in drafted if each.K > 1 and each in FITTED] or drafted[:1]
    return [*product([own], drafted), *product(others, branching)]


def contexts(prompts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Prompts from which texts grow up to each of some lengths."""
    tokens = [token for prompt in prompts for token in prompt]
    return [list(islice(cycle(tokens), max(2, length - timing.GROWN))) for length in lengths]


def check(profile: LatencyProfile, verifier: str, samples: Sequence[timing.Sample]) -> list[dict[str, Any]]:
    """Predicted and measured step times with one verifier, of trees and lookups outside of the fit."""
    rows = []
    for action in CHECKED:
        taken = [own for own in samples if (own.verifier, own.step.action, own.late) == (verifier, action, 0)]
        if taken:
            predicted, measured = timing.times(profile, taken)
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
