"""What an evaluation found, in sentences and as the tables that the terminal and the report show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from data_gen.models.sampling import Sampling
from pipelines.evaluate.comparison import FIGURES
from pipelines.evaluate.methods import COPYING, PLAIN, STATIC
from pipelines.evaluate.replays import WALL, Rows
from pipelines.run import console
from selector.decision import Mode
from selector.train.replay import Ratio

Cells = dict[str, str]  # of one row of a table, by column


def setting_of(row: dict[str, Any]) -> str:
    """The sampling setting of any row of an evaluation."""
    return str(Sampling(row["temperature"], row["top_p"]))


def headline(evaluation: dict[str, Any]) -> str:
    """For each sampling setting the fastest choice beside plain decoding, and what is exported if that is another."""
    return " ".join(f"{setting_of(row)}: {_fastest(row)}." for row in evaluation["summary"]["by_setting"])


def _fastest(row: dict[str, Any]) -> str:
    speeds = {each["choice"]: Ratio(**each["over_plain"]) for each in row["choices"]}
    (exported,) = (each["choice"] for each in row["choices"] if each["exported"])
    best = max(speeds, key=lambda choice: (speeds[choice].value, choice == exported))
    if best == exported and exported != COPYING and row["ratio_vs_lookup_rule_interval_95"][1] < 1:
        ratio = _interval(row["ratio_vs_lookup_rule"], row["ratio_vs_lookup_rule_interval_95"], 2)
        return f"the {COPYING} is faster than the {exported}, which is exported and decodes at {ratio} of its speed"
    if best == exported:
        return f"the {exported} is exported and decodes {_both(row)} times as fast as plain decoding"
    faster = f"the {best} decodes {speeds[best].value:.2f} ±{speeds[best].error:.2f} times as fast as plain decoding"
    return f"{faster} (replayed), and the {exported}, which is exported, {_both(row)} times"


def _both(row: dict[str, Any]) -> str:
    """The exported selector's speed over plain decoding: replayed, and also decoded where the two differ by more than
    their errors."""
    replayed, decoded = Ratio(**row["replayed"]["ratio_vs_autoregressive"]), row["ratio_vs_autoregressive"]
    low, high = row["ratio_vs_autoregressive_interval_95"]
    text = f"{replayed.value:.2f} ±{replayed.error:.2f}"
    error = math.hypot(high - decoded if replayed.value > decoded else decoded - low, 2 * replayed.error)
    if abs(decoded - replayed.value) <= error:
        return text
    return f"{text} (replayed; decoded {_interval(decoded, (low, high), 2)})"


def metrics(summary: dict[str, Any]) -> dict[str, float]:
    """For MLflow: the means over sampling settings, and every ratio by setting."""
    found = {name: value for name, value in summary.items() if isinstance(value, float)}
    for row in summary["by_setting"]:
        place = f"T {row['temperature']:g} top-p {row['top_p']:g}"
        found |= {f"{figure}/{place}": row[figure] for figure in FIGURES if figure in row}
    return found


def decisions(evaluation: dict[str, Any]) -> list[str]:
    """For each sampling setting what decides, and why."""
    rows, modes = evaluation["summary"]["by_setting"], map(Mode.of, evaluation["decisions"])
    return [f"{setting_of(row)}: {_reason(mode)}" for row, mode in zip(rows, modes, strict=True)]


def _reason(mode: Mode) -> str:
    if mode.rule is not None:
        return (
            "The lookup rule decides: on the validation texts it is ahead of the static tree by two standard errors "
            "over sources, and the network is not ahead of it by one. It copies "
            f"{mode.rule.length} tokens after a match of {mode.rule.least} or more, and drafts {mode.action} elsewhere."
        )
    if mode.decides:
        levels = " and then ".join(mode.feature_levels)
        return (
            "The network decides: on the validation texts it is ahead of the static tree by two standard errors over "
            f"sources, and of the lookup rule by one. It is asked with {levels} features."
        )
    return (
        "On the validation texts neither the network nor the lookup rule is ahead of the static tree by two standard "
        f"errors over sources, so {mode.action} is drafted everywhere."
    )


def _interval(value: float, bounds: Sequence[float], digits: int = 3) -> str:
    return f"{value:.{digits}f} [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def choices(summary: dict[str, Any]) -> list[Cells]:
    """By sampling setting what is exported, its speed over plain decoding, and what each choice would give."""
    rows = []
    for row in summary["by_setting"]:
        (exported,) = (each["choice"] for each in row["choices"] if each["exported"])
        replayed = row["replayed"]["ratio_vs_autoregressive"]
        rows.append(
            {
                "setting": setting_of(row),
                "exported": exported,
                "replayed": str(Ratio(**replayed)),
                "decoded": decoded_over_plain(row),
                **{f"{each['choice']}, replayed": str(Ratio(**each["over_plain"])) for each in row["choices"]},
            }
        )
    return rows


def decoded_over_plain(row: dict[str, Any]) -> str:
    """The exported selector's speed over plain decoding under one sampling setting."""
    return _interval(row["ratio_vs_autoregressive"], row["ratio_vs_autoregressive_interval_95"])


