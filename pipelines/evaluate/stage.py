"""Stage `evaluate`: held-out prompts decoded with every method, and held-out texts replayed.

Decoding is in wall-clock time, the methods interleaved prompt by prompt; replay is on this machine's clock and on those
of synthetic profiles.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt, take_evenly
from data_gen.texts.written import seed_of
from pipelines.config import Config, SamplingSetting
from pipelines.data.recorded import load_traces, settings_of, timed
from pipelines.evaluate import comparison, findings, losslessness
from pipelines.evaluate.assisted import CONSTANTS, LOOKUPS, Assistant, best_of
from pipelines.evaluate.methods import (
    ASSISTED,
    ASSISTED_CONSTANT,
    BEST_STATIC,
    COPYING,
    PROMPT_LOOKUP,
    RULE,
    SELECTOR,
    WALL,
    Assisted,
    Copying,
    Decoding,
    Method,
    Rule,
    Selecting,
    Task,
    row_of,
    static_methods,
)
from pipelines.evaluate.own_texts import own_texts
from pipelines.evaluate.replays import repeats, replays, synthetic_clocks, synthetic_methods, synthetic_summary
from pipelines.evaluate.strips import strips
from pipelines.export.packaging import build
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import encode, load_pair, prompts_depend, prompts_of
from pipelines.run import Journal, Stage, progress, read_json, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.result import chosen_of, decision_digest, load_module, load_result
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector
from selector.train.data import Setting, Texts
from selector.train.rules import AcceptanceRule
from selector.train.tuning import tune_lookup_rule

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "evaluate", "export")

FORMAT = 7  # of `evaluation.json`
GREEDY_PROMPTS = 20
TUNING_PROMPTS = 3  # on which assisted generation's constant is tuned, for every sampling setting


def plan(config: Config) -> list[str]:
    methods = len(config.verifiers) + 7 + ("traversal" in config.verifiers) + 3 * config.evaluate.assisted
    return [
        f"{config.evaluate.prompts} prompts x {len(config.sampling)} sampling settings x up to {methods} methods, "
        f"{config.evaluate.tokens} tokens each; held-out texts replayed on {1 + len(config.evaluate.gpu_like)} clocks"
    ]


def run(config: Config) -> None:
    output = config.folder / "evaluation.json"
    result = load_result(config)
    pair = load_pair(config)
    profile = load_profile(config, pair)
    inputs = _inputs(config, pair, profile, result)
    stage = Stage("evaluate", config, inputs, (output,))
    if not stage.begin():
        comparison.show(read_json(output, "evaluate"))
        return
    prompts = prompts_of(config, pair, "test", config.evaluate.prompts)
    splits = load_traces(config, profile.pair)
    with tempfile.TemporaryDirectory() as temporary, mlflow_run(config, "evaluate", SECTIONS) as mlflow:
        selector = build(config, Path(temporary) / "selector", splits)
        contenders = wall_methods(config, pair, profile, splits, result, selector)
        replayed = replays(config, contenders, splits["test"], profile, WALL)
        for clock, other in synthetic_clocks(config, pair).items():
            replayed += replays(config, synthetic_methods(config, other, splits, result), splits["test"], other, clock)
        greedy = losslessness.greedy_check(pair, config, take_evenly(prompts, min(len(prompts), GREEDY_PROMPTS)))
        losslessness.require_equal(greedy)
        journal = Journal(config.folder / "evaluation.partial.jsonl", inputs)
        decode_prompts(config, pair, prompts, contenders, journal)
        decoded = [row for rows in journal.entries for row in rows]
        own = own_texts(config, pair, prompts, contenders, decoded, profile)
        evaluation = {
            **comparison.evaluation(config, decoded, replayed, own),
            "decisions": chosen_of(result)["modes"],
            "repeats": repeats(config, contenders, splits["test"], profile),
            "greedy": greedy,
            "strips": strips(config, pair, prompts[0], contenders),
        }
        evaluation["summary"] |= synthetic_summary(replayed)
        stage.replace()
        write_json(output, evaluation)
        mlflow.log_artifact(str(output))
        describe(mlflow, findings.headline(evaluation))
        mlflow.log_metrics({key: value for key, value in evaluation["summary"].items() if isinstance(value, float)})
    comparison.show(evaluation)
    stage.say(losslessness.summary(greedy))
    stage.finish()
    journal.path.unlink()


def wall_methods(
    config: Config,
    pair: ModelPair,
    profile: LatencyProfile,
    splits: dict[str, Texts],
    result: dict[str, Any],
    selector: Selector,
) -> dict[Setting, list[Method]]:
    """What is compared on this machine's clock, for each sampling setting."""
    module = load_module(config, result["chosen"], result)
    verifier = config.train.verifier
    methods: dict[Setting, list[Method]] = {}
    for setting, entry in zip(settings_of(config), chosen_of(result)["modes"], strict=True):
        mode, train = Mode.of(entry), splits["train"].setting_of(setting)
        own = static_methods(train, config.verifiers, profile)
        rule = AcceptanceRule.tuned(timed(splits["train"], setting, verifier, profile), mode)
        own.append(Rule(RULE, verifier, rule))
        static = next(method for method in own if method.name == BEST_STATIC)
        assert static.action is not None
        start = replace(mode.static_only(), action=static.action)
        own.append(
            Copying(
                COPYING,
                static.verifier,
                tune_lookup_rule(timed(splits["train"], setting, static.verifier, profile), start),
            )
        )
        own.append(Selecting(SELECTOR, verifier, mode, module, selector.at(*setting)))
        methods[setting] = own
    for setting, (constant, lookup) in assistants(config, pair).items():
        methods[setting] += [
            Assisted(ASSISTED, Assistant()),
            Assisted(ASSISTED_CONSTANT, constant),
            Assisted(PROMPT_LOOKUP, lookup),
        ]
    return methods


