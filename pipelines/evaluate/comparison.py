"""From decoded prompts to the figures of an evaluation.

Ratios are paired: each prompt and round by itself (`pipelines.statistics`), with intervals over sources. Tokens count
up to the limit, whoever decodes them.

Legend: X prompts, R rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from pipelines.config import Config
from pipelines.evaluate.assisted import ASSISTED
from pipelines.evaluate.methods import AT_ROOT, BEST_STATIC, PLAIN, SELECTOR
from pipelines.evaluate.origins import shares
from pipelines.evaluate.table import (
    ALL,
    EFFICIENCY,
    ON,
    SHARE,
    TOKENS_PER_SECOND,
    Figure,
    Table,
    decoded,
    replayed,
    setting_name,
)
from pipelines.statistics import paired, speed, with_interval

Rows = list[dict[str, Any]]  # of the journal

# by figure of the summary: the method that the selector's speed is compared with
FIGURES = {
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_static_traversal_wall": AT_ROOT,
}


def figures(rows: Rows) -> Iterator[Figure]:
    """The decoded figures of all methods, settings and kinds of prompts."""
    for setting in dict.fromkeys(row["setting"] for row in rows):
        here = [row for row in rows if row["setting"] == setting]
        kinds = sorted({row["kind"] for row in here})
        for kind in (ALL, *kinds) if len(kinds) > 1 else (ALL,):
            methods: dict[str, Rows] = {}
            for row in here:
                if kind in (ALL, row["kind"]):
                    methods.setdefault(row["method"], []).append(row)
            yield from _of_kind(setting, kind, methods)


def _of_kind(setting: str, kind: str, methods: dict[str, Rows]) -> Iterator[Figure]:
    for method, own in methods.items():
        at = setting, method, kind
        rounds_XR2 = torch.tensor([row["rounds"] for row in own], dtype=torch.float64)
        yield Figure(*at, TOKENS_PER_SECOND, *_bounded(with_interval(rounds_XR2.sum(1), _sources(own), speed)))
        yield Figure(*at, EFFICIENCY, total(own, "tokens") / total(own, "steps"))
        for origin, share in (shares(own) or {}).items():
            yield Figure(*at, f"{SHARE} {origin}", share)
        for rival in methods if method == SELECTOR else (PLAIN, BEST_STATIC):
            if rival != method:
                yield Figure(*at, decoded(rival), *over(own, methods[rival]))


def over(mine: Rows, other: Rows) -> tuple[float, float | None, float | None]:
    """The paired speed of one method over another on the prompts of its rows, and its 95% interval."""
    theirs = {row["prompt"]: row["rounds"] for row in other}
    both_X2R2 = torch.tensor([[row["rounds"], theirs[row["prompt"]]] for row in mine], dtype=torch.float64)
    mine_XR, other_XR = (both_X2R2[..., 0] / both_X2R2[..., 1]).unbind(1)
    return _bounded(paired((mine_XR / other_XR).log(), _sources(mine)))


def _sources(rows: Rows) -> torch.Tensor:
    names = sorted({row["source"] for row in rows})
    return torch.tensor([names.index(row["source"]) for row in rows])


def _bounded(figure: tuple[float, list[float]]) -> tuple[float, float | None, float | None]:
    value, (low, high) = figure
    return (value, low, high) if math.isfinite(high) else (value, None, None)


def summary(config: Config, table: Table, rows: Rows) -> dict[str, Any]:
    """The selector's speed over its rivals', as means over sampling settings and for each; and its decisions' share of
    the time. A bound or an error that a single source leaves open is None."""
    settings = [setting_name(each.temperature, each.top_p) for each in config.sampling]
    found: dict[str, Any] = {}
    for name, rival in FIGURES.items():
        ratios = [table.get(setting, SELECTOR, decoded(rival)) for setting in settings]
        if known := [ratio.value for ratio in ratios if ratio]:
            found[name] = sum(known) / len(known)
    if on_gpu := [
        each.value
        for each in table.figures
        if each.method == SELECTOR and each.measure.startswith(ON) and each.measure.endswith(f" over {AT_ROOT}")
    ]:
        found["ratio_vs_static_traversal_gpu_like"] = sum(on_gpu) / len(on_gpu)
    mine = [row for row in rows if row["method"] == SELECTOR]
    found["selector_time_share"] = total(mine, "select_seconds") / total(mine, "step_seconds")
    found["by_setting"] = [
        {"temperature": each.temperature, "top_p": each.top_p, **_gain(table, name)}
        for name, each in zip(settings, config.sampling, strict=True)
    ]
    return found


def _gain(table: Table, setting: str) -> dict[str, Any]:
    wall, replay = (table.of(setting, SELECTOR, over_it(BEST_STATIC)) for over_it in (decoded, replayed))
    return {
        "wall_ratio": wall.value,
        "wall_interval_95": [wall.low, wall.high],
        "replay_ratio": replay.value,
        "replay_error": None if replay.high is None else replay.high - replay.value,
    }


def methods(table: Table, rows: Rows) -> Rows:
    """One entry for each method and sampling setting: what it is, and its speed."""
    own: dict[tuple[str, str], Rows] = {}
    for row in rows:
        own.setdefault((row["setting"], row["method"]), []).append(row)
    return [_entry(table, setting, method, each) for (setting, method), each in own.items()]


def _entry(table: Table, setting: str, method: str, rows: Rows) -> dict[str, Any]:
    per_second = table.of(setting, method, TOKENS_PER_SECOND)
    return {
        **{key: rows[0][key] for key in ("setting", "method", "verifier", "drafts", "temperature", "top_p")},
        "tokens_per_second": per_second.value,
        "interval_95": [per_second.low, per_second.high],
        "block_efficiency": table.of(setting, method, EFFICIENCY).value,
        "tokens": int(total(rows, "tokens")),
        "prompts": len(rows),
    }


def total(rows: Rows, key: str) -> float:
    """The sum of an entry of all rows."""
    return sum(row[key] for row in rows)
