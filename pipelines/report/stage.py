"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from pipelines.common.files import read_json
from pipelines.common.page import STYLE, image, table
from pipelines.common.stage import Stage, provenance
from pipelines.common.tracking import mlflow_run
from pipelines.config import Config
from pipelines.data.realised import realised
from pipelines.data.traces import load_traces, settings_of, timed, traces_folder
from pipelines.evaluate import losslessness
from pipelines.latency.profile import load_profile
from pipelines.report import plots
from pipelines.train.result import chosen_of, load_module, load_result
from selector.files import atomically
from selector.schema import read_manifest, sha256


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'report.html'}"]


def run(config: Config) -> None:
    output = config.folder / "report.html"
    evaluation = read_json(config.folder / "evaluation.json", "evaluate")
    artefact = config.folder / "selector" / "config.json"
    manifest = read_manifest(traces_folder(config))
    depends = {
        "evaluation": sha256(config.folder / "evaluation.json"),
        "latency": sha256(config.folder / "latency.json"),
        "artefact": sha256(artefact) if artefact.exists() else None,
        "traces": {name: shard["sha256"] for name, shard in manifest["shards"].items()},
    }
    stage = Stage("report", config, depends, (output,))
    if not stage.begin():
        _say_where(stage, output, artefact)
        return
    realised_rows = realised(config)
    training = load_result(config)
    with mlflow_run(config, "report") as mlflow:
        stage.replace()
        with atomically(output) as partial:
            partial.write_text(page(config, evaluation, realised_rows), encoding="utf-8")
        mlflow.log_artifact(str(output))
        # the training run has the parameters and the curves: the report belongs beside them too
        mlflow.MlflowClient().log_artifact(chosen_of(training)["run_id"], str(output))
        for row in realised_rows:
            mlflow.log_metric(f"realised/z/{row['verifier']}", row["z"])
    stage.finish()
    _say_where(stage, output, artefact)


def _say_where(stage: Stage, output: Path, artefact: Path) -> None:
    stage.say(f"{output.resolve()}")
    if artefact.exists():
        stage.say(f"exported selector in {artefact.parent.resolve()}")


def page(config: Config, evaluation: dict[str, Any], realised_rows: list[dict[str, Any]]) -> str:
    """The report as one self-contained page."""
    profile = load_profile(config)
    training = load_result(config)
    module = load_module(config, training["chosen"], training)
    splits, verifier = load_traces(config, profile.pair), config.train.verifier
    train, validation = (
        [timed(splits[split], setting, verifier, profile) for setting in settings_of(config)]
        for split in ("train", "validation")
    )
    check = read_json(config.folder / "latency.json", "latency")["check"]
    manifest = config.folder / "pair" / "manifest.json"
    pair = json.loads(manifest.read_text()) if manifest.exists() else {}
    sections = [
        ("Summary", table(_summary_rows(evaluation["summary"])) + table(evaluation["summary"]["by_setting"])),
        (
            "Held-out prompts decoded, held-out texts replayed",
            image(plots.throughput(evaluation))
            + table(_method_rows(evaluation))
            + "".join(f"<p>Decoding and replay disagree: {html.escape(x)}.</p>" for x in evaluation["disagreements"]),
        ),
        ("Texts with and without long repeats", table(evaluation["repeats"])),
        (
            f"Block efficiency by tree ({verifier}, training texts replayed)",
            "".join(image(plots.efficiency_by_tree(each)) for each in train),
        ),
        (
            "Labels against decoding",
            "<p>Decoding steps of the data stage: accepted lengths, and what the labels say of the same steps; |z| "
            "above 4 would mean that the labels do not describe the decoder.</p>" + table(realised_rows),
        ),
        (
            "Predicted against labelled block efficiency",
            "".join(image(plots.calibration(module, each)) for each in validation) if module.is_regressor else "",
        ),
        ("Greedy decoding", f"<p>{html.escape(losslessness.summary(evaluation['greedy']))}.</p>"),
        ("How often each action is chosen", image(plots.chosen_actions(evaluation))),
        (
            "Training",
            table([{"selector": name, **found["metrics"]} for name, found in training["selectors"].items()])
            + f"<p>Kept: {html.escape(training['chosen'])}.</p>",
        ),
        (
            "Step times",
            f"<p>{html.escape(profile.device)}. Mean overlap of the pair: {pair.get('overlap', 'not measured')}.</p>"
            + table(check),
        ),
        ("Provenance", f"<pre>{html.escape(json.dumps(provenance(config), indent=1))}</pre>"),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections)
    head = f"<!doctype html><meta charset='utf-8'><title>Espalier: {config.name}</title>{STYLE}"
    return f"{head}<h1>{config.name}</h1>{body}"


def _summary_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"figure": key, "value": value} for key, value in summary.items() if key != "by_setting"]


def _method_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    columns = (
        "temperature",
        "top_p",
        "method",
        "action",
        "block_efficiency",
        "tokens_per_second",
        "interval_95",
        "ratio_to_best_static",
        "ratio_interval_95",
        "replay_ratio",
        "replay_error",
        "tokens",
        "prompts",
    )
    return [{name: "" if entry[name] is None else entry[name] for name in columns} for entry in evaluation["methods"]]
