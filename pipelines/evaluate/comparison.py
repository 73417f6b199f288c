"""From decoded prompts and replayed texts to the figures of an evaluation.

Decoded ratios are ratios of sums, and paired ones (each prompt and round by itself), with 95% intervals
(`pipelines.statistics`). Replayed ratios have one standard error, by the jackknife. All are over sources. Tokens count
up to the limit, whoever decodes them.

Legend: G sources, X prompts, R rounds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from pipelines.config import Config
from pipelines.evaluate.assisted import ASSISTED, ASSISTED_TUNED, PROMPT_LOOKUP
from pipelines.evaluate.methods import AT_ROOT, BEST_STATIC, COPYING, PLAIN, SELECTOR, STATIC
from pipelines.evaluate.origins import shares
from pipelines.evaluate.replays import WALL, Rows
from pipelines.statistics import paired, speed, with_interval
from selector.train.data import Setting

# by figure of the summary: the method that the selector's speed is compared with
FIGURES = {
    "ratio_vs_autoregressive": PLAIN,
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_assisted_generation_constant": ASSISTED_TUNED,
    "ratio_vs_prompt_lookup": PROMPT_LOOKUP,
    "ratio_vs_lookup_rule": COPYING,
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_static_traversal_wall": AT_ROOT,
}


def evaluation(config: Config, rows: Rows, replayed: Rows, choices: list[Rows]) -> dict[str, Any]:
    """`summary`, with the selector's speed over the rivals' by sampling setting, and the means over settings;
    `methods` with one entry per method and setting; and `replayed` as given.

    Args:
        rows: of the journal.
        replayed: as the function of this name returns it.
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
            entries.append(_entry(name, decoded, sums[name], on_wall.get(name)))
        both = {name: torch.cat([sums[SELECTOR], other], dim=-1) for name, other in sums.items()}
        for figure in (figure for figure, rival in FIGURES.items() if rival in sums):
            compared.setdefault(figure, []).append(both[FIGURES[figure]])
        gains = _gains(key, decoded, both[BEST_STATIC], on_wall[SELECTOR])
        by_setting.append(gains | {"choices": [*chosen, *_faster(chosen, on_wall)]})
    mine = [row for row in rows if row["method"] == SELECTOR]
    shared = {figure: torch.cat(parts, dim=-1) for figure, parts in compared.items()}
    time_share = _total(mine, "select_seconds") / sum(sum(row["seconds_of_steps"]) for row in mine)
    return {
        "summary": _figures(shared) | {"selector_time_share": time_share, "by_setting": by_setting},
        "methods": entries,
        "replayed": replayed,
    }


def _by_method(rows: Rows, key: Setting) -> dict[str, Rows]:
    """The rows of one sampling setting."""
    found: dict[str, Rows] = {}
    for row in rows:
        if (row["temperature"], row["top_p"]) == key:
            found.setdefault(row["method"], []).append(row)
    return found


def sums_by_source(rows: Rows, sources: list[str]) -> Tensor:
    """Tokens and seconds of some prompts, over all rounds, float64 [G, 2]."""
    place_X = torch.tensor([sources.index(row["source"]) for row in rows])
    values_X2 = torch.tensor([row["rounds"] for row in rows], dtype=torch.float64).sum(1)
    return torch.zeros(len(sources), 2, dtype=torch.float64).index_add_(0, place_X, values_X2)


def over(mine: Rows, other: Rows) -> dict[str, Any]:
    """The paired speed of one method over another on the prompts of its rows: `value` and `interval_95`."""
    theirs, names = {row["prompt"]: row["rounds"] for row in other}, sorted({row["source"] for row in mine})
    both_X2R2 = torch.tensor([[row["rounds"], theirs[row["prompt"]]] for row in mine], dtype=torch.float64)
    mine_XR, other_XR = (both_X2R2[..., 0] / both_X2R2[..., 1]).unbind(1)
    logs_XR = (mine_XR / other_XR).log()
    value, bounds = paired(logs_XR, torch.tensor([names.index(row["source"]) for row in mine]))
    return {"value": value, "interval_95": bounds}


def _equal_texts(decoded: dict[str, Rows]) -> list[int]:
    """The number of prompts that all methods continued alike, and of all prompts."""
    texts: dict[str, set[tuple[int, ...]]] = {}
    for row in (row for rows in decoded.values() for row in rows):
        texts.setdefault(row["prompt"], set()).add(tuple(row["text"]))
    return [sum(len(found) == 1 for found in texts.values()), len(texts)]


def _by_kind(decoded: dict[str, Rows]) -> Rows:
    """For every kind of prompts the selector's paired speed over plain decoding and over the rule, and its tokens'
    shares."""
    found = []
    for kind in sorted({row["kind"] for row in decoded[SELECTOR]}):
        own = [row for row in decoded[SELECTOR] if row["kind"] == kind]
        paired_with = {"over_plain": over(own, decoded[PLAIN]), "over_rule": over(own, decoded[COPYING])}
        found.append({"kind": kind, "prompts": len(own), **paired_with, "shares": shares(own)})
    return found


def _figures(sums: dict[str, Tensor]) -> dict[str, Any]:
    """Figures with their intervals, from sums [G, 4] for each setting, side by side."""
    found: dict[str, Any] = {}
    for figure, sums_GC in sums.items():
        found[figure], found[f"{figure}_interval_95"] = with_interval(sums_GC, torch.arange(len(sums_GC)))
    return found


def _gains(key: Setting, decoded: dict[str, Rows], sums_G4: Tensor, replayed: dict[str, Any]) -> dict[str, Any]:
    """The selector's speed over every rival's under one setting: decoded and, where that is possible, replayed.

    Args:
        sums_G4: of the selector and the best static tree.
    """
    ratio, bounds = with_interval(sums_G4, torch.arange(len(sums_G4)))
    mine, over_it = decoded[SELECTOR], replayed["over"]
    return {
        "temperature": key[0],
        "top_p": key[1],
        "replay_ratio": replayed["ratio"],
        "replay_error": replayed["error"],
        "wall_ratio": ratio,
        "wall_interval_95": bounds,
        "replayed": {figure: over_it[rival] for figure, rival in FIGURES.items() if rival in over_it},
        "paired": {figure: over(mine, decoded[rival]) for figure, rival in FIGURES.items() if rival in decoded},
        "equal_texts": _equal_texts(decoded) if key[0] == 0 else None,
        "by_kind": _by_kind(decoded),
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


def _total(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows)


def _entry(
    name: str, decoded: dict[str, Rows], sums_G2: Tensor, replayed: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One method under one setting."""
    rows = decoded[name]
    per_second, bounds = with_interval(sums_G2, torch.arange(len(sums_G2)), speed)
    drafted = Counter(action for row in rows for action in row["drafted"])
    return {
        **{key: rows[0][key] for key in ("method", "verifier", "action", "drafts", "temperature", "top_p")},
        "tokens_per_second": per_second,
        "interval_95": bounds,
        "block_efficiency": _total(rows, "tokens") / _total(rows, "steps"),
        "over_plain": over(rows, decoded[PLAIN]),
        "over_best_static": over(rows, decoded[BEST_STATIC]),
        "replayed_over_plain": replayed and replayed["over"][PLAIN],
        "replay_ratio": replayed and replayed["ratio"],
        "replay_error": replayed and replayed["error"],
        "is_best_static": name == BEST_STATIC,
        "tokens": int(_total(rows, "tokens")),
        "prompts": len(rows),
        "actions": dict(drafted.most_common()),
        "shares": shares(rows),
    }
