"""Stage `evaluate`: real decoding of held-out prompts, methods interleaved prompt by prompt, in wall-clock time."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_gen.decoding import Chooser, Decoder, Fixed
from data_gen.models import ModelPair
from data_gen.prompts import Prompt, take_evenly
from data_gen.trajectories import seed_of
from data_gen.verification import get_verifier
from pipelines import comparison, losslessness
from pipelines.config import Config, SamplingSetting
from pipelines.export import build
from pipelines.latency import load_profile
from pipelines.pair import load_pair
from pipelines.prompts import encode, prompts_digest, prompts_of
from pipelines.stage import Stage, console, mlflow_run, progress, read_json, write_json
from pipelines.train import by_setting, chosen_checkpoint, traces_module
from selector.actions import EMPTY, Action
from selector.baselines import best_static
from selector.runtime import LatencyProfile, Selector, load_selector
from selector.schema import sha256

GREEDY_PROMPTS = 20


@dataclass
class Method:
    """A way of decoding under one sampling setting."""

    name: str
    verifier: str
    chooser: Chooser


def static_name(verifier: str, root_branching: bool = False) -> str:
    return f"static {verifier}" + (" at the root" if root_branching else "")


def tuned_actions(config: Config, profile: LatencyProfile) -> dict[tuple[float, float], dict[str, dict[str, Any]]]:
    """For each sampling setting and static method its verifier, action and predicted speed, from training traces."""
    result: dict[tuple[float, float], dict[str, dict[str, Any]]] = {}
    for verifier in config.verifiers:
        traces = traces_module(config, profile, verifier)
        at_root = torch.tensor([action.L1 == 0 or action.K == 1 for action in traces.space])
        for temperature, top_p, roots in by_setting(traces.train):
            for root_branching in (False, True):
                best = best_static(roots.mean_BA, roots.static_seconds_BA, at_root if root_branching else None)
                speed = roots.mean_BA[:, best].sum() / roots.static_seconds_BA[:, best].sum()
                result.setdefault((temperature, top_p), {})[static_name(verifier, root_branching)] = {
                    "verifier": verifier,
                    "action": list(traces.space.actions[best]),
                    "predicted": float(speed),
                }
    return result


def methods(config: Config, tuned: dict[str, dict[str, Any]], selector: Selector) -> list[Method]:
    """Autoregressive decoding, each verifier's best static tree, Traversal's best that branches at the root, ours."""
    kept = [static_name(verifier) for verifier in config.verifiers]
    if "traversal" in config.verifiers:
        kept.append(static_name("traversal", root_branching=True))
    return [
        Method(comparison.AUTOREGRESSIVE, config.verifiers[0], Fixed(EMPTY)),
        *(Method(name, tuned[name]["verifier"], Fixed(Action(*tuned[name]["action"]))) for name in kept),
        Method(comparison.SELECTOR, selector.verifier, selector),
    ]


def plan(config: Config) -> list[str]:
    count = len(config.verifiers) + 2 + ("traversal" in config.verifiers)
    return [
        f"{config.evaluate.prompts} prompts x {len(config.sampling)} sampling settings x {count} methods, "
        f"{config.evaluate.tokens} tokens each"
    ]


def run(config: Config) -> None:
    output = config.folder / "evaluation.json"
    result = read_json(config.folder / "training" / "result.json", "train")
    pair = load_pair(config)
    profile = load_profile(config, pair)
    inputs = {
        "evaluate": config.evaluate.model_dump(mode="json"),
        "prompts": {"tokens": config.prompts.tokens, "texts": prompts_digest(config, "test")},
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "seed": config.seed,
        "pair": pair.fingerprint,
        "latency": profile.to_json(),
        "training": sha256(chosen_checkpoint(config, result)),
    }
    stage = Stage("evaluate", config, inputs, (output,))
    if not stage.begin():
        console.print(comparison.method_table(read_json(output, "evaluate")))
        return
    prompts = prompts_of(config, "test", config.evaluate.prompts)
    tuned = tuned_actions(config, profile)
    with tempfile.TemporaryDirectory() as temporary, mlflow_run(config, "evaluate") as mlflow:
        build(config, Path(temporary) / "selector")  # what is timed is what an engine would load
        selector = load_selector(Path(temporary) / "selector")
        journal = Journal(config.folder / "evaluation.partial.jsonl", inputs)
        with progress() as bar:
            task = bar.add_task("decoding held-out prompts", total=len(prompts) * len(config.sampling), note="")
            for prompt in prompts:
                for setting in config.sampling:
                    chosen = methods(config, tuned[setting.temperature, setting.top_p], selector)
                    if not journal.holds(prompt, setting):
                        if not journal.warm:
                            decode_all(config, pair, prompt, setting, chosen)
                        journal.add(decode_all(config, pair, prompt, setting, chosen))
                    bar.advance(task)
        greedy = losslessness.greedy_check(pair, config, take_evenly(prompts, min(len(prompts), GREEDY_PROMPTS)))
        evaluation = {**comparison.evaluation(config, journal.rows, tuned), "greedy": greedy}
        stage.replace()
        write_json(output, evaluation)
        journal.path.unlink()
        mlflow.log_artifact(str(output))
        mlflow.log_metrics({key: value for key, value in evaluation["summary"].items() if isinstance(value, float)})
    console.print(comparison.method_table(evaluation))
    stage.say(losslessness.summary(greedy))
    stage.finish()


class Journal:
    """Finished prompts, one line per method, so that an interrupted evaluation goes on where it stopped."""

    def __init__(self, path: Path, inputs: dict[str, Any]) -> None:
        self.path = path
        self.warm = False  # whether this process has decoded anything yet
        self.rows: list[dict[str, Any]] = []
        header = json.dumps(inputs, sort_keys=True)
        lines = path.read_text().splitlines() if path.exists() else []
        finished = [line for line in lines[1:] if _complete(line)] if lines and lines[0] == header else []
        for line in finished:
            self.rows += json.loads(line)
        path.write_text("\n".join([header, *finished]) + "\n")

    def holds(self, prompt: Prompt, setting: SamplingSetting) -> bool:
        wanted = (prompt.id, setting.temperature, setting.top_p)
        return any((row["prompt"], row["temperature"], row["top_p"]) == wanted for row in self.rows)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.warm = True
        self.rows += rows
        with self.path.open("a") as file:
            file.write(json.dumps(rows) + "\n")


def _complete(line: str) -> bool:
    """Whether a line was written to its end."""
    try:
        return bool(json.loads(line))
    except json.JSONDecodeError:
        return False


def decode_all(
    config: Config, pair: ModelPair, prompt: Prompt, setting: SamplingSetting, chosen: list[Method]
) -> list[dict[str, Any]]:
    """Every method on one prompt, in turn; the order rotates with the prompt."""
    sampling = setting.build()
    tokens = encode(pair, prompt, config.prompts.tokens)
    seed = seed_of(config.seed, prompt.id, sampling, "evaluate")
    shift = seed % len(chosen)
    rows = []
    for method in chosen[shift:] + chosen[:shift]:
        decoder = Decoder(pair, sampling, get_verifier(method.verifier), method.chooser)
        generator = torch.Generator(device=pair.device).manual_seed(seed)
        start = time.perf_counter()
        decoded = decoder.decode(tokens, config.evaluate.tokens, generator)
        seconds = time.perf_counter() - start
        actions: dict[str, int] = {}
        for step in decoded.steps:
            actions[str(step.action)] = actions.get(str(step.action), 0) + 1
        rows.append(
            {
                "prompt": prompt.id,
                "kind": prompt.kind,
                "source": prompt.source,
                "temperature": setting.temperature,
                "top_p": setting.top_p,
                "method": method.name,
                "verifier": method.verifier,
                "tokens": len(decoded.tokens),
                "seconds": seconds,
                "steps": len(decoded.steps),
                "block_tokens": sum(step.accepted + 1 for step in decoded.steps),
                "step_seconds": sum(sum(step.seconds.values()) for step in decoded.steps),
                "select_seconds": sum(step.seconds["select"] for step in decoded.steps),
                "actions": actions,
            }
        )
    return rows
