"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import json

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import realised, traces_folder
from pipelines.evaluate import losslessness, verdict
from pipelines.evaluate.verdict import Evaluation
from pipelines.latency.profile import load_profile
from pipelines.report import plots
from pipelines.report.page import write_page
from pipelines.run import Stage, console, provenance, require, verify
from pipelines.tracking import describe, mlflow_run, pipeline_of
from pipelines.train.result import decision_digest, load_result
from selector.schema import InputError, sha256

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train")


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'report.html'}"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError unless there is an evaluation of this selector."""
    verify(config, "evaluate")
    path, figures = Evaluation.files(config)
    if not path.exists():
        raise InputError(f"{path} does not exist: run the evaluate stage first")
    require(config, "evaluate", decision_digest(config, load_result(config)))
    artefact = config.folder / "selector" / "config.json"
    manifest = read_manifest(traces_folder(config))
    depends = {
        "evaluation": [sha256(path), sha256(figures)],
        "latency": sha256(config.folder / "latency.json"),
        "artefact": sha256(artefact) if artefact.exists() else None,
        "traces": {name: shard["sha256"] for name, shard in manifest["shards"].items()},
    }
    return Stage("report", config, depends, (config.folder / "report.html",))


def run(config: Config) -> None:
    stage = stage_of(config)
    (output,) = stage.outputs
    evaluation = Evaluation.read(config)
    if stage.begin():
        with mlflow_run(config, "report", SECTIONS) as mlflow:
            stage.replace()
            page(config, evaluation)
            mlflow.log_artifact(str(output))
            mlflow.log_artifact(str(output), run_id=pipeline_of(mlflow))
            describe(mlflow, "\n\n".join(verdict.verdicts(evaluation)))
        stage.finish()
    verdict.show_words(verdict.title(config, load_profile(config).device), evaluation)
    said, program = verdict.next_step(config, evaluation)
    for line in (f"All figures are in {output.resolve()}.", said):
        console.print(line, soft_wrap=True)
    if program:
        console.print(f"\n{program}", soft_wrap=True, markup=False)


def page(config: Config, evaluation: Evaluation) -> None:
    """Write the report."""
    said, program = verdict.next_step(config, evaluation)
    write_page(
        config.folder / "report.html",
        "run.j2",
        title=verdict.title(config, load_profile(config).device),
        lead=[*verdict.verdicts(evaluation), said],
        program=program,
        methods=verdict.methods(evaluation),
        note=verdict.NOTE,
        pictures=plots.ratios(evaluation),
        origins=verdict.origins(evaluation),
        strips=evaluation.found["strips"],
        labels=realised(config),
        greedy=losslessness.summary(evaluation.found["greedy"]),
        provenance=json.dumps(provenance(config), indent=1),
    )
