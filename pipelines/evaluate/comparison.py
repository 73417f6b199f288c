"""From decoded prompts and replayed texts to the figures of an evaluation.

Decoded ratios are ratios of sums, with a 95% interval by the bootstrap over sources. Replayed ratios have one standard
error, by the jackknife over sources.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.evaluate.assisted import ASSISTED, ASSISTED_CONSTANT, PROMPT_LOOKUP
from pipelines.evaluate.methods import AT_ROOT, AUTOREGRESSIVE, BEST_BY_KIND, BEST_STATIC, COPYING, RULE, SELECTOR
from pipelines.evaluate.replays import WALL, Rows
from pipelines.statistics import interval, source_weights, sums_by_source
from selector.actions import EMPTY
from selector.train.data import Setting
from selector.train.replay import Ratio

# by figure of the summary: the method that the selector's speed is compared with
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
APART = 3.0  # decoding and replay of the same texts may differ by this many standard errors, if those are exact


def evaluation(config: Config, rows: Rows, replayed: Rows, own_texts: Rows) -> dict[str, Any]:
    """`summary`, whose figures are means over sampling settings; `methods` with one entry per method and setting;
    `disagreements`; and `replayed` and `own_texts` as given.

    Args:
        rows: of the journal.
        replayed, own_texts: as the functions of these names return them.
    """
    sources = sorted({row["source"] for row in rows})
    weights = source_weights(len(sources), config.seed)  # shared by methods and settings, as the prompts are
    entries: Rows = []
    by_setting: Rows = []
    ratios: dict[str, list[np.ndarray]] = {}
    for setting in config.sampling:
        key = (setting.temperature, setting.top_p)
        decoded = _by_method(rows, key)
        on_wall = _by_method([row for row in replayed if row["clock"] == WALL], key)
        speeds = {name: speed(own, sources, weights) for name, own in decoded.items()}
        for name in sorted(decoded, key=lambda name: (name == SELECTOR, name != AUTOREGRESSIVE, name)):
            entries.append(_entry(decoded[name], speeds, *on_wall.get(name, ())))
        for figure, rival in FIGURES.items():
            if rival in speeds:
                ratios.setdefault(figure, []).append(speeds[SELECTOR] / speeds[rival])
        by_setting.append(_gains(key, speeds, on_wall[SELECTOR][0]))
    summary: dict[str, Any] = {}
    for figure, values in ratios.items():
        mean = np.mean(values, axis=0)
        summary |= {figure: float(mean[0]), f"{figure}_interval_95": interval(mean)}
    mine = [row for row in rows if row["method"] == SELECTOR]
    summary["selector_time_share"] = _total(mine, "select_seconds") / _total(mine, "step_seconds")
    return {
        "summary": summary | {"by_setting": by_setting},
        "methods": entries,
        "replayed": replayed,
        "own_texts": own_texts,
        "disagreements": disagreements(own_texts, len(sources)),
    }


def _by_method(rows: Rows, key: Setting) -> dict[str, Rows]:
    """The rows of one sampling setting."""
    found: dict[str, Rows] = {}
    for row in rows:
        if (row["temperature"], row["top_p"]) == key:
            found.setdefault(row["method"], []).append(row)
    return found


def _gains(key: Setting, speeds: dict[str, np.ndarray], replayed: dict[str, Any]) -> dict[str, Any]:
    """The selector's speed over that of the best static tree and of the lookup rule, each decoded and replayed."""
    over_tree, over_rule = (speeds[SELECTOR] / speeds[rival] for rival in (BEST_STATIC, COPYING))
    return {
        "temperature": key[0],
        "top_p": key[1],
        "replay_ratio": replayed["ratio"],
        "replay_error": replayed["error"],
        "wall_ratio": float(over_tree[0]),
        "wall_interval_95": interval(over_tree),
        "replay_over_rule": replayed["over_rule"],
        "wall_over_rule": float(over_rule[0]),
        "wall_over_rule_interval_95": interval(over_rule),
    }


def disagreements(own_texts: Rows, sources: int) -> list[str]:
    """Methods whose decoding differs from replay of the same texts by more than the errors: in the number of steps, or
    in the time of a step relative to the best static tree's.

    Args:
        sources: the number of sources that the errors of times are estimated from. Times are compared by Student's t at
            the level of `APART`.
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
            found.append(f"{method}: its steps take {time} of the predicted time, relative to the best static tree's")
    return found


def _total(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows)


def speed(rows: Rows, sources: list[str], weights: np.ndarray) -> np.ndarray:
    """Tokens per second in each resample; the first value is the estimate itself."""
    of = [row["source"] for row in rows]
    tokens, seconds = (sums_by_source([row[key] for row in rows], of, sources) for key in ("tokens", "seconds"))
    return (weights @ tokens) / (weights @ seconds)


def _entry(rows: Rows, speeds: dict[str, np.ndarray], replayed: dict[str, Any] | None = None) -> dict[str, Any]:
    """One method under one setting."""
    name = rows[0]["method"]
    ratio = speeds[name] / speeds[BEST_STATIC]
    drafted = Counter(action for row in rows for action in row["drafted"])
    return {
        **{key: rows[0][key] for key in ("method", "verifier", "action", "temperature", "top_p")},
        "tokens_per_second": float(speeds[name][0]),
        "interval_95": interval(speeds[name]),
        "block_efficiency": _total(rows, "block_tokens") / _total(rows, "steps"),
        "ratio_to_best_static": float(ratio[0]),
        "ratio_interval_95": interval(ratio),
        "replay_ratio": replayed and replayed["ratio"],
        "replay_error": replayed and replayed["error"],
        "replay_block_efficiency": replayed and replayed["block_efficiency"],
        "is_best_static": name == BEST_STATIC,
        "tokens": int(_total(rows, "tokens")),
        "prompts": len(rows),
        "select_share": _total(rows, "select_seconds") / _total(rows, "step_seconds"),
        "actions": dict(drafted.most_common()),
    }


def traced_steps(row: dict[str, Any], tokenizer: Any) -> Rows:
    """The steps of a row of the journal: `source` (lookup, draft or nothing), `drafted`, the `accepted` text, and the
    text of the `extra` token that verification adds, which is empty where the text was cut before it."""
    text, roots = row["text"], [*row["step_roots"], row["block_tokens"]]
    steps = []
    for drafted, (root, following) in zip(row["drafted"], pairwise(roots), strict=True):
        source = "lookup" if drafted.startswith("lookup") else "nothing" if drafted == str(EMPTY) else "draft"
        parts = text[root : following - 1], text[following - 1 : following]
        accepted, extra = map(tokenizer.decode, parts)
        steps.append({"source": source, "drafted": drafted, "accepted": accepted, "extra": extra})
    return steps