def gains(summary: dict[str, Any]) -> list[Cells]:
    """The exported selector's speed over that of every rival, by sampling setting: decoded and, where that is
    possible, replayed. A star marks rivals that were slower than plain decoding."""
    rows = []
    for figure, rival in FIGURES.items():
        if figure in summary:
            cells = {"over": rival}
            for row in summary["by_setting"]:
                where = setting_of(row)
                slower = " *" if row[figure] > row["ratio_vs_autoregressive"] else ""
                cells[f"{where}, decoded"] = _interval(row[figure], row[f"{figure}_interval_95"]) + slower
                cells[f"{where}, replayed"] = str(Ratio(**row["replayed"][figure])) if figure in row["replayed"] else ""
            rows.append(cells)
    return rows


def methods(evaluation: dict[str, Any]) -> list[Cells]:
    """Every method under every sampling setting."""
    return [
        {
            "setting": setting_of(entry),
            "method": _label(entry),
            "drafts": entry["drafts"],
            "tokens a step": f"{entry['block_efficiency']:.2f}",
            "tokens/s": _interval(entry["tokens_per_second"], entry["interval_95"], 0),
            "over the best static tree": _interval(entry["ratio_to_best_static"], entry["ratio_interval_95"]),
            "replayed": ""
            if entry["replay_ratio"] is None
            else str(Ratio(entry["replay_ratio"], entry["replay_error"])),
        }
        for entry in evaluation["methods"]
    ]


def _label(entry: dict[str, Any]) -> str:
    """The method's name, with its verifier where the name does not say it."""
    method, verifier = entry["method"], entry["verifier"]
    said = method == PLAIN or verifier == "transformers" or method.startswith(f"{STATIC}, ")
    return method if said else f"{method} ({verifier})"


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


def show(evaluation: dict[str, Any]) -> None:
    """The tables and findings of an evaluation on the terminal."""
    caption: str | None = (
        "Best static tree: the fastest tree of all verifiers on the training texts. In brackets 95% intervals over "
        "sources; ± one standard error over sources. Neither includes the training seed or the choice of the pair"
    )
    summary = evaluation["summary"]
    on_clocks = "Held-out texts replayed on synthetic clocks: speed over the best static tree"
    for title, rows in (
        ("Held-out prompts decoded, and held-out texts replayed", methods(evaluation)),
        (on_clocks, synthetic(evaluation["replayed"])),
        ("The exported selector's speed over that of other methods (*: slower than plain decoding)", gains(summary)),
        ("Speed over plain decoding of what is exported and of each choice", choices(summary)),
    ):
        if rows:
            table = Table(*rows[0], title=title, title_justify="left", caption=caption)
            caption = None
            for row in rows:
                table.add_row(*row.values())
            console.print(table)
    console.print(f"decisions take {summary['selector_time_share']:.2%} of the time", soft_wrap=True)
    for line in (*decisions(evaluation), headline(evaluation)):
        console.print(line, soft_wrap=True)
    for line in evaluation["disagreements"]:
        console.print(f"decoding and replay disagree: {line}", soft_wrap=True)
