"""What an evaluation found, in sentences and as the tables that the terminal and the report show."""

from __future__ import annotations

import statistics
from typing import Any

from pipelines.evaluate import verdict
from pipelines.evaluate.comparison import FIGURES
from pipelines.evaluate.methods import PLAIN, SELECTOR, STATIC
from pipelines.evaluate.origins import ORIGINS
from pipelines.evaluate.replays import WALL, Rows
from pipelines.evaluate.verdict import Cells, decisions, measured, rounded, setting_of
from pipelines.run import console, table
from pipelines.tracking import EXPORTED, named
from selector.train.replay import Ratio

SHOWN = ("method", "drafts", "tokens/step", "decoded", "replayed")  # on the terminal, which is narrow
ALL = "of all kinds"
LEGEND = (
    "Decoded: held-out prompts, two methods compared on the same prompt in the same round, with 95% intervals over "
    "sources. Replayed: held-out texts, ± one standard error over sources. Neither includes the training seed or the "
    "choice of the pair. Best static tree: the fastest tree of all verifiers on the training texts."
)


def metrics(summary: dict[str, Any]) -> dict[str, float]:
    """For MLflow: every ratio by sampling setting, and the number by which selectors are compared."""
    rows = summary["by_setting"]
    found = {EXPORTED: statistics.mean(row["replay_ratio"] for row in rows)}
    for row in rows:
        figures = {EXPORTED: row["replay_ratio"], **{name: each["value"] for name, each in row["paired"].items()}}
        found |= named(figures, row)
    return found


def methods(evaluation: dict[str, Any]) -> dict[str, list[Cells]]:
    """By sampling setting every method, the fastest first: its speed over plain decoding, the selector's speed over
    it, and what it does."""
    figures = {method: figure for figure, method in FIGURES.items()}
    found: dict[str, list[Cells]] = {}
    for row in evaluation["summary"]["by_setting"]:
        own = [entry for entry in evaluation["methods"] if setting_of(entry) == setting_of(row)]
        found[setting_of(row)] = [
            {
                "method": _label(entry),
                "decoded": measured(entry["over_plain"]),
                "replayed": rounded(Ratio(**ratio)) if (ratio := entry["replayed_over_plain"]) else "",
                **_over(row, figures.get(entry["method"], "")),
                "drafts": entry["drafts"],
                "tokens/step": f"{entry['block_efficiency']:.2f}",
                "tokens/s": f"{entry['tokens_per_second']:.0f}",
            }
            for entry in sorted(own, key=lambda entry: -entry["over_plain"]["value"])
        ]
    return found


def _over(row: dict[str, Any], figure: str) -> Cells:
    """The selector's speed over a rival's; nothing where there is no such figure."""
    return {
        "selector over it, decoded": measured(row["paired"][figure], 3) if figure in row["paired"] else "",
        "selector over it, replayed": str(Ratio(**row["replayed"][figure])) if figure in row["replayed"] else "",
    }


def _label(entry: dict[str, Any]) -> str:
    """The method's name, with its verifier where the name does not say it."""
    method, verifier = entry["method"], entry["verifier"]
    said = method == PLAIN or verifier == "transformers" or method.startswith(f"{STATIC}, ")
    return method if said else f"{method} ({verifier})"


def origins(evaluation: dict[str, Any]) -> list[Cells]:
    """What the selector's tokens came from by sampling setting, over all prompts and for every kind, and its decoded
    speed there."""
    rows = []
    for row in evaluation["summary"]["by_setting"]:
        (own,) = (e for e in evaluation["methods"] if (e["method"], setting_of(e)) == (SELECTOR, setting_of(row)))
        overall = {"kind": ALL, "prompts": own["prompts"], "shares": own["shares"]}
        overall |= {"over_plain": own["over_plain"], "over_rule": row["paired"]["ratio_vs_lookup_rule"]}
        rows += [
            {
                "setting": setting_of(row),
                "prompts": f"{each['prompts']} {each['kind']}",
                **{origin: f"{each['shares'][origin]:.0%}" for origin in ORIGINS},
                "over plain": measured(each["over_plain"]),
                "over the rule": measured(each["over_rule"]),
            }
            for each in (overall, *(row["by_kind"] if len(row["by_kind"]) > 1 else ()))
        ]
    return rows


def synthetic(replayed: Rows) -> list[Cells]:
    """What was replayed on synthetic clocks."""
    return [
        {
            "clock": row["clock"],
            "setting": setting_of(row),
            "method": row["method"],
            "tree": str(tuple(row["action"])) if row["action"] else "",
            "ratio": str(Ratio(row["ratio"], row["error"])),
        }
        for row in replayed
        if row["clock"] != WALL
    ]


def show(title: str, evaluation: dict[str, Any]) -> None:
    """The verdict, the tables and the findings of an evaluation on the terminal."""
    verdict.show(title, evaluation)
    for setting, rows in methods(evaluation).items():
        shown = [{name: row[name] for name in SHOWN} for row in rows]
        console.print(table(shown, f"{setting}: speed of all methods over plain decoding"))
    console.print(LEGEND, soft_wrap=True)
    if rows := synthetic(evaluation["replayed"]):
        console.print(table(rows, "Held-out texts replayed on synthetic clocks: speed over the best static tree"))
    overall = [row for row in origins(evaluation) if row["prompts"].endswith(ALL)]
    shown = [{name: row[name] for name in ("setting", *ORIGINS, "over plain")} for row in overall]
    console.print(table(shown, "What the selector's tokens came from, and its decoded speed"))
    for line in decisions(evaluation):
        console.print(line, soft_wrap=True)
    console.print(f"Decisions take {evaluation['summary']['selector_time_share']:.2%} of the time.")
