"""Stage `evaluate`: real decoding of held-out prompts, methods interleaved prompt by prompt.

In wall-clock time, and in the time that latency profiles of other machines predict for the very steps decoded.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from data_gen.models import ModelPair
from data_gen.prompts import Prompt, take_evenly
from data_gen.trajectories import seed_of
from pipelines import comparison, losslessness
from pipelines.assisted import Assistant, best_constant
from pipelines.config import Config, SamplingSetting
from pipelines.confirm import Trial
from pipelines.export import build
from pipelines.journal import Journal
from pipelines.latency import load_profile
from pipelines.methods import SELECTOR, SYNTHETIC, WALL, Method, Task, profile_methods, row_of, wall_methods
from pipelines.pair import load_pair
from pipelines.prompts import encode, prompts_digest, prompts_of
from pipelines.stage import Stage, mlflow_run, progress, read_json, write_json
from pipelines.train import ceiling, chosen_checkpoint, chosen_modes, load_stopping, stopping_checkpoint, traces_module
from pipelines.tuning import Tuning
from selector.data import Roots, TracesModule, met_in_decoding, of_setting, setting_number
from selector.runtime import LatencyProfile, Selector, gpu_like, load_selector
from selector.schema import sha256

FORMAT = 2  # of `evaluation.json`: `decisions`
GREEDY_PROMPTS = 20
TUNING_PROMPTS = 3  # on which assisted generation's constant is tuned, for every sampling setting

Key = tuple[float, float]  # temperature, top-p


def plan(config: Config) -> list[str]:
    own, at_root = len(config.train.others), "traversal" in config.verifiers
    wall = len(config.verifiers) + own + 5 + at_root + 2 * config.evaluate.assisted
    others = len(config.evaluate.gpu_like) * (3 + 2 * own + at_root)
    return [
        f"{config.evaluate.prompts} prompts x {len(config.sampling)} sampling settings x about {wall} methods on this "
        f"machine's clock and {others} on synthetic ones, {config.evaluate.tokens} tokens each; on synthetic clocks, "
        f"{config.train.confirm} validation prompts more wherever traces promise a gain"
    ]


def run(config: Config) -> None:
    output = config.folder / "evaluation.json"
    result = read_json(config.folder / "training" / "result.json", "train")
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
        "training": sha256(chosen_checkpoint(config, result)),
        "decisions": sha256(config.folder / "training" / "result.json"),
        "others": {name: sha256(chosen_checkpoint(config, result, name)) for name in config.train.others},
        "stopping": sha256(stopping_checkpoint(config, result)),
    }
    stage = Stage("evaluate", config, inputs, (output,))
    if not stage.begin():
        comparison.show(read_json(output, "evaluate"))
        return
    prompts = prompts_of(config, "test", config.evaluate.prompts)
    with tempfile.TemporaryDirectory() as temporary, mlflow_run(config, "evaluate") as mlflow:
        profiles = clocks(config, pair, profile)
        selectors = exported(config, pair, profiles, Path(temporary))
        contenders = methods(config, pair, profiles, selectors)
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
        evaluation = {**comparison.evaluation(config, decoded), "decisions": decisions(selectors), "greedy": greedy}
        evaluation["summary"] |= ceiling(chosen_modes(result))
        stage.replace()
        write_json(output, evaluation)
        mlflow.log_artifact(str(output))
        mlflow.log_metrics({key: value for key, value in evaluation["summary"].items() if isinstance(value, float)})
    comparison.show(evaluation)
    stage.say(losslessness.summary(greedy))
    stage.finish()
    journal.path.unlink()


def clocks(config: Config, pair: ModelPair, profile: LatencyProfile) -> dict[str, LatencyProfile]:
    """This machine's, and the synthetic ones."""
    synthetic = {
        f"{SYNTHETIC}_1/{1 / share:g}": gpu_like(pair.fingerprint, config.verifiers, share)
        for share in config.evaluate.gpu_like
    }
    return {WALL: profile, **synthetic}


def exported(
    config: Config, pair: ModelPair, profiles: dict[str, LatencyProfile], folder: Path
) -> dict[str, dict[str, Selector]]:
    """By clock and verifier, every selector as an engine would load it, tuned for the clock; the run's own first."""
    trial = Trial(config, pair)
    result: dict[str, dict[str, Selector]] = {}
    for clock, profile in profiles.items():
        result[clock] = {}
        for verifier in (None, *config.train.others):
            place = folder / clock.replace("/", "-") / (verifier or SELECTOR)
            build(config, place, profile, verifier, trial)
            result[clock][verifier or config.train.verifier] = load_selector(place)
    return result


def decisions(selectors: dict[str, dict[str, Selector]]) -> list[dict[str, Any]]:
    """What each selector does on each clock under each setting.

    `action` is the static tree. `ways` are all ways to decide that were weighed, the one taken first, with the speed
    over the static tree that traces promise, and what decoding validation prompts gave where that was tried.
    """
    shown = ("temperature", "top_p", "action", "at_root", "on_trunk", "ways")
    return [
        {
            "clock": clock,
            "verifier": verifier,
            "objective": selector.config["objective"],
            **{key: mode[key] for key in shown},
        }
        for clock, own in selectors.items()
        for verifier, selector in own.items()
        for mode in selector.config["modes"]
    ]


def methods(
    config: Config,
    pair: ModelPair,
    profiles: dict[str, LatencyProfile],
    selectors: dict[str, dict[str, Selector]],
) -> dict[Key, list[Method]]:
    """What is compared, for each sampling setting."""
    result: dict[Key, list[Method]] = {(s.temperature, s.top_p): [] for s in config.sampling}
    tuned = {clock: tunings(config, own) for clock, own in profiles.items()}
    constants = assistants(config, pair)
    head = load_stopping(config)
    for clock, own in profiles.items():
        selector = selectors[clock][config.train.verifier]
        others = {name: selectors[clock][name] for name in config.train.others}
        for setting in config.sampling:
            key, sampling = (setting.temperature, setting.top_p), setting.build()
            tuning = tuned[clock][key]
            result[key] += (
                wall_methods(tuning, selector, others, head, sampling, config.verifiers, constants.get(key))
                if clock == WALL
                else profile_methods(clock, own, tuning, selector, others, sampling, config.verifiers)
            )
    return result


def tunings(config: Config, profile: LatencyProfile) -> dict[Key, Tuning]:
    """Training data by sampling setting, with the times of a profile."""
    modules = {verifier: traces_module(config, profile, verifier) for verifier in config.verifiers}
    kinds = sorted({prompt.kind for prompt in prompts_of(config, "train")})
    return {
        (s.temperature, s.top_p): Tuning(
            {name: _training_roots(m, s) for name, m in modules.items()}, kinds, profile.revise
        )
        for s in config.sampling
    }


def _training_roots(traces: TracesModule, setting: SamplingSetting) -> Roots:
    return met_in_decoding(of_setting(traces.train, setting_number(setting.temperature, setting.top_p)))


def assistants(config: Config, pair: ModelPair) -> dict[Key, Assistant]:
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
