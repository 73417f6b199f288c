"""Stage `latency`: measure this machine's latency profile, and check it against real decoding steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table as RichTable

from data_gen import latency
from data_gen.choosers import SelectorChooser
from data_gen.decoding import Step
from data_gen.drafting import Drawn
from data_gen.features import Row, root_features
from data_gen.models import CachedModel, ModelPair
from data_gen.prompts import Prompt
from data_gen.sampling import Sampling
from pipelines.config import Config
from pipelines.pair import load_pair
from pipelines.prompts import encode, prompts_digest, prompts_of
from pipelines.stage import Stage, console, mlflow_run, progress, write_json
from pipelines.units import Unit, decode, label
from selector.actions import Action, ActionSpace
from selector.export import untuned
from selector.module import SelectorModule
from selector.runtime import HEAD, LatencyProfile, Mode, Selector, Tuned, decision_tables, torchscript
from selector.schema import SCALAR_NAMES, InputError

FITTED = [
    *((1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 4, 0), (1, 8, 0), (1, 8, 8)),
    *((2, 0, 2), (2, 2, 4), (2, 4, 2), (2, 8, 8), (3, 0, 4), (3, 4, 4), (3, 2, 8)),
    *((4, 0, 1), (4, 0, 4), (4, 0, 8), (4, 4, 2), (4, 4, 8), (4, 8, 4)),
]
CHECKED = [(1, 3, 0), (1, 6, 0), (1, 8, 4), (2, 0, 6), (2, 3, 3), (3, 1, 6), (3, 6, 2), (4, 1, 3), (4, 2, 6)]
REAL_TOKENS = 24  # of each text whose decoding steps the times are fitted to, and checked with


def profile_path(config: Config) -> Path:
    return config.folder / "latency.json"


def load_profile(config: Config, pair: ModelPair | None = None) -> LatencyProfile:
    """The run's profile; InputError where it was measured on another machine or with another pair."""
    path = profile_path(config)
    profile = LatencyProfile.load(path)
    here = latency.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    if profile.device != here:
        raise InputError(f"{path} was measured on {profile.device}; this is {here}: run the latency stage again")
    if pair is not None and profile.pair != pair.fingerprint:
        raise InputError(f"{path} was measured with another pair: run the latency stage again")
    return profile


def plan(config: Config) -> list[str]:
    cells = len(config.latency.lengths) * (len(config.latency.widths) + len(config.latency.nodes))
    return [f"{cells} pass sizes and {len(config.verifiers)} verifiers, {config.latency.repeats} times each"]


def run(config: Config) -> None:
    pair = load_pair(config)
    device = latency.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    depends = {
        "device": device,
        "pair": pair.fingerprint,
        "latency": config.latency.model_dump(mode="json"),
        "verifiers": list(config.verifiers),
        "labelling": {"together": config.data.together, "threads": config.data.threads},
        "selector": {"root": network_shape(config), "trunk": trunk_shape(config)},
        "prompts": {"tokens": config.prompts.tokens, "texts": prompts_digest(config, "train")},
        "checked": config.trained_verifiers[-1],
    }
    stage = Stage("latency", config, depends, (profile_path(config),))
    if not stage.begin():
        return
    grid = latency.Grid(config.latency.lengths, config.latency.widths, config.latency.nodes, config.latency.repeats)
    texts = prompts_of(config, "train", config.latency.prompts)
    prompts = [encode(pair, text, config.prompts.tokens) for text in texts]
    with mlflow_run(config, "latency") as mlflow, progress() as bar:
        task = bar.add_task("timing passes", total=grid.repeats, note="")
        profile = latency.measure(pair, grid, config.verifiers, device, lambda: bar.advance(task))
        select, revise = selector_seconds(config, pair, profile)
        profile = replace(profile, select=select, revise=revise)
        profile = replace(profile, labelling=labelling_seconds(config, pair, texts[:3]))
        actions = [Action(*shape) for shape in FITTED + CHECKED]
        steps = latency.real_steps(pair, config.verifiers, actions, prompts, REAL_TOKENS)
        if len(steps) < len(actions) * len(config.verifiers):
            raise InputError("prompts: their continuations end before a second decoding step, which could be timed")
        profile = latency.fitted(profile, {key: taken for key, taken in steps.items() if key[1] in FITTED})
        checked = config.trained_verifiers[-1]
        rows = check(profile, checked, {action: steps[checked, action] for action in actions if action in CHECKED})
        stage.replace()
        write_json(profile_path(config), {**profile.to_json(), "check": rows})
        mlflow.log_artifact(str(profile_path(config)))
        for row in rows:
            mlflow.log_metric(f"latency/predicted_over_measured/{row['action']}".translate(_PLAIN), row["ratio"])
    console.print(summary(profile, rows))
    stage.finish()


def check(profile: LatencyProfile, verifier: str, steps: dict[Action, list[Step]]) -> list[dict[str, Any]]:
    """Predicted against measured step times, of trees that nothing was fitted to."""
    rows = []
    for action, taken in steps.items():
        predicted, measured = latency.times(profile, verifier, action, taken)
        ratio = predicted / measured
        row = {"action": str(action), "predicted": predicted, "measured": measured, "ratio": ratio, "steps": len(taken)}
        rows.append(row)
    return rows


_PLAIN = str.maketrans({"(": "", ")": "", ",": "", " ": "-"})


