"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import html
import json

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import realised, traces_folder
from pipelines.evaluate import losslessness, verdict
from pipelines.evaluate.stage import FORMAT
from pipelines.evaluate.verdict import Evaluation
from pipelines.latency.profile import load_profile
from pipelines.report import plots
from pipelines.report.page import document, folded, images, legend, listed, note, strip, table
from pipelines.run import Stage, console, provenance, require, verify
from pipelines.tracking import describe, mlflow_run, pipeline_of
from pipelines.train.result import decision_digest, load_result
from selector.files import atomically
from selector.schema import InputError, sha256

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train")

METHODS = (
    "Speeds over plain decoding. A tree (K, L1, L2) has K branches of L2 tokens after a trunk of L1. The lookup rule "
    "copies some tokens where the last ones occurred before, and drafts a tree elsewhere. Tokens/step: accepted tokens "
    "and the one that the verifier adds, up to the limit of the text. Traversal at the root: only chains and trees "
    "without a trunk. Network: whatever is exported. Assisted generation and prompt lookup are those of transformers, "
    "the latter and the tuned one as they are the fastest on training prompts."
)
GAIN = "Filled marks were decoded, with 95% intervals. Open marks were replayed."
ORIGINS = (
    "Every step ends with one token that the target adds. The others were accepted: from the draft model's tree, or "
    "from a copy of what followed an earlier match. Speeds are decoded ones."
)
STRIPS = {
    "drafted": "by the draft model, and accepted",
    "copied": "by a lookup, and accepted",
    "target": "added by the target at the end of a step",
}
LABELS = (
    "The steps were decoded by the data stage. The table compares the tokens per step that the labels predict with "
    "those that decoding gave. z is the difference over its standard deviation. Beyond 4 it would show an error: that "
    "happens by chance once in 16,000 comparisons."
)


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'report.html'}"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError unless there is an evaluation of this selector."""
    verify(config, "evaluate")
    path, figures = Evaluation.files(config)
    if not path.exists():
        raise InputError(f"{path} does not exist: run the evaluate stage first")
    require(config, "evaluate", {"format": FORMAT, **decision_digest(config, load_result(config))})
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
            with atomically(output) as partial:
                partial.write_text(page(config, evaluation), encoding="utf-8")
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


def page(config: Config, evaluation: Evaluation) -> str:
    """The report as one self-contained page."""
    title = verdict.title(config, load_profile(config).device)
    methods = "".join(
        f"<h3>{html.escape(setting)}</h3>{table(rows)}" for setting, rows in verdict.methods(evaluation).items()
    )
    strips = "".join(strip(f"{each['setting']}, {each['kind']}", each) for each in evaluation.found["strips"])
    sections = [
        ("All methods", methods + note(f"{METHODS} {verdict.NOTE}")),
        ("Speed over the best static tree", images(plots.ratios(evaluation)) + note(GAIN)),
        ("What the selector's tokens came from", table(verdict.origins(evaluation)) + note(ORIGINS)),
        ("Decoded answers", legend(STRIPS) + strips),
        ("Do the labels describe the decoder?", table(realised(config)) + note(LABELS)),
        ("Is greedy text unchanged?", note(losslessness.summary(evaluation.found["greedy"]))),
        ("Provenance", folded("config, versions and commit", json.dumps(provenance(config), indent=1))),
    ]
    said, program = verdict.next_step(config, evaluation)
    lead = listed([*verdict.verdicts(evaluation), said]) + (f"<pre>{html.escape(program)}</pre>" if program else "")
    return document(title, lead, sections)
