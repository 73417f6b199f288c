"""The figures of the `studies` stage, from judged variants to `studies.json` and its tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

from pipelines.stage import console
from pipelines.variants import ALL
from selector.calibration import calibration, expected_error
from selector.data import TracesModule, met_in_decoding
from selector.modes import Judged, jackknife_error, judge
from selector.module import SelectorModule

WAYS = {"at_root": (True, False), "on_trunk": (False, True)}
LOSSES = ("loss_at_root", "loss_on_trunk")
NORMAL_95 = 1.96

Entry = dict[str, Any]


@torch.no_grad()
def judged(module: SelectorModule, traces: TracesModule) -> dict[str, Any]:
    """A trained variant on the validation split: losses in weighted squared tokens, null for a policy; and, by way to
    decide, the mean ratio over sampling settings to the best static tree, with all prompts and without each."""
    settings = judge(module, traces)
    predicts = module.predicts_efficiency
    result: dict[str, Any] = {
        "loss_at_root": float(module.root_loss(traces.validation)) if predicts else None,
        "loss_on_trunk": float(module.trunk_loss(traces.validation)) if predicts else None,
    }
    for name, way in WAYS.items():
        mine = [j for ways in settings for j in ways if (j.mode.at_root, j.mode.on_trunk) == way]
        result[name] = over_settings(mine) if mine else None
    return result


def over_settings(judged: list[Judged]) -> dict[str, Any]:
    """The mean ratio, and the same `without` each prompt in turn, whichever settings it was met under."""
    ratio = _mean([j.ratio for j in judged])
    prompts = sorted({prompt for j in judged for prompt in j.without})
    without = {str(prompt): _mean([j.without.get(prompt, j.ratio) for j in judged]) for prompt in prompts}
    return {"ratio": ratio, "without": without}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@torch.no_grad()
def calibrations(module: SelectorModule, traces: TracesModule) -> dict[str, Any]:
    """Predicted against labelled block efficiency of each setting's static tree, and of the chosen action."""
    roots = met_in_decoding(traces.validation)
    predicted_BA = module.outputs(roots)
    result = {}
    for name, action_B in (("static", roots.base_B), ("chosen", module.choices(roots))):
        index_B1 = action_B.unsqueeze(-1)
        predicted_B, labelled_B = predicted_BA.gather(-1, index_B1)[:, 0], roots.mean_BA.gather(-1, index_B1)[:, 0]
        groups = calibration(predicted_B, labelled_B, roots.prompt_B)
        result[name] = {"groups": [asdict(g) for g in groups], "expected_error": expected_error(groups)}
    return result


def results(entries: list[Entry]) -> dict[str, Any]:
    """The content of `studies.json`: `variants`, one row for each place where one was judged, with 95% intervals over
    prompts of its ratios and of their differences to the full regressor's on the same prompts; and `calibration`."""
    full = next(entry for entry in entries if entry["group"] == "full")
    rows = []
    for entry in entries:
        for place, figures in entry["places"].items():
            row = {"group": entry["group"], "variant": entry["variant"], "judged_on": place, "run_id": entry["run_id"]}
            row |= {loss: figures[loss] for loss in LOSSES}
            rows.append(row | {way: _compared(figures[way], full["places"][place][way]) for way in WAYS})
    return {"variants": rows, "calibration": full["calibration"]}


def _compared(mine: dict[str, Any] | None, full: dict[str, Any]) -> dict[str, Any] | None:
    if mine is None:
        return None
    differences = {prompt: value - full["without"][prompt] for prompt, value in mine["without"].items()}
    difference = mine["ratio"] - full["ratio"]
    return {
        "ratio": mine["ratio"],
        "interval_95": interval(mine["ratio"], mine["without"]),
        "difference": difference,
        "difference_interval_95": interval(difference, differences),
    }


def interval(value: float, without: Mapping[str, float]) -> list[float]:
    """95%, by leaving out one prompt after the other."""
    error = NORMAL_95 * jackknife_error(value, without)
    return [value - error, value + error]


def flat_metrics(entry: Entry) -> dict[str, float]:
    """What a variant's MLflow run holds: losses and ratios by place, and the metrics at its best epoch."""
    flat = dict(entry["metrics"])
    for place, figures in entry["places"].items():
        at = re.sub(r"[^\w\-. :/]", "_", place)  # what MLflow allows in a name
        flat |= {f"{at}/{loss}": figures[loss] for loss in LOSSES if figures[loss] is not None}
        flat |= {f"{at}/{way}_ratio": figures[way]["ratio"] for way in WAYS if figures[way] is not None}
    return {name: value for name, value in flat.items() if math.isfinite(value)}


def show(results: dict[str, Any]) -> None:
    """The tables on the terminal."""
    console.print(variants_table(results["variants"]))
    for name, title in (("static", "the setting's static tree"), ("chosen", "the chosen action")):
        console.print(calibration_table(results["calibration"][name], title))


def variants_table(rows: list[dict[str, Any]]) -> Table:
    """Variants by group, each beside the full regressor."""
    title = "Validation split, by the traces: speed over the best static tree, mean over sampling settings (95%)"
    table = Table(title=title, title_justify="left")
    for column in ("variant", "judged on"):
        table.add_column(column)
    for column in ("loss at the root", "on the trunk", "at the root", "less full", "along the trunk", "less full"):
        table.add_column(column, justify="right")
    last = None
    for row in rows:
        if last not in (None, row["group"]):
            table.add_section()
        last = row["group"]
        losses = ["" if row[loss] is None else f"{row[loss]:.3f}" for loss in LOSSES]
        table.add_row(row["variant"], row["judged_on"], *losses, *(cell for way in WAYS for cell in _cells(row[way])))
    table.caption = f"judged on {ALL.name}: all validation roots, in this machine's time"
    return table


def _cells(way: dict[str, Any] | None) -> tuple[str, str]:
    if way is None:
        return "", ""
    ratio, difference = way["ratio"], way["difference"]
    return (
        f"{ratio:.3f} ±{way['interval_95'][1] - ratio:.3f}",
        f"{difference:+.3f} ±{way['difference_interval_95'][1] - difference:.3f}",
    )


def calibration_table(values: dict[str, Any], title: str) -> Table:
    """Means of the groups, in tokens."""
    table = Table(title=f"The regressor's block efficiency of {title}, in tokens", title_justify="left")
    for column in ("predicted", "labelled", "error", "roots"):
        table.add_column(column, justify="right")
    for g in values["groups"]:
        error = "" if g["error"] is None else f"±{g['error']:.2f}"
        table.add_row(f"{g['predicted']:.2f}", f"{g['labelled']:.2f}", error, str(g["roots"]))
    table.caption = f"expected calibration error {values['expected_error']:.3f} tokens"
    return table
