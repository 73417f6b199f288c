"""Methods replayed on held-out texts: on this machine's clock, on synthetic ones, with and without long repeats."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from data_gen.models.pair import ModelPair
from pipelines.config import Config
from pipelines.data.recorded import settings_of
from pipelines.evaluate.methods import (
    AT_ROOT,
    BEST_STATIC,
    COPYING,
    SELECTOR,
    SYNTHETIC,
    WALL,
    Method,
    Selecting,
    static_methods,
)
from pipelines.train.judging import judge, statics
from pipelines.train.result import load_module
from selector.latency import LatencyProfile, gpu_like
from selector.schema import SCALAR_NAMES
from selector.train.data import Setting, Texts
from selector.train.potential import LONG_REPEAT
from selector.train.replay import ratio_of_speeds
from selector.train.tuning import sources

OFTEN = 0.25  # share of a text's positions inside a long repeat that makes it one of the texts with repeats


def synthetic_clocks(config: Config, pair: ModelPair) -> dict[str, LatencyProfile]:
    return {
        f"{SYNTHETIC}_1/{1 / share:g}": gpu_like(pair.fingerprint, config.verifiers, share)
        for share in config.evaluate.gpu_like
    }


def synthetic_methods(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], result: dict[str, Any]
) -> dict[Setting, list[Method]]:
    """The same selector on another clock: static trees and prices of its own, and what pays there."""
    module = load_module(config, result["chosen"], result)
    verifier, settings = config.train.verifier, settings_of(config)
    bases = statics(splits, settings, verifier, profile)
    judged = judge(module, splits["validation"], bases, verifier, profile)
    methods: dict[Setting, list[Method]] = {}
    for setting, each in zip(settings, judged, strict=True):
        own = static_methods(splits["train"].setting_of(setting), config.verifiers, profile)
        mode = each.mode if each.pays and module.is_regressor else each.mode.static_only()
        methods[setting] = [*own, Selecting(SELECTOR, verifier, mode, module)]
    return methods


def replays(
    config: Config, methods: dict[Setting, list[Method]], texts: Texts, profile: LatencyProfile, clock: str
) -> list[dict[str, Any]]:
    """Every method that can be replayed, on held-out texts: its speed over the best static tree's, and over that of the
    rule for lookups, where that is among the methods."""
    rows = []
    for setting, own in methods.items():
        mine = texts.setting_of(setting)
        found = {method.name: method.replay(mine, profile) for method in own}
        base = found[BEST_STATIC]
        assert base is not None
        rule = found.get(COPYING)
        for method in own:
            replayed = found[method.name]
            if replayed is None:
                continue
            ratio = ratio_of_speeds(replayed, base, sources(mine))
            over_rule = None if rule is None else asdict(ratio_of_speeds(replayed, rule, sources(mine)))
            rows.append(
                {
                    "clock": clock,
                    "temperature": setting[0],
                    "top_p": setting[1],
                    "method": method.name,
                    "verifier": method.verifier,
                    "action": None if method.action is None else list(method.action),
                    "ratio": ratio.value,
                    "error": ratio.error,
                    "over_rule": over_rule,
                    "tokens_per_second": replayed.speed,
                    "block_efficiency": replayed.block_efficiency,
                    "texts": len(mine),
                }
            )
    return rows


def synthetic_summary(replayed: list[dict[str, Any]]) -> dict[str, float]:
    """The selector over Traversal's best tree at the root on synthetic clocks, mean over clocks and settings."""
    found: dict[tuple, dict[str, float]] = {}
    for row in replayed:
        if row["clock"] != WALL:
            key = row["clock"], row["temperature"], row["top_p"]
            found.setdefault(key, {})[row["method"]] = row["tokens_per_second"]
    ratios = [own[SELECTOR] / own[AT_ROOT] for own in found.values() if AT_ROOT in own]
    return {"ratio_vs_static_traversal_gpu_like": sum(ratios) / len(ratios)} if ratios else {}


def repeats(
    config: Config, methods: dict[Setting, list[Method]], texts: Texts, profile: LatencyProfile
) -> list[dict[str, Any]]:
    """The selector's gain on held-out texts with and without long repeats, by replay."""
    rows = []
    for setting, own in methods.items():
        mine = texts.setting_of(setting)
        inside_R = (mine.scalars_RF[:, SCALAR_NAMES.index("match")] >= LONG_REPEAT).double()
        share_X = torch.zeros(len(mine), dtype=torch.float64).index_add_(0, mine.text_R, inside_R) / mine.size_X
        by_name = {method.name: method for method in own}
        for name, chosen_X in (("with", share_X >= OFTEN), ("without", share_X < OFTEN)):
            part = mine.take(chosen_X.nonzero()[:, 0])
            if len(part) == 0:
                continue
            selector, base = (by_name[each].replay(part, profile) for each in (SELECTOR, BEST_STATIC))
            assert selector is not None and base is not None
            ratio = ratio_of_speeds(selector, base, sources(part))
            saved = float(selector.tokens_X.sum()) / base.speed - float(selector.seconds_X.sum())
            rows.append(
                {
                    "temperature": setting[0],
                    "top_p": setting[1],
                    "texts": f"{name} long repeats",
                    "count": len(part),
                    "ratio": ratio.value,
                    "error": ratio.error,
                    "seconds_saved": saved,
                }
            )
    return rows
