"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.data.recorded import load_traces, realised, settings_of, timed, traces_folder
from pipelines.evaluate import findings, losslessness
from pipelines.evaluate.methods import AUTOREGRESSIVE
from pipelines.latency.profile import load_profile
from pipelines.report import plots
from pipelines.report.page import STYLE, folded, images, listed, note, table, text_of
from pipelines.report.strips import strip_section
from pipelines.run import Stage, provenance, read_json, verify
from pipelines.tracking import describe, mlflow_run
from pipelines.train.result import chosen_of, load_module, load_result
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import read_manifest, sha256
from selector.train.replay import Ratio

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train")

METHODS = (
    "Methods: autoregressive is plain decoding; static NAME drafts the fixed tree that is the fastest with that "
    "verifier on the training texts, best static the fastest of all, best static by kind one for each kind of prompts; "
    "static, branching is held to trees with branches, static traversal at the root to chains and trees without a "
    "trunk; recent acceptance is a rule of thumb that drafts by how much of the last trees was accepted; assisted "
    "generation is transformers' own, as it comes and with its best constant number of drafted tokens."
)


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'report.html'}"]


def run(config: Config) -> None:
    output = config.folder / "report.html"
    verify(config, "evaluate")
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
    with mlflow_run(config, "report", SECTIONS) as mlflow:
        stage.replace()
        with atomically(output) as partial:
            partial.write_text(page(config, evaluation, realised_rows), encoding="utf-8")
        mlflow.log_artifact(str(output))
        try:  # the training run has the parameters and the curves: the report belongs beside them too
            mlflow.MlflowClient().log_artifact(chosen_of(training)["run_id"], str(output))
        except mlflow.MlflowException:
            stage.say("warning: the training run is not in this MLflow store: the report is not logged beside it")
        describe(mlflow, findings.headline(evaluation))
    stage.finish()
    _say_where(stage, output, artefact)


def _say_where(stage: Stage, output: Path, artefact: Path) -> None:
    stage.say(f"{output.resolve()}")
    if artefact.exists():
        stage.say(f"exported selector in {artefact.parent.resolve()}")


def page(config: Config, evaluation: dict[str, Any], realised_rows: list[dict[str, Any]]) -> str:
    """The report as one self-contained page: what was found, then what it was found by."""
    profile = load_profile(config)
    training = load_result(config)
    sections = [
        *_found(evaluation),
        strip_section(evaluation["strips"]),
        *_trees(config, profile, training),
        (
            "Do the labels describe the decoder?",
            table(_rounded(realised_rows))
            + note(
                "Steps that were really decoded while data was written: tokens a step as the labels expect them and "
                "as they were; z is the difference over its standard deviation, and beyond 4 something would be wrong."
            ),
        ),
        ("Is greedy text unchanged?", f"<p>{html.escape(losslessness.summary(evaluation['greedy']))}.</p>"),
        *_machine(config, profile, training),
        ("Provenance", folded("config, versions and commit", json.dumps(provenance(config), indent=1))),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections if content)
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Espalier: {config.name}</title>{STYLE}"
    lead = f"<p class='lead'>{html.escape(findings.headline(evaluation))}</p>"
    return f"{head}<h1>{html.escape(config.name)}</h1>{lead}{body}</html>"