def summary(profile: LatencyProfile, rows: list[dict[str, Any]]) -> RichTable:
    """One pass of each model, and predicted against measured step times."""
    length = profile.draft.lengths[len(profile.draft.lengths) // 2]
    draft, target = profile.draft.at(length, 1), profile.target.at(length, 1)
    table = RichTable(
        title=f"Step times on {profile.device}\ndraft pass {1e3 * draft:.2f} ms, target pass {1e3 * target:.2f} ms "
        f"(1/{target / draft:.1f});\n"
        f"the selector {1e3 * profile.select:.2f} ms at a root, {1e3 * profile.revise:.2f} ms at a drafted token "
        f"({profile.revise / draft:.0%} of a draft pass)",
        title_justify="left",
    )
    for column in ("action", "predicted ms", "measured ms", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        predicted, measured = 1e3 * float(row["predicted"]), 1e3 * float(row["measured"])
        table.add_row(str(row["action"]), f"{predicted:.2f}", f"{measured:.2f}", f"{float(row['ratio']):.2f}")
    return table


def labelling_seconds(config: Config, pair: ModelPair, prompts: list[Prompt]) -> dict[str, float]:
    """`LatencyProfile.labelling`, from trajectories of the prompts as the data stage makes them."""
    sampling = config.sampling[0].build()
    todo = [Unit(prompt, sampling, config.verifiers[0]) for prompt in prompts]
    seconds = dict.fromkeys(("token", "draft", "target", "labels"), 0.0)
    tokens = roots = 0
    for number, unit in enumerate(todo[:1] + todo):  # the first one warms up
        start = time.perf_counter()
        decoded, prompt = decode(config, pair, unit)
        decoding = time.perf_counter() - start
        rows, labelling = label(config, pair, unit, prompt, decoded)
        if number > 0:
            tokens, roots = tokens + len(decoded.tokens), roots + len(rows)
            seconds["token"] += decoding
            for part, spent in labelling.items():
                seconds[part] += spent
    per_supertree = max(1, roots * config.data.samples)
    return {part: spent / (tokens if part == "token" else per_supertree) for part, spent in seconds.items()}


@torch.inference_mode()
def selector_seconds(
    config: Config, pair: ModelPair, profile: LatencyProfile, repeats: int = 50
) -> tuple[float, float]:
    """Median times of an exported selector's decisions, features included: `select` at a root after a target pass,
    `revise` at a drafted token after a draft pass.

    Its weights do not matter for that, so it need not be trained.
    """
    widths = [pair.target.config.hidden_size, *[pair.draft.config.hidden_size] * 2]
    actions = ActionSpace.default().actions
    module = SelectorModule(
        objective="regressor",
        hidden_widths=widths,
        actions=len(actions),
        network=network_shape(config),
        trunk=trunk_shape(config),
        learning_rate=1.0,
        weight_decay=0.0,
        epochs=1,
        worst_weight=0.0,
        worst_share=1.0,
        verifiers=len(config.trained_verifiers),
    )
    chains = tuple(ActionSpace.default().index(ActionSpace.default().chain(length)) for length in range(17))
    mode = Mode(
        1.0, 1.0, Action(1, 4, 0), at_root=True, on_trunk=True, gain=1 / profile.target.at(100, 1), further=chains
    )
    tables = decision_tables(profile, [mode], config.trained_verifiers, regressor=True)
    with torchscript():
        calibration = torch.zeros(0, len(tables.option_SA[0])), torch.zeros(0, len(SCALAR_NAMES)), torch.zeros(0)
        scripted = torch.jit.script(untuned(module.eval(), tables, calibration))
        head = tuple(dict(scripted.named_buffers())[name] for name in HEAD)
        scripted = torch.jit.freeze(scripted, preserved_attrs=["efficiency", "further"])
    facts = {"actions": actions, "verifier": "", "verifiers": config.trained_verifiers, "fallback": (1, 4, 0)}
    tuned = Tuned(Selector(scripted, head, facts, profile, [mode]), mode)
    chooser = SelectorChooser(tuned, Sampling())
    chooser.revise(Drawn(0, -1, torch.ones(1), torch.zeros(widths[-1])), 100)
    probs_V = torch.rand(pair.draft.get_output_embeddings().weight.shape[0], device=pair.device).double().softmax(-1)
    probs_V = probs_V.float()
    target, draft = (Row(probs_V, torch.randn(width, device=pair.device)) for width in widths[:2])
    contexts = {"select": CachedModel(pair.target), "revise": CachedModel(pair.draft)}
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(repeats):
        for name, context in contexts.items():
            context.extend([0])
            context.keep([])
            if pair.device.type == "cuda":
                torch.cuda.synchronize(pair.device)
            start = time.perf_counter()
            if name == "select":
                chooser.select(root_features(target, draft, draft, 100, Sampling(), profile))
            else:
                chooser.revise(Drawn(1, 5, probs_V, draft.hidden_D), 100)
            seconds[name].append(time.perf_counter() - start)
    return statistics.median(seconds["select"]), statistics.median(seconds["revise"])


def network_shape(config: Config) -> dict[str, Any]:
    """Keyword arguments of `SelectorNetwork`."""
    return {"width": config.train.width, "hidden": list(config.train.hidden), "dropout": config.train.dropout}


def trunk_shape(config: Config) -> dict[str, Any]:
    """Keyword arguments of `TrunkNetwork`."""
    return {"hidden": list(config.train.trunk_hidden), "dropout": config.train.trunk_dropout}
