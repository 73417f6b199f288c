"""From decoded prompts and replayed texts to the figures of an evaluation.

Decoded ratios are ratios of sums with a 95% interval (`pipelines.statistics`). Replayed ratios have one standard error,
by the jackknife. Both are over sources. Tokens count up to the limit, whoever decodes them.

Legend: G sources.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.evaluate.assisted import ASSISTED, ASSISTED_TUNED, PROMPT_LOOKUP
from pipelines.evaluate.methods import AT_ROOT, BEST_BY_KIND, BEST_STATIC, COPYING, PLAIN, RECENT, SELECTOR, STATIC
from pipelines.evaluate.replays import WALL, Rows
from pipelines.statistics import speed, with_interval
from selector.actions import EMPTY
from selector.train.data import Setting
from selector.train.replay import Ratio

# by figure of the summary: the method that the selector's speed is compared with
FIGURES = {
    "ratio_vs_autoregressive": PLAIN,
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_assisted_generation_constant": ASSISTED_TUNED,
    "ratio_vs_prompt_lookup": PROMPT_LOOKUP,
    "ratio_vs_lookup_rule": COPYING,
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_best_static_by_kind": BEST_BY_KIND,
    "ratio_vs_static_traversal_wall": AT_ROOT,
    "ratio_vs_recent_acceptance": RECENT,
}
FALSE_ALARMS = 0.01  # share of the evaluations that report a disagreement by chance


def evaluation(config: Config, rows: Rows, replayed: Rows, own_texts: Rows, choices: list[Rows]) -> dict[str, Any]:
    """`summary`, with the selector's speed over the rivals' by sampling setting, and the means over settings;
    `methods` with one entry per method and setting; `disagreements`; and `replayed` and `own_texts` as given.

    Args:
        rows: of the journal.
        replayed, own_texts: as the functions of these names return them.
        choices: as `replays.choices` returns them, for each setting.
    """
    sources = sorted({row["source"] for row in rows})
    entries: Rows = []
    by_setting: Rows = []
    compared: dict[str, list[Tensor]] = {}
    for setting, chosen in zip(config.sampling, choices, strict=True):
        key = (setting.temperature, setting.top_p)
        decoded = _by_method(rows, key)
        place = WALL, *key
        on_wall = {row["method"]: row for row in replayed if (row["clock"], row["temperature"], row["top_p"]) == place}
        sums = {name: sums_by_source(own, sources) for name, own in decoded.items()}
        for name in sorted(decoded, key=lambda name: (name == SELECTOR, name != PLAIN, name)):
            entries.append(_entry(decoded[name], sums, on_wall.get(name)))
        rivals = {figure: sums[rival] for figure, rival in FIGURES.items() if rival in sums}
        pairs = {figure: torch.cat([sums[SELECTOR], other], dim=-1) for figure, other in rivals.items()}
        for figure, both in pairs.items():
            compared.setdefault(figure, []).append(both)
        by_setting.append(_gains(key, pairs, on_wall[SELECTOR]) | {"choices": [*chosen, *_faster(chosen, on_wall)]})
    mine = [row for row in rows if row["method"] == SELECTOR]
    shared = {figure: torch.cat(parts, dim=-1) for figure, parts in compared.items()}
    time_share = _total(mine, "select_seconds") / sum(sum(row["seconds_of_steps"]) for row in mine)
    return {
        "summary": _figures(shared) | {"selector_time_share": time_share, "by_setting": by_setting},
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


def sums_by_source(rows: Rows, sources: list[str]) -> Tensor:
    """Tokens and seconds of some prompts, float64 [G, 2]."""
    place_X = torch.tensor([sources.index(row["source"]) for row in rows])
    values_X2 = torch.tensor([[row["tokens"], row["seconds"]] for row in rows], dtype=torch.float64)
    return torch.zeros(len(sources), 2, dtype=torch.float64).index_add_(0, place_X, values_X2)


def _figures(sums: dict[str, Tensor]) -> dict[str, Any]:
    """Figures with their intervals, from sums [G, 4] for each setting, side by side."""
    found: dict[str, Any] = {}
    for figure, sums_GC in sums.items():
        found[figure], found[f"{figure}_interval_95"] = with_interval(sums_GC, torch.arange(len(sums_GC)))
    return found


def _gains(key: Setting, sums: dict[str, Tensor], replayed: dict[str, Any]) -> dict[str, Any]:
    """The selector's speed over every rival's under one setting: decoded and, where that is possible, replayed."""
    figures = _figures(sums)
    return {
        "temperature": key[0],
        "top_p": key[1],
        "replay_ratio": replayed["ratio"],
        "replay_error": replayed["error"],
        "wall_ratio": figures["ratio_vs_best_static_delayed"],
        "wall_interval_95": figures["ratio_vs_best_static_delayed_interval_95"],
        **figures,
        "replayed": {figure: replayed["over"][rival] for figure, rival in FIGURES.items() if rival in replayed["over"]},
    }


def _faster(choices: Rows, on_wall: dict[str, dict[str, Any]]) -> Rows:
    """Further choices: the static tree and the lookup rule with another verifier than the selector's, where they are
    faster than with it."""
    known, found = {each["choice"]: each["over_plain"]["value"] for each in choices}, []
    for choice, name in ((STATIC, BEST_STATIC), (COPYING, COPYING)):
        row = on_wall[name]
        if (
            row["verifier"] != on_wall[SELECTOR]["verifier"]
            and round(row["over"][PLAIN]["value"] - known[choice], 2) > 0
        ):
            words = f"{choice} with {row['verifier']}"
            found.append({"choice": words, "exported": False, "over_plain": row["over"][PLAIN]})
    return found


def disagreements(own_texts: Rows, sources: int) -> list[str]:
    """Methods whose decoding differs from replay of the same texts beyond chance: in the tokens of their steps, or in
    the time of a step relative to the best static tree's. Where all agree, the list is not empty in one evaluation of
    a hundred (`FALSE_ALARMS`, shared among the comparisons by Bonferroni's rule).

    Args:
        sources: the number of sources that the errors of times are estimated from, by Student's t.
    """
    found = []
    level = FALSE_ALARMS / (4 * max(1, len(own_texts)))  # two comparisons for each row, two sides for each
    most = float(stats.norm.isf(level))
    most_of_time = float(stats.t.isf(level, sources - 1)) if sources > 1 else math.inf
    for row in own_texts:
        method = f"{Sampling(row['temperature'], row['top_p'])}, {row['method']}"
        if abs(row["z"]) > most:
            found.append(
                f"{method}: {row['steps']} steps decoded, {row['replayed_steps']:.1f} replayed, z = {row['z']:.1f}"
            )
        time = Ratio(**row["step_time"])
        if abs(time.value - 1) > most_of_time * time.error:
            found.append(f"{method}: its steps take {time} of the predicted time, relative to the best static tree's")
    return found


def _total(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows)


def _entry(rows: Rows, sums: dict[str, Tensor], replayed: dict[str, Any] | None = None) -> dict[str, Any]:
    """One method under one setting."""
    name = rows[0]["method"]
    source_G = torch.arange(len(sums[name]))
    per_second, bounds = with_interval(sums[name], source_G, speed)
    (ratio, ratio_bounds), (over_plain, plain_bounds) = (
        with_interval(torch.cat([sums[name], sums[base]], dim=-1), source_G) for base in (BEST_STATIC, PLAIN)
    )
    drafted = Counter(action for row in rows for action in row["drafted"])
    return {
        **{key: rows[0][key] for key in ("method", "verifier", "action", "drafts", "temperature", "top_p")},
        "tokens_per_second": per_second,
        "interval_95": bounds,
        "block_efficiency": _total(rows, "tokens") / _total(rows, "steps"),
        "ratio_to_best_static": ratio,
        "ratio_interval_95": ratio_bounds,
        "ratio_to_plain": over_plain,
        "plain_interval_95": plain_bounds,
        "replayed_over_plain": replayed and replayed["over"][PLAIN],
        "replay_ratio": replayed and replayed["ratio"],
        "replay_error": replayed and replayed["error"],
        "is_best_static": name == BEST_STATIC,
        "tokens": int(_total(rows, "tokens")),
        "prompts": len(rows),
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
