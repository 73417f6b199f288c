"""From decoded prompts and replayed texts to the numbers of an evaluation.

Wall-clock ratios are sums over sums with a 95% interval, by a bootstrap over sources; replayed ones carry one standard
error, by the jackknife over sources. Neither holds the noise of a machine's clock.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rich.table import Table
from scipy import stats

from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.evaluate.findings import headline
from pipelines.evaluate.methods import (
    ASSISTED,
    ASSISTED_CONSTANT,
    AT_ROOT,
    AUTOREGRESSIVE,
    BEST_BY_KIND,
    BEST_STATIC,
    COPYING,
    PROMPT_LOOKUP,
    RULE,
    SELECTOR,
    WALL,
)
from pipelines.run import console
from pipelines.statistics import interval, source_weights, sums_by_source
from selector.train.replay import Ratio

# figures of the summary, and the methods that the selector's speed is divided by
FIGURES = {
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_best_static_by_kind": BEST_BY_KIND,
    "ratio_vs_static_traversal_wall": AT_ROOT,
    "ratio_vs_rule": RULE,
    "ratio_vs_lookup_rule": COPYING,
    "ratio_vs_autoregressive": AUTOREGRESSIVE,
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_assisted_generation_constant": ASSISTED_CONSTANT,
    "ratio_vs_prompt_lookup": PROMPT_LOOKUP,
}
APART = 3.0  # standard errors by which decoding and replay along the same texts may differ, were their size known
Rows = list[dict[str, Any]]


def evaluation(config: Config, rows: Rows, replayed: Rows, own_texts: Rows) -> dict[str, Any]:
    """`summary`; `methods` with one entry per method and sampling setting; what was replayed; and `own_texts`.

    The bootstrap resamples sources (files), whose prompts are not independent; one resample counts for all methods
    and settings, which saw the same prompts. A figure of the summary is a mean over sampling settings.

    Args:
        rows: of the journal.
        replayed: one row per clock, setting and method: its speed over the best static tree's, `ratio` and `error`, and
            over that of the rule for lookups.
        own_texts: as `own_texts.own_texts` gives them.
    """
    sources = sorted({row["source"] for row in rows})
    weights = source_weights(len(sources), config.evaluate.bootstrap, config.seed)
    entries: Rows = []
    by_setting: Rows = []
    ratios: dict[str, list[np.ndarray]] = {}
    for setting in config.sampling:
        key = (setting.temperature, setting.top_p)
        by_method: dict[str, Rows] = {}
        for row in rows:
            if (row["temperature"], row["top_p"]) == key:
                by_method.setdefault(row["method"], []).append(row)
        speeds = {name: speed(mine, sources, weights) for name, mine in by_method.items()}
        names = sorted(by_method, key=lambda name: (name == SELECTOR, name != AUTOREGRESSIVE, name))
        own = {
            row["method"]: row for row in replayed if (row["clock"], row["temperature"], row["top_p"]) == (WALL, *key)
        }
        entries += [_entry(name, by_method[name], speeds, own.get(name)) for name in names]
        for figure, rival in FIGURES.items():
            if rival in speeds:
                ratios.setdefault(figure, []).append(speeds[SELECTOR] / speeds[rival])
        wall = speeds[SELECTOR] / speeds[BEST_STATIC]
        over_rule = speeds[SELECTOR] / speeds[COPYING]
        steps = next((row for row in own_texts if _of(row) == (SELECTOR, *key)), None)
        by_setting.append(
            {
                "temperature": key[0],
                "top_p": key[1],
                "replay_ratio": own[SELECTOR]["ratio"],
                "replay_error": own[SELECTOR]["error"],
                "wall_ratio": float(wall[0]),
                "wall_interval_95": interval(wall),
                "paced_ratio": steps and _paced(own[SELECTOR], steps["step_time"]),
                "replay_over_rule": own[SELECTOR]["over_rule"],
                "wall_over_rule": float(over_rule[0]),
                "wall_over_rule_interval_95": interval(over_rule),
                "paced_over_rule": steps and _paced(own[SELECTOR]["over_rule"], steps["over_rule"]),
            }
        )
    summary: dict[str, Any] = {}
    for figure, values in ratios.items():
        mean = np.mean(values, axis=0)
        summary[figure] = float(mean[0])
        summary[f"{figure}_interval_95"] = interval(mean)
    mine = [row for row in rows if row["method"] == SELECTOR]
    summary["selector_time_share"] = _total(mine, "select_seconds") / _total(mine, "step_seconds")
    summary["by_setting"] = by_setting
    return {
        "summary": summary,
        "methods": entries,
        "replayed": replayed,
        "own_texts": own_texts,
        "disagreements": disagreements(own_texts, len({row["source"] for row in rows})),
    }


def _of(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["method"], row["temperature"], row["top_p"]


def _paced(ratio: dict[str, float], steps: dict[str, float]) -> dict[str, float]:
    """A replayed ratio with the steps' times of decoding in place of the profile's: what decoding would give on as many
    texts.

    Args:
        ratio: `value` (or `ratio`) and `error`.
        steps: decoded over replayed time along the same texts, a ratio to the same rival.
    """
    replayed = ratio["value"] if "value" in ratio else ratio["ratio"]
    value = replayed / steps["value"]
    return {"value": value, "error": value * math.hypot(ratio["error"] / replayed, steps["error"] / steps["value"])}


def disagreements(own_texts: Rows, sources: int) -> list[str]:
    """Methods that decode otherwise than replay says along the same texts, by more than the errors: in the number of
    steps, or in their time beside that of the best static tree's.

    Args:
        sources: that the errors of times are jackknifed over. Few of them say little of their own scatter, so with six
            sources two times may be 5.5 errors apart, with 24 of them 3.3 (Student's t at the probability of `APART`).
    """
    found = []
    most = float(stats.t.isf(stats.norm.sf(APART), sources - 1)) if sources > 1 else math.inf
    for row in own_texts:
        method = f"{Sampling(row['temperature'], row['top_p'])}, {row['method']}"
        if abs(row["z"]) > APART:
            found.append(
                f"{method}: {row['steps']} steps decoded, {row['replayed_steps']:.1f} replayed, z = {row['z']:.1f}"
            )
        time = Ratio(**row["step_time"])
        if abs(time.value - 1) > most * time.error:
            found.append(f"{method}: beside the best static tree's, its steps take {time} of the time by the profile")
    return found


def _total(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows)


def speed(rows: Rows, sources: list[str], weights: np.ndarray) -> np.ndarray:
    """Tokens per second under each set of source weights: sums over sums."""
    of = [row["source"] for row in rows]
    tokens, seconds = (sums_by_source([row[key] for row in rows], of, sources) for key in ("tokens", "seconds"))
    return (weights @ tokens) / (weights @ seconds)


def _entry(
    name: str,
    rows: Rows,
    speeds: dict[str, np.ndarray],
    replayed: dict[str, Any] | None,
) -> dict[str, Any]:
    actions: dict[str, int] = {}
    for row in rows:
        for action, times in row["actions"].items():
            actions[action] = actions.get(action, 0) + times
    ratio = speeds[name] / speeds[BEST_STATIC]
    return {
        "method": name,
        "verifier": rows[0]["verifier"],
        "action": rows[0]["action"],
        "temperature": rows[0]["temperature"],
        "top_p": rows[0]["top_p"],
        "tokens_per_second": float(speeds[name][0]),
        "interval_95": interval(speeds[name]),
        "block_efficiency": _total(rows, "block_tokens") / _total(rows, "steps"),
        "ratio_to_best_static": float(ratio[0]),
        "ratio_interval_95": interval(ratio),
        "replay_ratio": None if replayed is None else replayed["ratio"],
        "replay_error": None if replayed is None else replayed["error"],
        "replay_block_efficiency": None if replayed is None else replayed["block_efficiency"],
        "is_best_static": name == BEST_STATIC,
        "tokens": int(_total(rows, "tokens")),
        "prompts": len(rows),
        "select_share": _total(rows, "select_seconds") / _total(rows, "step_seconds"),
        "actions": dict(sorted(actions.items(), key=lambda item: -item[1])),
    }


def show(result: dict[str, Any]) -> None:
    """The tables of an evaluation on the terminal."""
    console.print(method_table(result))
    synthetic = [row for row in result["replayed"] if row["clock"] != WALL]
    if synthetic:
        console.print(synthetic_table(synthetic))
    console.print(summary_table(result["summary"]))
    console.print(headline(result), soft_wrap=True)
    for line in result["disagreements"]:
        console.print(f"decoding and replay disagree: {line}", soft_wrap=True)


def method_table(result: dict[str, Any]) -> Table:
    """Methods x sampling settings."""
    table = Table(title="Held-out prompts decoded, and held-out texts replayed", title_justify="left")
    for column in ("setting", "method", "tree", "block eff.", "tokens/s", "ratio to best static", "replayed"):
        table.add_column(column, justify="left" if column in ("setting", "method") else "right", no_wrap=True)
    last = None
    for entry in result["methods"]:
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
            "" if entry["replay_ratio"] is None else str(Ratio(entry["replay_ratio"], entry["replay_error"])),
        )
        last = setting
    table.caption = (
        "best static: of all verifiers, by the training texts; ratios are to it. "
        "In brackets 95% intervals over sources; ± one standard error over sources"
    )
    return table


def _label(entry: dict[str, Any]) -> str:
    return f"{entry['method']} ({entry['verifier']})" if entry["method"] in (BEST_STATIC, SELECTOR) else entry["method"]


def synthetic_table(rows: Rows) -> Table:
    """What was replayed on other clocks."""
    title = "Held-out texts replayed on synthetic clocks: speed over the best static tree (± one standard error)"
    table = Table(title=title, title_justify="left")
    for column in ("clock", "setting", "method", "tree", "ratio"):
        table.add_column(column)
    for row in rows:
        tree = str(tuple(row["action"])) if row["action"] else ""
        setting = str(Sampling(row["temperature"], row["top_p"]))
        table.add_row(row["clock"], setting, row["method"], tree, str(Ratio(row["ratio"], row["error"])))
    return table


def summary_table(summary: dict[str, Any]) -> Table:
    """What the selector's speed is to that of the others, over all sampling settings, and by setting."""
    table = Table(title="The selector's speed, mean over sampling settings", title_justify="left")
    table.add_column("figure")
    table.add_column("ratio", justify="right")
    for figure, value in summary.items():
        if f"{figure}_interval_95" in summary:
            low, high = summary[f"{figure}_interval_95"]
            table.add_row(figure, f"{value:.3f} [{low:.3f}, {high:.3f}]")
    for row in summary["by_setting"]:
        setting = Sampling(row["temperature"], row["top_p"])
        replayed = Ratio(row["replay_ratio"], row["replay_error"])
        over_tree = row["wall_ratio"], row["wall_interval_95"], replayed, row["paced_ratio"]
        over_rule = *(row[f"wall_over_rule{end}"] for end in ("", "_interval_95")), Ratio(**row["replay_over_rule"])
        rivals = {"best static tree": over_tree, "rule": (*over_rule, row["paced_over_rule"])}
        for rival, (ratio, (low, high), replayed, paced) in rivals.items():
            at_pace = f", {Ratio(**paced)} at the decoded steps' times" if paced else ""
            figures = f"{ratio:.3f} [{low:.3f}, {high:.3f}], replayed {replayed}{at_pace}"
            table.add_row(f"over the {rival}, {setting}", figures)
    table.add_row("selector_time_share", f"{summary['selector_time_share']:.2%}")
    return table
