"""Stage `evaluate`: held-out prompts decoded with every method, interleaved prompt by prompt, in wall-clock time; and
held-out texts replayed, on this machine's clock and on those of synthetic profiles.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from data_gen.models import ModelPair
from data_gen.prompts import Prompt, take_evenly
from data_gen.texts import seed_of
from pipelines import comparison, losslessness
from pipelines.assisted import Assistant, best_constant
from pipelines.config import Config, SamplingSetting
from pipelines.export import build
from pipelines.journal import Journal
from pipelines.latency import load_profile
from pipelines.methods import (
    ASSISTED,
    ASSISTED_CONSTANT,
    AT_ROOT,
    BEST_STATIC,
    RULE,
    SELECTOR,
    SYNTHETIC,
    WALL,
    Assisted,
    Method,
    Rule,
    Selecting,
    Task,
    row_of,
    static_methods,
)
from pipelines.pair import load_pair
from pipelines.prompts import encode, prompts_digest, prompts_of
from pipelines.stage import Stage, mlflow_run, progress, read_json, write_json
from pipelines.traces import load_traces, settings_of, timed
from pipelines.train import chosen_of, decision_digest, judge, load_module, load_result, statics
from selector.data import Setting, Texts
from selector.decision import Mode
from selector.replay import ratio_of_speeds
from selector.rules import AcceptanceRule
from selector.runtime import LatencyProfile, Selector, gpu_like
from selector.schema import SCALAR_NAMES
from selector.tuning import sources

FORMAT = 3  # of `evaluation.json`
GREEDY_PROMPTS = 20
TUNING_PROMPTS = 3  # on which assisted generation's constant is tuned, for every sampling setting
LONG_REPEAT = 8  # tokens
OFTEN = 0.25  # share of a text's positions inside a long repeat that makes it one of the texts with repeats


def plan(config: Config) -> list[str]:
    methods = len(config.verifiers) + 6 + ("traversal" in config.verifiers) + 2 * config.evaluate.assisted
    return [
        f"{config.evaluate.prompts} prompts x {len(config.sampling)} sampling settings x up to {methods} methods, "
        f"{config.evaluate.tokens} tokens each; held-out texts replayed on {1 + len(config.evaluate.gpu_like)} clocks"
    ]


def run(config: Config) -> None:
    output = config.folder / "evaluation.json"
    result = load_result(config)
    pair = load_pair(config)
    profile = load_profile(config, pair)
    inputs = {
        "format": FORMAT,
        "evaluate": config.evaluate.model_dump(mode="json"),
        "prompts": {"tokens": config.prompts.tokens, "texts": prompts_digest(config, "test")},
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "seed": config.seed,
        "pair": pair.fingerprint,
        "latency": profile.to_json(),
        **decision_digest(config, result),
    }
    stage = Stage("evaluate", config, inputs, (output,))
    if not stage.begin():
        comparison.show(read_json(output, "evaluate"))
        return
    prompts = prompts_of(config, "test", config.evaluate.prompts)
    splits = load_traces(config, profile.pair)
    with tempfile.TemporaryDirectory() as temporary, mlflow_run(config, "evaluate") as mlflow:
        selector = build(config, Path(temporary) / "selector", splits)
        contenders = wall_methods(config, pair, profile, splits, result, selector)
        replayed = replays(config, contenders, splits["test"], profile, WALL)
        for clock, other in synthetic_clocks(config, pair).items():
            replayed += replays(config, synthetic_methods(config, other, splits, result), splits["test"], other, clock)
        journal = Journal(config.folder / "evaluation.partial.jsonl", inputs)
        finished = {(row["prompt"], row["temperature"], row["top_p"]) for rows in journal.entries for row in rows}
        warm = False
        with progress() as bar:
            task = bar.add_task("decoding held-out prompts", total=len(prompts) * len(config.sampling), note="")
            for prompt in prompts:
                for setting in config.sampling:
                    chosen = contenders[setting.temperature, setting.top_p]
                    if (prompt.id, setting.temperature, setting.top_p) not in finished:
                        if not warm:
                            decode_all(config, pair, prompt, setting, chosen)
                            warm = True
                        journal.add(decode_all(config, pair, prompt, setting, chosen))
                    bar.advance(task)
        greedy = losslessness.greedy_check(pair, config, take_evenly(prompts, min(len(prompts), GREEDY_PROMPTS)))
        decoded = [row for rows in journal.entries for row in rows]
        evaluation = {
            **comparison.evaluation(config, decoded, replayed),
            "decisions": chosen_of(result)["modes"],
            "repeats": repeats(config, contenders, splits["test"], profile),
            "greedy": greedy,
        }
        evaluation["summary"] |= synthetic_summary(replayed)
        stage.replace()
        write_json(output, evaluation)
        mlflow.log_artifact(str(output))
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
        own.append(Selecting(SELECTOR, verifier, mode, module, selector.at(*setting)))
        methods[setting] = own
    for setting, constant in assistants(config, pair).items():
        methods[setting] += [Assisted(ASSISTED, Assistant()), Assisted(ASSISTED_CONSTANT, constant)]
    return methods


def synthetic_clocks(config: Config, pair: ModelPair) -> dict[str, LatencyProfile]:
    return {
        f"{SYNTHETIC}_1/{1 / share:g}": gpu_like(pair.fingerprint, config.verifiers, share)
        for share in config.evaluate.gpu_like
    }


def synthetic_methods(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], result: dict[str, Any]
) -> dict[Setting, list[Method]]:
    """The same selector on another clock: static trees and prices of its own, and what pays there."""
    module = load_module(config, result["chosen"], result)
    verifier, settings = config.train.verifier, settings_of(config)
    bases = statics(splits, settings, verifier, profile)
    judged = judge(module, splits["validation"], bases, verifier, profile)
    methods: dict[Setting, list[Method]] = {}
    for setting, each in zip(settings, judged, strict=True):
        own = static_methods(splits["train"].setting_of(setting), config.verifiers, profile)
        mode = each.mode if each.pays and module.is_regressor else each.mode.static_only()
        methods[setting] = [*own, Selecting(SELECTOR, verifier, mode, module)]
    return methods


def replays(
    config: Config, methods: dict[Setting, list[Method]], texts: Texts, profile: LatencyProfile, clock: str
) -> list[dict[str, Any]]:
    """Every method that can be replayed, on held-out texts: its speed over the best static tree's."""
    rows = []
    for setting, own in methods.items():
        mine = texts.setting_of(setting)
        found = {method.name: method.replay(mine, profile) for method in own}
        base = found[BEST_STATIC]
        assert base is not None
        for method in own:
            replayed = found[method.name]
            if replayed is None:
                continue
            ratio = ratio_of_speeds(replayed, base, sources(mine))
            rows.append(
                {
                    "clock": clock,
                    "temperature": setting[0],
                    "top_p": setting[1],
                    "method": method.name,
                    "verifier": method.verifier,
                    "action": None if method.action is None else list(method.action),
                    "ratio": ratio.value,
                    "error": ratio.error,
                    "tokens_per_second": replayed.speed,
                    "block_efficiency": replayed.block_efficiency,
                    "texts": len(mine),
                }
            )
    return rows


