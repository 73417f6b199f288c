"""The tables of an evaluation that the terminal and the report show, and MLflow's metrics."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from pipelines.evaluate import verdict
from pipelines.evaluate.methods import COPYING, PLAIN, SELECTOR, STATIC
from pipelines.evaluate.origins import ORIGINS
from pipelines.evaluate.table import ALL, EFFICIENCY, ON, SHARE, TOKENS_PER_SECOND, Figure, Table, decoded, replayed
from pipelines.evaluate.verdict import Cells, Evaluation, decisions
from pipelines.run import console, table
from pipelines.tracking import EXPORTED, named

SHOWN = ("method", "drafts", "tokens/step", "decoded", "replayed")  # on the terminal, which is narrow
LEGEND = (
    "Decoded: held-out prompts, two methods compared on the same prompt in the same round, with 95% intervals over "
    "sources. Replayed: held-out texts, ± one standard error over sources. Neither includes the training seed or the "
    "choice of the pair. Best static tree: the fastest tree of all verifiers on the training texts."
)


def metrics(evaluation: Evaluation) -> dict[str, float]:
    """For MLflow: the selector's speed over every rival by sampling setting, and the number by which selectors are
    compared."""
    rows = evaluation.found["summary"]["by_setting"]
    found = {EXPORTED: statistics.mean(row["replay_ratio"] for row in rows)}
    for row, (setting, _) in zip(rows, evaluation.settings, strict=True):
        mine = [each for each in evaluation.table.figures if each[:3] == (setting, SELECTOR, ALL)]
        figures = {
            each.measure.replace(",", "").replace(" ", "_"): each.value
            for each in mine
            if not each.measure.startswith(ON)
        }
        found |= named({EXPORTED: row["replay_ratio"], **figures}, row)
    return found


def methods(evaluation: Evaluation) -> dict[str, list[Cells]]:
    """By sampling setting every method, the fastest first: its speed over plain decoding, the selector's speed over
    it, and what it does."""
    found, listed = evaluation.table, [*evaluation.found["methods"], *evaluation.found["replayed"]]
    entries = {(each["setting"], each["method"]): each for each in listed}
    shown: dict[str, list[Cells]] = {}
    for setting, _ in evaluation.settings:
        names = [name for at, name in entries if at == setting]
        names.sort(key=partial(_over_plain, found, setting), reverse=True)
        shown[setting] = [
            {
                "method": _label(entries[setting, name]),
                "decoded": _text(found.get(setting, name, decoded(PLAIN))),
                "replayed": _text(found.get(setting, name, replayed(PLAIN))),
                "selector over it, decoded": _text(found.get(setting, SELECTOR, decoded(name)), 3),
                "selector over it, replayed": _text(found.get(setting, SELECTOR, replayed(name)), 3),
                "drafts": entries[setting, name]["drafts"],
                "tokens/step": _text(found.get(setting, name, EFFICIENCY)),
                "tokens/s": _text(found.get(setting, name, TOKENS_PER_SECOND), 0),
            }
            for name in names
        ]
    return shown


def _over_plain(found: Table, setting: str, name: str) -> float:
    figure = found.get(setting, name, decoded(PLAIN)) or found.get(setting, name, replayed(PLAIN))
    return 1.0 if figure is None else figure.value


def _text(figure: Figure | None, digits: int = 2) -> str:
    return "" if figure is None else figure.text(digits)


def _label(entry: dict[str, Any]) -> str:
    """The method's name, with its verifier where the name does not say it."""
    method, verifier = entry["method"], entry["verifier"]
    said = method == PLAIN or verifier == "transformers" or method.startswith(f"{STATIC}, ")
    return method if said else f"{method} ({verifier})"


def origins(evaluation: Evaluation) -> list[Cells]:
    """What the selector's tokens came from by sampling setting, over all prompts and for every kind, and its decoded
    speed there."""
    found = evaluation.table
    return [
        {
            "setting": setting,
            "prompts": kind,
            **{origin: f"{found.of(setting, SELECTOR, f'{SHARE} {origin}', kind).value:.0%}" for origin in ORIGINS},
            "over plain": _text(found.get(setting, SELECTOR, decoded(PLAIN), kind)),
            "over the rule": _text(found.get(setting, SELECTOR, decoded(COPYING), kind)),
        }
        for setting, _ in evaluation.settings
        for kind in found.kinds(setting)
    ]


def synthetic(evaluation: Evaluation) -> list[Cells]:
    """What was replayed on synthetic clocks."""
    return [
        {"clock and rival": each.measure, "setting": each.setting, "method": each.method, "ratio": each.text(3)}
        for each in evaluation.table.figures
        if each.measure.startswith(ON)
    ]


def show(title: str, evaluation: Evaluation) -> None:
    """The verdict, the tables and the findings of an evaluation on the terminal."""
    verdict.show(title, evaluation)
    for setting, rows in methods(evaluation).items():
        shown = [{name: row[name] for name in SHOWN} for row in rows]
        console.print(table(shown, f"{setting}: speed of all methods over plain decoding"))
    console.print(LEGEND, soft_wrap=True)
    if rows := [row for row in synthetic(evaluation) if row["method"] == SELECTOR]:
        console.print(table(rows, "Held-out texts replayed on synthetic clocks"))
    overall = [row for row in origins(evaluation) if row["prompts"] == ALL]
    shown = [{name: row[name] for name in ("setting", *ORIGINS, "over plain")} for row in overall]
    console.print(table(shown, "What the selector's tokens came from, and its decoded speed"))
    for line in decisions(evaluation):
        console.print(line, soft_wrap=True)
    console.print(f"Decisions take {evaluation.found['summary']['selector_time_share']:.2%} of the time.")
