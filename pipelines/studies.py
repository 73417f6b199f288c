"""Stage `studies`: variants of the run's selector, trained on its traces and compared on the validation split.

Only the network of a variant is trained elsewhere or shown less. The static tree, which is the rival, and g are tuned
on all training roots of the place where it is judged, so that all variants there have the same rival. Training stops by
the validation roots of where it trains: what is judged on them looks a little too good, for all variants alike.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines import studies_results
from pipelines.config import Config
from pipelines.fitting import Fitted, fit
from pipelines.journal import Journal
from pipelines.latency import load_profile
from pipelines.stage import Stage, console, mlflow_run, read_json, write_json
from pipelines.train import inputs
from pipelines.variants import ALL, Grounds, Variant, candidates, variants
from selector.schema import InputError


def plan(config: Config) -> list[str]:
    return [
        "the full regressor, judged everywhere",
        f"variants: {', '.join(key for key, value in config.studies.model_dump().items() if value)}",
        f"at most {config.train.epochs} epochs each",
    ]


def run(config: Config) -> None:
    output = config.folder / "studies.json"
    profile = load_profile(config)
    grounds = Grounds(config, profile)
    depends = {**inputs(config, profile), "studies": config.studies.model_dump(mode="json")}
    stage = Stage("studies", config, depends, (output,))
    if not stage.begin():
        studies_results.show(read_json(output, "studies"))
        return
    asked = candidates(config)
    places = [place for place in asked if grounds.usable(place)]
    if len(places) < len(asked):
        stage.say(f"left out, too few roots: {', '.join(place.name for place in asked if place not in places)}")
    if ALL not in places:
        raise InputError(f"{config.folder / 'traces'}: too few validation prompts to compare: raise data.roots")
    todo = variants(config, places)
    with mlflow_run(config, "studies") as mlflow:
        journal = Journal(config.folder / "studies.partial.jsonl", depends)
        finished = _adopted(journal, mlflow)
        for number, variant in enumerate(todo, 1):
            if variant.name not in finished:
                console.print(f"studies: {variant.name} ({number} of {len(todo)})")
                journal.add(_study(config, grounds, variant, mlflow))
        results = studies_results.results(journal.entries)
        stage.replace()
        write_json(output, results)
        mlflow.log_artifact(str(output))
    studies_results.show(results)
    stage.finish()
    journal.path.unlink()


def _adopted(journal: Journal, mlflow: Any) -> set[str]:
    """Names of the variants that an interrupted stage had finished; their runs become children of this one."""
    client, parent = mlflow.MlflowClient(), mlflow.active_run().info.run_id
    for entry in journal.entries:
        with suppress(mlflow.MlflowException):  # they may stand in another store
            client.set_tag(entry["run_id"], "mlflow.parentRunId", parent)
    return {entry["variant"] for entry in journal.entries}


def _study(config: Config, grounds: Grounds, variant: Variant, mlflow: Any) -> dict[str, Any]:
    """Train and judge one variant in a child run; its entry in the journal."""
    with (
        mlflow.start_run(run_name=f"studies-{variant.name}", nested=True) as nested,
        tempfile.TemporaryDirectory() as temporary,
    ):
        mlflow.log_params(
            {
                "group": variant.group,
                "objective": variant.objective,
                "trained": f"{'not ' if variant.elsewhere else ''}{variant.trained.name}",
                "share": variant.share,
                "half": variant.half,
                **variant.train.model_dump(mode="json"),
            }
        )
        fitted = _train(config, grounds, variant, Path(temporary), nested.info.run_id)
        entry = {
            "group": variant.group,
            "variant": variant.name,
            "run_id": nested.info.run_id,
            "metrics": fitted.metrics,
            "places": {
                place.name: studies_results.judged(fitted.module, grounds.at(place)) for place in variant.places
            },
        }
        if variant.group == "full":
            entry["calibration"] = studies_results.calibrations(fitted.module, grounds.own)
        mlflow.log_metrics(studies_results.flat_metrics(entry))
    return entry


def _train(config: Config, grounds: Grounds, variant: Variant, folder: Path, run_id: str) -> Fitted:
    """All variants weigh labels by the errors of the whole training split, so that their losses compare."""
    own = config.model_copy(update={"train": variant.train})
    traces = grounds.for_training(variant)
    return fit(own, variant.objective, traces, folder, run_id, variant.left_out, grounds.own.train)