def _found(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """The gain, all methods, and where the gain comes from."""
    apart = evaluation["disagreements"]
    disagreements = (
        f"<p>Decoding and replay along the same texts disagree by more than their errors:</p>{listed(apart)}"
        if apart
        else ""
    )
    return [
        (
            "Speed over the best fixed tree",
            images(plots.ratios(evaluation))
            + table(findings.details(evaluation))
            + note(
                "Decoded (filled): real time on held-out prompts, with 95% intervals over source files. Replayed "
                "(open): expected time on held-out texts by this machine's latency profile, ± one standard error over "
                "source files. At decoded times: replayed with the times that steps took in decoding, along the same "
                "texts, in place of the profile's. The first two do not hold the noise of the machine's clock. The "
                "best fixed tree is the fastest one of all verifiers. Trees are (K, L1, L2): K branches of L2 tokens "
                "behind a trunk of L1."
            ),
        ),
        (
            "All methods",
            table(_method_rows(evaluation))
            + note(
                "Tree: (K, L1, L2), K branches of L2 tokens behind a trunk of L1; empty where it differs from step to "
                "step. Tokens a step: block efficiency, accepted tokens and the one that the verifier adds."
            )
            + note(METHODS)
            + disagreements,
        ),
        (
            "Texts with and without long repeats",
            table(
                [
                    {
                        "setting": str(Sampling(row["temperature"], row["top_p"])),
                        "texts": f"{row['count']} {row['texts']}",
                        "selector over the best fixed tree": str(Ratio(row["ratio"], row["error"])),
                        "seconds saved": row["seconds_saved"],
                    }
                    for row in evaluation["repeats"]
                ]
            )
            + note("Replayed. A text has long repeats where a quarter of its positions lie inside one of 8 tokens."),
        ),
        (
            "Which trees the selector drafts",
            images({"Share of the decoding steps by tree and sampling setting": plots.chosen_actions(evaluation)}),
        ),
    ]


def _trees(config: Config, profile: LatencyProfile, training: dict[str, Any]) -> list[tuple[str, str]]:
    """What trees yield, and how well that is predicted."""
    module = load_module(config, training["chosen"], training)
    splits, verifier = load_traces(config, profile.pair), config.train.verifier
    train, validation = (
        [timed(splits[split], setting, verifier, profile) for setting in settings_of(config)]
        for split in ("train", "validation")
    )
    yields = {
        f"Tokens a step of all trees, {Sampling(*each.setting)}": plots.efficiency_by_tree(each) for each in train
    }
    predicted = {
        f"Predicted against labelled tokens a step, {Sampling(*each.setting)}": plots.calibration(module, each)
        for each in validation
        if module.is_regressor
    }
    groups = note(
        f"Of the tree {plots.EXAMPLE}, validation texts: their places in ten groups by prediction, a point for the "
        "means of each. On the dashed line predictions are right."
    )
    return [
        (f"Tokens a step of every fixed tree ({verifier}, training texts replayed)", images(yields)),
        ("Predicted against labelled tokens a step", images(predicted) + groups if predicted else ""),
    ]


def _machine(config: Config, profile: LatencyProfile, training: dict[str, Any]) -> list[tuple[str, str]]:
    """Training, the pair, and this machine's times."""
    check = read_json(config.folder / "latency.json", "latency")["check"]
    steps = [
        {
            "tree": row["action"],
            "predicted, ms": 1e3 * row["predicted"],
            "measured, ms": 1e3 * row["measured"],
            "ratio": row["ratio"],
        }
        for row in check
    ]
    manifest = config.folder / "pair" / "manifest.json"
    pair = json.loads(manifest.read_text()) if manifest.exists() else {}
    selectors = [
        {
            "selector": f"{name} (kept)" if name == training["chosen"] else name,
            **{
                str(Sampling(mode["temperature"], mode["top_p"])): str(Ratio(**mode["replay"])) for mode in own["modes"]
            },
        }
        for name, own in training["selectors"].items()
    ]
    overlap = f" The pair's mean overlap on held-out text is {pair['overlap']:.3f}." if pair else ""
    return [
        (
            "Selectors that were trained",
            table(selectors)
            + note(
                "Speed over the best fixed tree of the same verifier if the selector decided everywhere, validation "
                "texts replayed, ± one standard error. Where it is not ahead by two, the fixed tree is kept."
            ),
        ),
        (
            "Step times",
            f"<p>{html.escape(profile.device)}.{overlap}</p>"
            + table(steps)
            + note(
                "Real decoding steps of trees (K, L1, L2) that the latency profile was not fitted to; ratio: predicted "
                "over measured."
            ),
        ),
    ]


def _method_rows(evaluation: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for entry in evaluation["methods"]:
        low, high = entry["interval_95"]
        ratio_low, ratio_high = entry["ratio_interval_95"]
        replayed = "" if entry["replay_ratio"] is None else str(Ratio(entry["replay_ratio"], entry["replay_error"]))
        rows.append(
            {
                "setting": str(Sampling(entry["temperature"], entry["top_p"])),
                "method": entry["method"],
                "verifier": "" if entry["method"] == AUTOREGRESSIVE else entry["verifier"],
                "tree": str(tuple(entry["action"])) if entry["action"] else "",
                "tokens a step": f"{entry['block_efficiency']:.2f}",
                "tokens/s [95%]": f"{entry['tokens_per_second']:.0f} [{low:.0f}, {high:.0f}]",
                "over the best fixed tree [95%]": (
                    f"{entry['ratio_to_best_static']:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]"
                ),
                "replayed": replayed,
            }
        )
    return rows


def _rounded(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{key.replace("_", " "): text_of(value) for key, value in row.items()} for row in rows]
