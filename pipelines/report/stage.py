"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import html
import json
from typing import Any

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import load_traces, realised, traces_folder
from pipelines.evaluate import findings, losslessness, verdict
from pipelines.evaluate.methods import BEST_STATIC, COPYING, SELECTOR
from pipelines.evaluate.stage import FORMAT
from pipelines.evaluate.table import setting_name
from pipelines.evaluate.verdict import Evaluation
from pipelines.latency.profile import load_profile
from pipelines.report import plots
from pipelines.report.page import document, folded, images, legend, listed, note, paragraphs, program, strip, table
from pipelines.run import Stage, console, provenance, read_json, require, verify
from pipelines.tracking import describe, mlflow_run, pipeline_of
from pipelines.train.judging import by_setting
from pipelines.train.result import decision_digest, load_module, load_result
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import InputError, sha256
from selector.train.replay import Ratio

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train")
MATTER = (SELECTOR, COPYING, BEST_STATIC)  # the methods that a narrow screen shows first
Sections = list[tuple[str, str]]  # titles, and contents in HTML

CHOICES = (
    "Speed over plain decoding. Decoded: the time was measured on held-out prompts, every prompt with all methods in "
    "turn, and compared prompt by prompt and round by round (geometric means); brackets hold 95% intervals over source "
    "files. Replayed: the time is computed for held-out texts from this machine's latency profile, ± one "
    "standard error over source files. Neither includes the noise of the time measurement, the training seed or the "
    "choice of the pair. Training chose on other texts between the static tree, the lookup rule, which copies where "
    "the text repeats itself and drafts a tree elsewhere, and the network. The share of copying is what the lookup "
    "rule adds to the static tree's speed, relative to what the exported choice adds to that of plain decoding."
)
GAIN = (
    "Filled marks were decoded, with 95% intervals. Open marks were replayed. The best static tree is the fastest one "
    "of all verifiers on the training texts."
)
METHODS = (
    "Decoded and replayed are speeds over plain decoding. A tree (K, L1, L2) has K branches of L2 tokens after a trunk "
    "of L1; the cell is empty where drafts differ between steps. Tokens/step are the block efficiency: accepted tokens "
    "and the one that the verifier adds, up to the limit of the text. Static tree, NAME: the tree that is the fastest "
    "with that verifier on the training texts. Best static tree: the fastest of these. Traversal at the root: only "
    "chains and trees without a trunk. Assisted generation and prompt lookup are those of transformers. Tuned means "
    "the best number of drafted tokens; that and the longest match of prompt lookup are the fastest on training "
    "prompts."
)
ORIGINS_NOTE = (
    "Every step ends with one token that the target adds. The others were accepted: from the draft model's tree, or "
    "from a copy of what followed an earlier match. Speeds are decoded ones, with 95% intervals over source files, "
    "where there are several."
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
CALIBRATION = (
    f"Roots of the validation texts are in ten groups by the prediction for the tree {plots.EXAMPLE}; each point shows "
    "the means of one group. On the dashed line predictions are exact."
)
SELECTORS = (
    "Speed over the best static tree of the same verifier if the network decided everywhere, replayed on validation "
    "texts, ± one standard error over source files. Where it is not two of them ahead, the static tree is kept."
)
STEPS = (
    "These trees were decoded, and the latency profile was not fitted to them. The ratio is predicted over measured."
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
    evaluation, training = Evaluation.read(config), load_result(config)
    if stage.begin():
        with mlflow_run(config, "report", SECTIONS) as mlflow:
            stage.replace()
            with atomically(output) as partial:
                partial.write_text(page(config, evaluation, training), encoding="utf-8")
            mlflow.log_artifact(str(output))
            mlflow.log_artifact(str(output), run_id=pipeline_of(mlflow))
            describe(mlflow, "\n\n".join(verdict.verdicts(evaluation)))
        stage.finish()
    verdict.show(verdict.title(config, load_profile(config).device), evaluation)
    lines, snippet = verdict.next_steps(config, evaluation)
    for line in (f"All figures are in {output.resolve()}.", *lines):
        console.print(line, soft_wrap=True)
    if snippet:
        console.print(f"\n{snippet}", soft_wrap=True, markup=False)


def page(config: Config, evaluation: Evaluation, training: dict[str, Any]) -> str:
    """The report as one self-contained page."""
    profile = load_profile(config)
    sections = [
        *_found(evaluation),
        *_trees(config, profile, training),
        ("Do the labels describe the decoder?", table(realised(config)) + note(LABELS)),
        ("Is greedy text unchanged?", f"<p>{html.escape(losslessness.summary(evaluation.found['greedy']))}.</p>"),
        *_machine(config, profile, training),
        ("Provenance", folded("config, versions and commit", json.dumps(provenance(config), indent=1))),
    ]
    lines, snippet = verdict.next_steps(config, evaluation)
    lead = listed(verdict.verdicts(evaluation), "verdict") + paragraphs(lines) + program(snippet)
    return document(verdict.title(config, profile.device), lead, sections)


def _found(evaluation: Evaluation) -> Sections:
    exported = table(verdict.choices(evaluation)) + note(CHOICES) + listed(verdict.decisions(evaluation))
    methods = ""
    for setting, rows in findings.methods(evaluation).items():
        matter = [row["method"] for row in rows if row["method"].partition(" (")[0] in MATTER]
        methods += f"<h3>{html.escape(setting)}</h3>{table(rows, matter)}"
    methods += note(METHODS)
    actions = {"Share of the decoding steps by tree and sampling setting": plots.chosen_actions(evaluation)}
    came_from = table(findings.origins(evaluation)) + note(ORIGINS_NOTE)
    strips = "".join(
        strip(f"{setting_name(each['temperature'], each['top_p'])}, {each['kind']}", each)
        for each in evaluation.found["strips"]
    )
    return [
        ("Speed over plain decoding", exported),
        ("All methods", methods),
        ("Speed over the best static tree", images(plots.ratios(evaluation)) + note(GAIN)),
        ("Which trees the selector drafts", images(actions)),
        ("What the selector's tokens came from", came_from),
        ("Decoded answers", legend(STRIPS) + strips),
    ]


def _trees(config: Config, profile: LatencyProfile, training: dict[str, Any]) -> Sections:
    module = load_module(config, training["chosen"], training)
    splits, verifier = load_traces(config, profile.pair), config.train.verifier
    train, validation = (by_setting(config, splits[split], profile) for split in ("train", "validation"))
    yields = {f"Tokens a step of all trees, {own.sampling}": plots.efficiency_by_tree(own) for own in train}
    predicted = {
        f"Predicted against labelled tokens a step, {each.sampling}": plots.calibration(module, each)
        for each in validation
        if module.is_regressor
    }
    return [
        (f"Tokens a step of every static tree ({verifier}, training texts replayed)", images(yields)),
        ("Predicted against labelled tokens a step", images(predicted) + note(CALIBRATION) if predicted else ""),
    ]


def _machine(config: Config, profile: LatencyProfile, training: dict[str, Any]) -> Sections:
    steps = [
        {
            "tree": row["action"],
            "predicted, ms": 1e3 * row["predicted"],
            "measured, ms": 1e3 * row["measured"],
            "ratio": row["ratio"],
        }
        for row in read_json(config.folder / "latency.json", "latency")["check"]
    ]
    selectors = [
        {
            "selector": f"{name} (kept)" if name == training["chosen"] else name,
            **{setting_name(mode["temperature"], mode["top_p"]): str(Ratio(**mode["replay"])) for mode in own["modes"]},
        }
        for name, own in training["selectors"].items()
    ]
    return [
        ("Selectors that were trained", table(selectors) + note(SELECTORS)),
        ("Step times", f"<p>{html.escape(profile.device)}.</p>" + table(steps) + note(STEPS)),
    ]