def synthetic_summary(replayed: list[dict[str, Any]]) -> dict[str, float]:
    """The selector over Traversal's best tree at the root on synthetic clocks, mean over clocks and settings."""
    found: dict[tuple, dict[str, float]] = {}
    for row in replayed:
        if row["clock"] != WALL:
            key = row["clock"], row["temperature"], row["top_p"]
            found.setdefault(key, {})[row["method"]] = row["tokens_per_second"]
    ratios = [own[SELECTOR] / own[AT_ROOT] for own in found.values() if AT_ROOT in own]
    return {"ratio_vs_static_traversal_gpu_like": sum(ratios) / len(ratios)} if ratios else {}


def repeats(
    config: Config, methods: dict[Setting, list[Method]], texts: Texts, profile: LatencyProfile
) -> list[dict[str, Any]]:
    """The selector's gain on held-out texts with and without long repeats, by replay."""
    rows = []
    for setting, own in methods.items():
        mine = texts.setting_of(setting)
        inside_R = (mine.scalars_RF[:, SCALAR_NAMES.index("match")] >= LONG_REPEAT).double()
        share_X = torch.zeros(len(mine), dtype=torch.float64).index_add_(0, mine.text_R, inside_R) / mine.size_X
        by_name = {method.name: method for method in own}
        for name, chosen_X in (("with", share_X >= OFTEN), ("without", share_X < OFTEN)):
            part = mine.take(chosen_X.nonzero()[:, 0])
            if len(part) == 0:
                continue
            selector, base = (by_name[each].replay(part, profile) for each in (SELECTOR, BEST_STATIC))
            assert selector is not None and base is not None
            ratio = ratio_of_speeds(selector, base, sources(part))
            saved = float(selector.tokens_X.sum()) / base.speed - float(selector.seconds_X.sum())
            rows.append(
                {
                    "temperature": setting[0],
                    "top_p": setting[1],
                    "texts": f"{name} long repeats",
                    "count": len(part),
                    "ratio": ratio.value,
                    "error": ratio.error,
                    "seconds_saved": saved,
                }
            )
    return rows


def assistants(config: Config, pair: ModelPair) -> dict[Setting, Assistant]:
    """Assisted generation's best constant by sampling setting; none where the config leaves it out."""
    if not config.evaluate.assisted:
        return {}
    prompts = [encode(pair, prompt, config.prompts.tokens) for prompt in prompts_of(config, "train", TUNING_PROMPTS)]
    result = {}
    for setting in config.sampling:
        seed = seed_of(config.seed, setting.build(), "assisted") % 2**31
        result[setting.temperature, setting.top_p] = best_constant(
            pair, setting.build(), prompts, config.evaluate.tokens, seed
        )
    return result


def decode_all(
    config: Config, pair: ModelPair, prompt: Prompt, setting: SamplingSetting, chosen: list[Method]
) -> list[dict[str, Any]]:
    """Every method on one prompt, in turn, in an order of the prompt's own: none always follows the same other one."""
    sampling = setting.build()
    seed = seed_of(config.seed, prompt.id, sampling, "evaluate")
    task = Task(encode(pair, prompt, config.prompts.tokens), prompt.kind, config.evaluate.tokens, seed)
    return [
        {
            "prompt": prompt.id,
            "kind": prompt.kind,
            "source": prompt.source,
            "temperature": setting.temperature,
            "top_p": setting.top_p,
            **row_of(method, method.decode(pair, sampling, task)),
        }
        for method in random.Random(seed).sample(chosen, len(chosen))
    ]
