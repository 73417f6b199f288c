"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from pipelines import losslessness, plots
from pipelines.config import Config
from pipelines.data import realised
from pipelines.latency import load_profile
from pipelines.stage import Stage, mlflow_run, provenance, read_json
from pipelines.traces import load_traces, settings_of, timed, traces_folder
from pipelines.train import chosen_of, load_module, load_result
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
        partial = output.with_name("report.html.tmp")
        partial.write_text(page(config, evaluation, realised_rows), encoding="utf-8")
        partial.replace(output)
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
        ("Summary", _table(_summary_rows(evaluation["summary"])) + _table(evaluation["summary"]["by_setting"])),
        (
            "Held-out prompts decoded, held-out texts replayed",
            _image(plots.throughput(evaluation))
            + _table(_method_rows(evaluation))
            + "".join(f"<p>Decoding and replay disagree: {html.escape(x)}.</p>" for x in evaluation["disagreements"]),
        ),
        ("Texts with and without long repeats", _table(evaluation["repeats"])),
        (
            f"Block efficiency by tree ({verifier}, training texts replayed)",
            "".join(_image(plots.efficiency_by_tree(each)) for each in train),
        ),
        (
            "Labels against decoding",
            "<p>Decoding steps of the data stage: accepted lengths, and what the labels say of the same steps; |z| "
            "above 4 would mean that the labels do not describe the decoder.</p>" + _table(realised_rows),
        ),
        (
            "Predicted against labelled block efficiency",
            "".join(_image(plots.calibration(module, each)) for each in validation) if module.is_regressor else "",
        ),
        ("Greedy decoding", f"<p>{html.escape(losslessness.summary(evaluation['greedy']))}.</p>"),
        ("How often each action is chosen", _image(plots.chosen_actions(evaluation))),
        (
            "Training",
            _table([{"selector": name, **found["metrics"]} for name, found in training["selectors"].items()])
            + f"<p>Kept: {html.escape(training['chosen'])}.</p>",
        ),
        (
            "Step times",
            f"<p>{html.escape(profile.device)}. Mean overlap of the pair: {pair.get('overlap', 'not measured')}.</p>"
            + _table(check),
        ),
        ("Provenance", f"<pre>{html.escape(json.dumps(provenance(config), indent=1))}</pre>"),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections)
    head = f"<!doctype html><meta charset='utf-8'><title>Espalier: {config.name}</title>{_STYLE}"
    return f"{head}<h1>{config.name}</h1>{body}"


_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2rem .7rem; text-align: right }
th { border-bottom: 2px solid #888 } tr:nth-child(even) { background: #f4f4f4 }
td:first-child, th:first-child { text-align: left }
img { max-width: 100% } pre { font-size: 12px; background: #f4f4f4; padding: 1rem; overflow: auto }
</style>"""


def _image(png: str) -> str:
    return f"<p><img alt='' src='data:image/png;base64,{png}'></p>"


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as an HTML table."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(_cell(item) for item in value) + "]"
    return str(value)


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
