"""From decoded prompts to the numbers of an evaluation: ratios of sums, paired bootstrap over prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from pipelines.config import Config

SELECTOR = "selector"


def evaluation(config: Config, rows: list[dict[str, Any]], tuned: dict[tuple[float, float], Any]) -> dict[str, Any]:
    """The content of `evaluation.json`: `summary`, and `methods` with one entry per method and sampling setting."""
    rng = np.random.default_rng(config.seed)
    entries: list[dict[str, Any]] = []
    ratios: dict[str, list[np.ndarray]] = {}  # per setting: point estimate first, then resamples
    for setting in config.sampling:
        key = setting.temperature, setting.top_p
        here = [row for row in rows if (row["temperature"], row["top_p"]) == key]
        names = ["autoregressive", *(name for name in tuned[key] if any(r["method"] == name for r in here)), SELECTOR]
        tables = {name: _by_prompt(here, name) for name in names}
        count = len(next(iter(tables.values())))
        resamples = rng.multinomial(count, np.full(count, 1 / count), config.evaluate.bootstrap)
        draws = np.vstack([np.ones(count), resamples])  # how often each prompt counts
        speeds = {name: _speed(table, draws) for name, table in tables.items()}
        best = _best_static(config, tuned[key])
        for name, table in tables.items():
            entries.append(_entry(name, table, speeds, best, tuned[key], here, key))
        ratios.setdefault("ratio_vs_best_static_delayed", []).append(speeds[SELECTOR] / speeds[best])
        ratios.setdefault("ratio_vs_autoregressive", []).append(speeds[SELECTOR] / speeds["autoregressive"])
        if "static traversal at the root" in speeds:
            root = speeds["static traversal at the root"]
            ratios.setdefault("ratio_vs_static_traversal_wall", []).append(speeds[SELECTOR] / root)
    summary: dict[str, Any] = {}
    for name, values in ratios.items():
        mean = np.mean(values, axis=0)  # over sampling settings
        summary[name] = float(mean[0])
        summary[f"{name}_interval_95"] = _interval(mean)
    mine = [row for row in rows if row["method"] == SELECTOR]
    summary["selector_time_share"] = sum(r["select_seconds"] for r in mine) / sum(r["step_seconds"] for r in mine)
    return {"summary": summary, "methods": entries}


def _by_prompt(rows: list[dict[str, Any]], method: str) -> np.ndarray:
    """[prompt, (tokens, seconds, steps, tokens of whole blocks)], prompts in one order for all methods."""
    chosen = sorted((row for row in rows if row["method"] == method), key=lambda row: row["prompt"])
    return np.array([[row["tokens"], row["seconds"], row["steps"], row["block_tokens"]] for row in chosen])


def _speed(table: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Tokens per second under each set of prompt weights."""
    return (draws @ table[:, 0]) / (draws @ table[:, 1])


def _interval(values: np.ndarray) -> list[float]:
    return [float(bound) for bound in np.percentile(values[1:], [2.5, 97.5])]


def _best_static(config: Config, tuned: dict[str, Any]) -> str:
    """The static method (any tree, any verifier) that training data promise the most of."""
    return max((f"static {verifier}" for verifier in config.verifiers), key=lambda name: tuned[name]["predicted"])


def _entry(
    name: str,
    table: np.ndarray,
    speeds: dict[str, np.ndarray],
    best: str,
    tuned: dict[str, Any],
    rows: list[dict[str, Any]],
    key: tuple[float, float],
) -> dict[str, Any]:
    actions: dict[str, int] = {}
    for row in rows:
        if row["method"] == name:
            for action, times in row["actions"].items():
                actions[action] = actions.get(action, 0) + times
    ratio = speeds[name] / speeds[best]
    tokens, _, steps, block_tokens = table.sum(0)
    return {
        "method": name,
        "verifier": next(row["verifier"] for row in rows if row["method"] == name),
        "action": tuned[name]["action"] if name in tuned else None,
        "temperature": key[0],
        "top_p": key[1],
        "tokens_per_second": float(speeds[name][0]),
        "interval_95": _interval(speeds[name]),
        "block_efficiency": float(block_tokens / steps),
        "ratio_to_best_static": float(ratio[0]),
        "ratio_interval_95": _interval(ratio),
        "is_best_static": name == best,
        "tokens": int(tokens),
        "prompts": len(table),
        "actions": dict(sorted(actions.items(), key=lambda item: -item[1])),
    }


def method_table(evaluation: dict[str, Any]) -> Table:
    """Methods x sampling settings."""
    table = Table(title="Held-out prompts, wall-clock (95% intervals over prompts)", title_justify="left")
    for column in ("setting", "method", "tree", "block eff.", "tokens/s", "ratio to best static"):
        table.add_column(column, justify="left" if column in ("setting", "method") else "right", no_wrap=True)
    last = None
    for entry in evaluation["methods"]:
        setting = f"T={entry['temperature']:g}" + (f", top-p={entry['top_p']:g}" if entry["top_p"] < 1 else "")
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