def assistants(config: Config, pair: ModelPair) -> dict[Setting, list[Assistant]]:
    """By sampling setting assisted generation's best constant, and prompt lookup's; none where the config leaves them
    out."""
    if not config.evaluate.assisted:
        return {}
    prompts = [encode(config, pair, prompt) for prompt in prompts_of(config, pair, "train", TUNING_PROMPTS)]
    result = {}
    for setting in config.sampling:
        seed = seed_of(config.seed, setting.build(), "assisted") % 2**31
        result[setting.temperature, setting.top_p] = [
            best_of(kind, pair, setting.build(), prompts, config.evaluate.tokens, seed) for kind in (CONSTANTS, LOOKUPS)
        ]
    return result


def _inputs(config: Config, pair: ModelPair, profile: LatencyProfile, result: dict[str, Any]) -> dict[str, Any]:
    """Everything that an evaluation follows from."""
    return {
        "format": FORMAT,
        "evaluate": config.evaluate.model_dump(mode="json"),
        "prompts": prompts_depend(config, "test"),
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "seed": config.seed,
        "pair": pair.fingerprint,
        "latency": profile.to_json(),
        **decision_digest(config, result),
    }


def decode_prompts(
    config: Config, pair: ModelPair, prompts: list[Prompt], contenders: dict[Setting, list[Method]], journal: Journal
) -> None:
    """Every prompt under every setting with every method, those apart that the journal already holds."""
    finished = {(row["prompt"], row["temperature"], row["top_p"]) for rows in journal.entries for row in rows}
    tasks = [(prompt, setting) for prompt in prompts for setting in config.sampling]
    todo = [
        (prompt, setting)
        for prompt, setting in tasks
        if (prompt.id, setting.temperature, setting.top_p) not in finished
    ]
    with progress() as bar:
        done = len(tasks) - len(todo)
        task = bar.add_task("decoding held-out prompts", total=len(tasks), completed=done, note="")
        for number, (prompt, setting) in enumerate(todo):
            chosen = contenders[setting.temperature, setting.top_p]
            if number == 0:  # the first decoding of a process is slower than all others, and does not count
                decode_all(config, pair, prompt, setting, chosen)
            journal.add(decode_all(config, pair, prompt, setting, chosen))
            bar.advance(task)


def decode_all(
    config: Config, pair: ModelPair, prompt: Prompt, setting: SamplingSetting, chosen: list[Method]
) -> list[dict[str, Any]]:
    """Every method on one prompt, in turn, in an order of the prompt's own: none always follows the same other one.

    Methods that draft the same fixed tree with the same verifier are one, whatever they are called: it decodes once.
    """
    sampling = setting.build()
    seed = seed_of(config.seed, prompt.id, sampling, "evaluate")
    task = Task(encode(config, pair, prompt), prompt.kind, config.evaluate.tokens, seed)
    decodings: dict[Any, Decoding] = {}
    for method in random.Random(seed).sample(chosen, len(chosen)):
        if method.identity not in decodings:
            decodings[method.identity] = method.decode(pair, sampling, task)
    return [
        {
            "prompt": prompt.id,
            "kind": prompt.kind,
            "source": prompt.source,
            "temperature": setting.temperature,
            "top_p": setting.top_p,
            **row_of(method, decodings[method.identity]),
        }
        for method in chosen
    ]
