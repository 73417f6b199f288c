"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

from matplotlib.figure import Figure

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import realised, traces_folder
from pipelines.evaluate import verdict
from pipelines.evaluate.methods import BEST_STATIC, SELECTOR, greedy_summary
from pipelines.evaluate.table import decoded, replayed
from pipelines.evaluate.verdict import Evaluation
from pipelines.latency.stage import profile_path
from pipelines.run import Stage, console, provenance, require, templates_beside, verify
from pipelines.tracking import describe, mlflow_run, pipeline_of
from pipelines.train.result import known_digest
from selector.files import atomically
from selector.schema import InputError, sha256

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train")
TEMPLATES = templates_beside(__file__, autoescape=True)
TEMPLATES.filters["cell"] = lambda value: f"{value:z.3f}" if isinstance(value, float) else value


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'report.html'}"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError unless there is an evaluation of this
    selector."""
    verify(config, "evaluate")
    path, figures = Evaluation.files(config)
    if not path.exists():
        raise InputError(f"{path} does not exist: run the evaluate stage first")
    require(config, "evaluate", known_digest(config))
    artefact = config.folder / "selector" / "config.json"
    manifest = read_manifest(traces_folder(config))
    depends = {
        "evaluation": [sha256(path), sha256(figures)],
        "latency": sha256(profile_path(config)) if profile_path(config).exists() else None,
        "artefact": sha256(artefact) if artefact.exists() else None,
        "traces": {name: shard["sha256"] for name, shard in manifest["shards"].items()},
    }
    return Stage("report", config, depends, (config.folder / "report.html",))


def run(config: Config) -> None:
    stage = stage_of(config)
    evaluation = Evaluation.read(config)
    if stage.begin():
        with mlflow_run(config, "report", SECTIONS) as mlflow:
            stage.replace()
            page(config, evaluation)
            for run_id in (None, pipeline_of(mlflow)):
                mlflow.log_artifact(str(stage.outputs[0]), run_id=run_id)
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
        "title": verdict.title(config, evaluation),
        "lead": [*verdict.verdicts(evaluation), advice],
        "methods": verdict.methods(evaluation),
        "provenance": json.dumps(provenance(config), indent=1),
    }
    if not config.logs.files:
        values |= {"program": program, "note": verdict.NOTE, "labels": realised(config)}
        values |= {"pictures": ratios(evaluation), "origins": verdict.origins(evaluation)}
        values["greedy"] = greedy_summary(evaluation.found["greedy"])
    template = TEMPLATES.get_template("logs.j2" if config.logs.files else "run.j2")
    with atomically(config.folder / "report.html") as partial_path:
        partial_path.write_text(template.render(values), encoding="utf-8")


def ratios(evaluation: Evaluation) -> dict[str, str]:
    """For each sampling setting a plot (base64 PNG) by its description: every method's speed over
    the best tree."""
    table, pictures = evaluation.table, {}
    for setting, _ in evaluation.settings:
        speeds = [
            table.of(setting, name, decoded(BEST_STATIC))
            for name in table.methods(setting, decoded(BEST_STATIC))
        ]
        speeds.sort(key=lambda speed: speed.method == SELECTOR)  # the selector on top
        replays = {
            speed.method: table.get(setting, speed.method, replayed(BEST_STATIC))
            for speed in speeds
        }
        words = f"Speed of every method over the best static tree's at {setting}. "
        words += f"The selector's: decoded {speeds[-1]}, replayed {replays[SELECTOR]}."
        right = 1.5 * max(
            speed.value for speed in (*speeds, *replays.values()) if speed is not None
        )
        figure, buffer = Figure(figsize=(6, 0.32 * len(speeds) + 1)), io.BytesIO()
        axis = figure.subplots()
        axis.axvline(1, color="#888", linewidth=1)
        for y, speed in enumerate(speeds):
            colour = "tab:orange" if speed.method == SELECTOR else "tab:blue"
            low, high = speed.low or 0.0, min(speed.high or 2 * right, 2 * right)
            spread = [[speed.value - low], [high - speed.value]]
            axis.errorbar(
                speed.value, y, xerr=spread, fmt="o", color=colour, capsize=3, markersize=5
            )
            if (replay := replays[speed.method]) is not None:
                axis.plot(replay.value, y, "D", color=colour, markerfacecolor="white", markersize=5)
        axis.set(title=setting, xlabel="speed over the best static tree", xlim=(0, right))
        axis.set(yticks=range(len(speeds)), yticklabels=[speed.method for speed in speeds])
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        pictures[words] = base64.b64encode(buffer.getvalue()).decode()
    return pictures
