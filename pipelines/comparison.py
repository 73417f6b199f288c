"""From decoded prompts to the numbers of an evaluation: ratios of sums, paired bootstrap over prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from data_gen.sampling import Sampling
from pipelines.config import Config

AUTOREGRESSIVE, SELECTOR = "autoregressive", "selector"


def evaluation(config: Config, rows: list[dict[str, Any]], tuned: dict[tuple[float, float], Any]) -> dict[str, Any]:
    """The content of `evaluation.json`: `summary`, and `methods` with one entry per method and sampling setting.

    The bootstrap resamples sources (files), whose prompts are not independent; one resample counts for all methods
    and settings, which saw the same prompts.
    """
    rng = np.random.default_rng(config.seed)
    sources = sorted({row["source"] for row in rows})
    resamples = rng.multinomial(len(sources), np.full(len(sources), 1 / len(sources)), config.evaluate.bootstrap)
    weights = np.vstack([np.ones(len(sources)), resamples])  # how often each source counts; first all of them once
    entries: list[dict[str, Any]] = []
    ratios: dict[str, list[np.ndarray]] = {}
    for setting in config.sampling:
        key = setting.temperature, setting.top_p
        here = [row for row in rows if (row["temperature"], row["top_p"]) == key]
        names = [AUTOREGRESSIVE, *(name for name in tuned[key] if any(r["method"] == name for r in here)), SELECTOR]
        by_method = {name: [row for row in here if row["method"] == name] for name in names}
        speeds = {name: _speed(mine, sources, weights) for name, mine in by_method.items()}
        best = _best_static(config, tuned[key])
        entries += [_entry(name, mine, speeds, best, tuned[key]) for name, mine in by_method.items()]
        for figure, rival in (
            ("ratio_vs_best_static_delayed", best),
            ("ratio_vs_static_traversal_wall", "static traversal at the root"),
            ("ratio_vs_autoregressive", AUTOREGRESSIVE),
        ):
            if rival in speeds:
                ratios.setdefault(figure, []).append(speeds[SELECTOR] / speeds[rival])
    summary: dict[str, Any] = {}
    for figure, values in ratios.items():
        mean = np.mean(values, axis=0)  # over sampling settings
        summary[figure] = float(mean[0])
        summary[f"{figure}_interval_95"] = _interval(mean)
    mine = [row for row in rows if row["method"] == SELECTOR]
    summary["selector_time_share"] = _total(mine, "select_seconds") / _total(mine, "step_seconds")
    return {"summary": summary, "methods": entries}


def _total(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows)


def _speed(rows: list[dict[str, Any]], sources: list[str], weights: np.ndarray) -> np.ndarray:
    """Tokens per second under each set of source weights: sums over sums."""
    tokens, seconds = (
        np.array([_total([row for row in rows if row["source"] == source], key) for source in sources])
        for key in ("tokens", "seconds")
    )
    return (weights @ tokens) / (weights @ seconds)


def _interval(values: np.ndarray) -> list[float]:
    return [float(bound) for bound in np.percentile(values[1:], [2.5, 97.5])]


def _best_static(config: Config, tuned: dict[str, Any]) -> str:
    """The static method (any tree, any verifier) that training data promise the most of."""
    return max((f"static {verifier}" for verifier in config.verifiers), key=lambda name: tuned[name]["predicted"])


def _entry(
    name: str, rows: list[dict[str, Any]], speeds: dict[str, np.ndarray], best: str, tuned: dict[str, Any]
) -> dict[str, Any]:
    actions: dict[str, int] = {}
    for row in rows:
        for action, times in row["actions"].items():
            actions[action] = actions.get(action, 0) + times
    ratio = speeds[name] / speeds[best]
    return {
        "method": name,
        "verifier": rows[0]["verifier"],
        "action": tuned[name]["action"] if name in tuned else None,
        "temperature": rows[0]["temperature"],
        "top_p": rows[0]["top_p"],
        "tokens_per_second": float(speeds[name][0]),
        "interval_95": _interval(speeds[name]),
        "block_efficiency": _total(rows, "block_tokens") / _total(rows, "steps"),
        "ratio_to_best_static": float(ratio[0]),
        "ratio_interval_95": _interval(ratio),
        "is_best_static": name == best,
        "tokens": int(_total(rows, "tokens")),
        "prompts": len(rows),
        "actions": dict(sorted(actions.items(), key=lambda item: -item[1])),
    }


def method_table(evaluation: dict[str, Any]) -> Table:
    """Methods x sampling settings."""
    table = Table(title="Held-out prompts, wall-clock (95% intervals over prompts)", title_justify="left")
    for column in ("setting", "method", "tree", "block eff.", "tokens/s", "ratio to best static"):
        table.add_column(column, justify="left" if column in ("setting", "method") else "right", no_wrap=True)
    last = None
    for entry in evaluation["methods"]:
        setting = str(Sampling(entry["temperature"], entry["top_p"]))
        low, high = entry["interval_95"]
        ratio_low, ratio_high = entry["ratio_interval_95"]
        if last not in (None, setting):
            table.add_section()
        table.add_row(
            setting if setting != last else "",
            entry["method"] + (" *" if entry["is_best_static"] else ""),
            str(tuple(entry["action"])) if entry["action"] else "",
            f"{entry['block_efficiency']:.2f}",
            f"{entry['tokens_per_second']:.0f} [{low:.0f}, {high:.0f}]",
            f"{entry['ratio_to_best_static']:.3f} [{ratio_low:.3f}, {ratio_high:.3f}]",
        )
        last = setting
    table.caption = "* the best static tree by the training data; ratios are to it"
    return table
