"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import realised, traces_folder
from pipelines.evaluate import verdict
from pipelines.evaluate.gains import MOST_KINDS
from pipelines.evaluate.methods import BEST_STATIC, SELECTOR, greedy_summary
from pipelines.evaluate.table import ALL, DECODED, Figure
from pipelines.evaluate.verdict import Evaluation
from pipelines.latency.stage import profile_path
from pipelines.pair.source import source_of
from pipelines.run import Stage, provenance, require, templates_beside, verify
from pipelines.terminal import console
from pipelines.tracking import describe, mlflow_run
from pipelines.train.result import known_digest
from selector.files import atomically
from selector.schema import InputError, sha256

TEMPLATES = templates_beside(__file__, autoescape=True)
TEMPLATES.filters["cell"] = lambda value: f"{value:z.3f}" if isinstance(value, float) else value


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'report.html'}"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError unless there is an evaluation of this
    selector."""
    verify(config, "evaluate")
    path, table_path = Evaluation.files(config)
    if not path.exists():
        raise InputError(f"{path} does not exist: run the evaluate stage first")
    require(config, "evaluate", known_digest(config))
    manifest = read_manifest(traces_folder(config))
    depends = {
        "evaluation": [sha256(path), sha256(table_path)],
        "latency": _hash_if_there(profile_path(config)),
        "artefact": _hash_if_there(config.folder / "selector" / "config.json"),
        "traces": {name: shard["sha256"] for name, shard in manifest["shards"].items()},
    }
    return Stage("report", config, depends, (config.folder / "report.html",))


def _hash_if_there(path: Path) -> str | None:
    return sha256(path) if path.exists() else None


def run(config: Config) -> None:
    stage = stage_of(config)
    evaluation = Evaluation.read(config)
    if stage.begin():
        with mlflow_run(config, "report") as mlflow:
            stage.replace()
            page(config, evaluation)
            mlflow.log_artifact(str(stage.outputs[0]))
            describe(mlflow, "\n\n".join(verdict.verdicts(evaluation)))
        stage.finish()
    verdict.show_words(verdict.title(config, evaluation), evaluation)
    advice, program = verdict.next_step(config, evaluation)
    for line in (f"All figures are in {stage.outputs[0].resolve()}.", advice):
        console.print(line, soft_wrap=True)
    if program:
        console.print(f"\n{program}", soft_wrap=True, markup=False)


def page(config: Config, evaluation: Evaluation) -> None:
    advice, program = verdict.next_step(config, evaluation)
    values: dict[str, Any] = {
        "most_kinds": MOST_KINDS,
        "title": verdict.title(config, evaluation),
        "lead": [*verdict.verdicts(evaluation), advice],
        "methods": verdict.methods(evaluation),
        "provenance": json.dumps(provenance(config), indent=1),
    }
    if source_of(config).decodes:
        values |= {
            "program": program,
            "note": verdict.NOTE,
            "labels": realised(config),
            "pictures": ratios(evaluation),
            "origins": verdict.origins(evaluation),
            "greedy": greedy_summary(evaluation.contents["greedy"]),
        }
    template = TEMPLATES.get_template("run.j2" if source_of(config).decodes else "logs.j2")
    with atomically(config.folder / "report.html") as partial_path:
        partial_path.write_text(template.render(values), encoding="utf-8")


def ratios(evaluation: Evaluation) -> dict[str, str]:
    """For each sampling setting a plot (base64 PNG) by its description: every method's speed over
    the best tree."""
    pictures = {}
    for sampling_name, _ in evaluation.settings:
        columns = {"setting": sampling_name, "kind": ALL, "rival": BEST_STATIC}
        speeds = evaluation.table.select(**columns, basis=DECODED)
        # the fastest below, and the selector on top
        speeds.sort(key=lambda speed: (speed.method == SELECTOR, -speed.value))
        replays = {}
        for speed in speeds:
            replays[speed.method] = evaluation.table.get(**columns, method=speed.method)
        replayed = replays[SELECTOR]
        words = f"Speed of every method over the best static tree's at {sampling_name}. "
        words += f"The selector's: decoded {speeds[-1].text()}, "
        words += f"replayed {replayed.text() if replayed else 'not'}."
        png = _png(sampling_name, speeds, replays)
        pictures[words] = base64.b64encode(png).decode()
    return pictures


def _png(sampling_name: str, speeds: list[Figure], replays: dict[str, Figure | None]) -> bytes:
    """A plot of decoded speeds with their intervals, the first one below, and of replayed ones as
    white diamonds."""
    picture = Picture(figsize=(6, 0.32 * len(speeds) + 1))
    axis = picture.subplots()
    axis.axvline(1, color="#888", linewidth=1)
    for y, speed in enumerate(speeds):
        colour = "tab:orange" if speed.method == SELECTOR else "tab:blue"
        axis.plot(speed.value, y, "o", color=colour, markersize=5)
        if speed.low is not None and speed.high is not None:
            axis.plot([speed.low, speed.high], [y, y], "|-", color=colour)
        replay = replays[speed.method]
        if replay is not None:
            axis.plot(replay.value, y, "D", color=colour, markerfacecolor="white", markersize=5)
    axis.set(title=sampling_name, xlabel="speed over the best static tree")
    axis.set(yticks=range(len(speeds)), yticklabels=[speed.method for speed in speeds])
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return buffer.getvalue()
