"""Stage `report`: one HTML page with the tables and plots of a run, also logged to MLflow."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from data_gen.sampling import Sampling
from pipelines.common.files import read_json
from pipelines.common.page import STYLE, image, note, table, text_of
from pipelines.common.stage import Stage, provenance, verify
from pipelines.common.tracking import mlflow_run
from pipelines.config import Config
from pipelines.data.realised import realised
from pipelines.data.traces import load_traces, settings_of, timed, traces_folder
from pipelines.evaluate import findings, losslessness
from pipelines.latency.profile import load_profile
from pipelines.report import plots
from pipelines.train.result import chosen_of, load_module, load_result
from selector.files import atomically
from selector.replay import Ratio
from selector.runtime import LatencyProfile
from selector.schema import read_manifest, sha256


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
    with mlflow_run(config, "report") as mlflow:
        stage.replace()
        with atomically(output) as partial:
            partial.write_text(page(config, evaluation, realised_rows), encoding="utf-8")
        mlflow.log_artifact(str(output))
        try:  # the training run has the parameters and the curves: the report belongs beside them too
            mlflow.MlflowClient().log_artifact(chosen_of(training)["run_id"], str(output))
        except mlflow.MlflowException:
            stage.say("warning: the training run is not in this MLflow store: the report is not logged beside it")
        for row in realised_rows:
            mlflow.log_metric(f"realised/z/{row['verifier']}", row["z"])
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
        *_trees(config, profile, training),
        (
            "Do the labels describe the decoder?",
            table(_rounded(realised_rows))
            + note(
                "Steps that were really decoded while data was written: tokens per step as the labels expect them and "
                "as they were; z is the difference over its standard deviation, and beyond 4 something would be wrong."
            ),
        ),
        ("Is greedy text unchanged?", f"<p>{html.escape(losslessness.summary(evaluation['greedy']))}.</p>"),
        *_machine(config, profile, training),
        ("Provenance", f"<pre>{html.escape(json.dumps(provenance(config), indent=1))}</pre>"),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections if content)
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Espalier: {config.name}</title>{STYLE}"
    lead = f"<p class='lead'>{html.escape(findings.headline(evaluation))}</p>"
    return f"{head}<h1>{html.escape(config.name)}</h1>{lead}{body}</html>"


def _found(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """The gain, all methods, and where the gain comes from."""
    disagreements = "".join(
        f"<p>Decoding and replay disagree: {html.escape(x)}.</p>" for x in evaluation["disagreements"]
    )
    return [
        (
            "Speed over the best fixed tree",
            image(plots.ratios(evaluation), "Speed of each method over the best fixed tree's, by sampling setting")
            + table(findings.details(evaluation))
            + note(
                "Decoded: real time on held-out prompts, 95% interval over source files. Replayed: expected time on "
                "held-out texts by this machine's latency profile, plus or minus one standard error over source files. "
                "Neither holds the noise of the machine's clock. The best fixed tree is that of the best verifier."
            ),
        ),
        (
            "All methods",
            table(_method_rows(evaluation))
            + note(
                "Tree: (K, L1, L2), K branches of L2 tokens behind a trunk of L1; empty where it differs from step to "
                "step. Tokens a step: block efficiency, accepted tokens and the one that the verifier adds."
            )
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
            image(plots.chosen_actions(evaluation), "Share of the decoding steps by tree and sampling setting"),
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
    yields = [image(plots.efficiency_by_tree(each), f"Tokens a step of all trees, {each.setting}") for each in train]
    predicted = [
        image(plots.calibration(module, each), f"Predicted against labelled tokens a step, {each.setting}")
        for each in validation
        if module.is_regressor
    ]
    return [
        (f"Tokens a step of every fixed tree ({verifier}, training texts replayed)", "".join(yields)),
        ("Predicted against labelled tokens a step", "".join(predicted)),
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
            table(selectors) + note("Speed over the best fixed tree of the same verifier, validation texts replayed."),
        ),
        (
            "Step times",
            f"<p>{html.escape(profile.device)}.{overlap}</p>"
            + table(steps)
            + note("Of trees that the latency profile was not fitted to."),
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
                "verifier": entry["verifier"],
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
