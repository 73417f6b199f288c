"""Stage `latency`: measure this machine's latency profile, and check it against real decoding steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.table import Table as RichTable

from data_gen import latency
from data_gen.features import Row, root_features
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from pipelines.config import Config
from pipelines.pair import load_pair
from pipelines.prompts import encode, prompts_of
from pipelines.stage import Stage, console, mlflow_run, progress, write_json
from selector.actions import Action, ActionSpace
from selector.export import DeployedSelector
from selector.network import SelectorNetwork
from selector.runtime import LatencyProfile, torchscript
from selector.schema import SCALAR_NAMES, InputError

CHECKED = [Action(*shape) for shape in ((1, 0, 0), (1, 4, 0), (1, 8, 0), (2, 2, 4), (4, 0, 4), (4, 0, 8), (2, 8, 8))]


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
        "selector": {"width": config.train.width, "hidden": list(config.train.hidden)},
    }
    stage = Stage("latency", config, depends, (profile_path(config),))
    if not stage.begin():
        return
    grid = latency.Grid(config.latency.lengths, config.latency.widths, config.latency.nodes, config.latency.repeats)
    prompts = [encode(pair, p, config.prompts.tokens) for p in prompts_of(config, "train", 6)]
    with mlflow_run(config, "latency") as mlflow, progress() as bar:
        task = bar.add_task("timing passes", total=grid.repeats, note="")
        profile = latency.measure(pair, grid, config.verifiers, device, lambda: bar.advance(task))
        profile = replace(profile, select=selector_seconds(config, pair, profile))
        first = latency.check(pair, profile, config.train.verifier, CHECKED, prompts[:3], 32)
        profile = replace(profile, step=statistics.median(float(row["rest"]) for row in first))
        rows = latency.check(pair, profile, config.train.verifier, CHECKED, prompts[3:], 32)
        stage.replace()
        write_json(profile_path(config), {**profile.to_json(), "check": rows})
        mlflow.log_artifact(str(profile_path(config)))
        for row in rows:
            mlflow.log_metric(f"latency/predicted_over_measured/{row['action']}".translate(_PLAIN), row["ratio"])
    console.print(summary(profile, rows))
    stage.finish()


_PLAIN = str.maketrans({"(": "", ")": "", ",": "", " ": "-"})


def summary(profile: LatencyProfile, rows: list[dict[str, float | str]]) -> RichTable:
    """One pass of each model, and predicted against measured step times."""
    length = profile.draft.lengths[len(profile.draft.lengths) // 2]
    draft, target = profile.draft.at(length, 1), profile.target.at(length, 1)
    table = RichTable(
        title=f"Step times on {profile.device}\ndraft pass {1e3 * draft:.2f} ms, target pass {1e3 * target:.2f} ms "
        f"(1/{target / draft:.1f}), selector {1e3 * profile.select:.2f} ms",
        title_justify="left",
    )
    for column in ("action", "predicted ms", "measured ms", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        predicted, measured = 1e3 * float(row["predicted"]), 1e3 * float(row["measured"])
        table.add_row(str(row["action"]), f"{predicted:.2f}", f"{measured:.2f}", f"{float(row['ratio']):.2f}")
    return table


@torch.inference_mode()
def selector_seconds(config: Config, pair: ModelPair, profile: LatencyProfile, repeats: int = 50) -> float:
    """Median time of an exported selector's decision after a target pass, features included.

    Its weights do not matter for that, so it need not be trained.
    """
    widths = [pair.target.config.hidden_size, *[pair.draft.config.hidden_size] * 2]
    actions = ActionSpace.default().actions
    scalars = range(len(SCALAR_NAMES))
    network = SelectorNetwork(widths, scalars, len(actions), config.train.width, config.train.hidden)
    table = profile.table(actions, config.train.verifier, selector=True)
    untrained = DeployedSelector(network, torch.zeros(()), table, (torch.zeros(0, len(actions)), torch.zeros(0))).eval()
    with torchscript():
        module = torch.jit.freeze(torch.jit.script(untrained))
    probs_V = torch.rand(pair.draft.get_output_embeddings().weight.shape[0], device=pair.device).double().softmax(-1)
    target, draft = (Row(probs_V, torch.randn(width, device=pair.device)) for width in widths[:2])
    context = CachedModel(pair.target)
    seconds = []
    for _ in range(repeats):
        context.extend([0])
        context.keep([])
        start = time.perf_counter()
        features = root_features(target, draft, draft, 100, Sampling(), profile)
        int(module({name: value.cpu() for name, value in features.items()})[0])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
