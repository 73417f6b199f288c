"""From decoded prompts to the numbers of an evaluation: ratios of sums, paired bootstrap over prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from data_gen.sampling import Sampling
from pipelines.config import Config
from pipelines.methods import (
    ASSISTED,
    ASSISTED_CONSTANT,
    AT_ROOT,
    AUTOREGRESSIVE,
    BEST_BY_KIND,
    BEST_STATIC,
    SELECTOR,
    SYNTHETIC,
    WALL,
    selector_of,
)
from pipelines.stage import console
from pipelines.tuning import STATIC

# figures of the summary, and the methods that the selector's speed is divided by
WALL_FIGURES = {
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_best_static_by_kind": BEST_BY_KIND,
    "ratio_vs_static_traversal_wall": AT_ROOT,
    "ratio_vs_autoregressive": AUTOREGRESSIVE,
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_assisted_generation_constant": ASSISTED_CONSTANT,
}
SYNTHETIC_FIGURES = {  # of each clock, and over all of them
    "ratio_vs_static_traversal": AT_ROOT,
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_best_static_by_kind": BEST_BY_KIND,
}
Rows = list[dict[str, Any]]


def evaluation(config: Config, rows: Rows) -> dict[str, Any]:
    """The content of `evaluation.json`: `summary`; `methods` with one entry per clock, method and sampling setting; and
    `ratios`, the summary's figures under each setting.

    The bootstrap resamples sources (files), whose prompts are not independent; one resample counts for all methods
    and settings, which saw the same prompts. A figure of the summary is a mean over sampling settings, those of
    synthetic machines also over the machines.
    """
    rng = np.random.default_rng(config.seed)
    sources = sorted({row["source"] for row in rows})
    resamples = rng.multinomial(len(sources), np.full(len(sources), 1 / len(sources)), config.evaluate.bootstrap)
    weights = np.vstack([np.ones(len(sources)), resamples])  # how often each source counts; first all of them once
    entries: list[dict[str, Any]] = []
    ratios: dict[str, list[np.ndarray]] = {}
    single: list[dict[str, Any]] = []
    for clock in dict.fromkeys(row["clock"] for row in rows):
        for setting in config.sampling:
            by_method: dict[str, Rows] = {}
            for row in rows:
                if (row["clock"], row["temperature"], row["top_p"]) == (clock, setting.temperature, setting.top_p):
                    by_method.setdefault(row["method"], []).append(row)
            speeds = {name: _speed(mine, sources, weights) for name, mine in by_method.items()}
            names = sorted(by_method, key=lambda name: (name == SELECTOR, name != AUTOREGRESSIVE, name))
            entries += [_entry(name, by_method[name], speeds) for name in names]
            found = {}
            for figure, rival in (WALL_FIGURES if clock == WALL else SYNTHETIC_FIGURES).items():
                if rival in speeds:
                    found[figure] = speeds[SELECTOR] / speeds[rival]
                    if clock != WALL:
                        ratios.setdefault(f"{figure}_{SYNTHETIC}", []).append(found[figure])
            for verifier in config.train.others:
                static = speeds.get(f"{STATIC} {verifier}", speeds[BEST_STATIC])  # unless it is the best one
                found[f"ratio_{verifier}_vs_its_static"] = speeds[selector_of(verifier)] / static
            of_setting = {"clock": clock, "temperature": setting.temperature, "top_p": setting.top_p}
            for figure, ratio in found.items():
                ratios.setdefault(figure if clock == WALL else f"{figure}_{clock}", []).append(ratio)
                single.append(
                    {**of_setting, "figure": figure, "ratio": float(ratio[0]), "interval_95": _interval(ratio)}
                )
    summary: dict[str, Any] = {}
    for figure, values in ratios.items():
        mean = np.mean(values, axis=0)
        summary[figure] = float(mean[0])
        summary[f"{figure}_interval_95"] = _interval(mean)
    mine = [row for row in rows if (row["method"], row["clock"]) == (SELECTOR, WALL)]
    summary["selector_time_share"] = _total(mine, "select_seconds") / _total(mine, "step_seconds")
    return {"summary": summary, "methods": entries, "ratios": single}


def _total(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows)


def _speed(rows: Rows, sources: list[str], weights: np.ndarray) -> np.ndarray:
    """Tokens per second under each set of source weights: sums over sums."""
    tokens, seconds = (
        np.array([_total([row for row in rows if row["source"] == source], key) for source in sources])
        for key in ("tokens", "seconds")
    )
    return (weights @ tokens) / (weights @ seconds)


def _interval(values: np.ndarray) -> list[float]:
    return [float(bound) for bound in np.percentile(values[1:], [2.5, 97.5])]


def _entry(name: str, rows: Rows, speeds: dict[str, np.ndarray]) -> dict[str, Any]:
    actions: dict[str, int] = {}
    for row in rows:
        for action, times in row["actions"].items():
            actions[action] = actions.get(action, 0) + times
    ratio = speeds[name] / speeds[BEST_STATIC]
    return {
        "clock": rows[0]["clock"],
        "method": name,
        "verifier": rows[0]["verifier"],
        "action": rows[0]["action"],
        "temperature": rows[0]["temperature"],
        "top_p": rows[0]["top_p"],
        "tokens_per_second": float(speeds[name][0]),
        "interval_95": _interval(speeds[name]),
        "block_efficiency": _total(rows, "block_tokens") / _total(rows, "steps"),
        "ratio_to_best_static": float(ratio[0]),
        "ratio_interval_95": _interval(ratio),
        "is_best_static": name == BEST_STATIC,
        "tokens": int(_total(rows, "tokens")),
        "prompts": len(rows),
        "select_share": _total(rows, "select_seconds") / _total(rows, "step_seconds"),
        "actions": dict(sorted(actions.items(), key=lambda item: -item[1])),
    }


def show(evaluation: dict[str, Any]) -> None:
    """The tables of an evaluation on the terminal."""
    for clock in dict.fromkeys(entry["clock"] for entry in evaluation["methods"]):
        console.print(method_table(evaluation, clock))
    console.print(summary_table(evaluation["summary"]))


def method_table(evaluation: dict[str, Any], clock: str = WALL) -> Table:
    """Methods x sampling settings on one clock."""
    time = "wall-clock" if clock == WALL else f"predicted time, synthetic {clock}"
    table = Table(title=f"Held-out prompts, {time} (95% intervals over prompts)", title_justify="left")
    for column in ("setting", "method", "tree", "block eff.", "tokens/s", "ratio to best static"):
        table.add_column(column, justify="left" if column in ("setting", "method") else "right", no_wrap=True)
    last = None
    for entry in evaluation["methods"]:
        if entry["clock"] != clock:
            continue
        setting = str(Sampling(entry["temperature"], entry["top_p"]))
        low, high = entry["interval_95"]
        ratio_low, ratio_high = entry["ratio_interval_95"]
        if last not in (None, setting):
            table.add_section()
        table.add_row(
            setting if setting != last else "",
            _label(entry),
            str(tuple(entry["action"])) if entry["action"] else "",
            f"{entry['block_efficiency']:.2f}",
            f"{entry['tokens_per_second']:.0f} [{low:.0f}, {high:.0f}]",
            f"{entry['ratio_to_best_static']:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]",
        )
        last = setting
    table.caption = "best static: of all verifiers, by the training data; ratios are to it"
    return table


def _label(entry: dict[str, Any]) -> str:
    return f"{entry['method']} ({entry['verifier']})" if entry["method"] in (BEST_STATIC, SELECTOR) else entry["method"]


def summary_table(summary: dict[str, Any]) -> Table:
    """What the selector's speed is to that of the others, over all sampling settings."""
    table = Table(title="The selector's speed, mean over sampling settings", title_justify="left")
    table.add_column("figure")
    table.add_column("ratio", justify="right")
    for figure, value in summary.items():
        if figure.startswith("ratio") and not figure.endswith("interval_95"):
            low, high = summary[f"{figure}_interval_95"]
            table.add_row(figure, f"{value:.3f} [{low:.3f}, {high:.3f}]")
    table.add_row("selector_time_share", f"{summary['selector_time_share']:.1%}")
    if "oracle_ratio" in summary:
        closed = summary["gap_closed"]
        table.add_row("oracle_ratio (validation split, by the traces)", f"{summary['oracle_ratio']:.3f}")
        table.add_row(
            "gap_closed (validation split, by the traces)", "undefined" if closed is None else f"{closed:.0%}"
        )
    return table
