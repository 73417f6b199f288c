"""Methods replayed on held-out texts: with this machine's latency profile (the clock `wall`), and synthetic ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from data_gen.models.pair import ModelPair
from pipelines.config import Config
from pipelines.data.recorded import settings_of
from pipelines.evaluate.assisted import Assistant
from pipelines.evaluate.methods import AT_ROOT, BEST_STATIC, COPYING, PLAIN, SELECTOR, STATIC, Method, static_methods
from pipelines.run import watched
from pipelines.train.judging import by_setting, judge, statics
from pipelines.train.result import chosen_of, rule_of
from selector.actions import EMPTY
from selector.decision import Mode
from selector.latency import LatencyProfile, gpu_like
from selector.train.data import SPLITS, Setting, Texts
from selector.train.module import SelectorModule
from selector.train.replay import ratio_of_speeds
from selector.train.tuning import replay_mode, static_replay

NETWORK = "network"
WALL = "wall"  # synthetic clocks are named after the draft's share of a target pass: gpu_like_1/20
Rows = list[dict[str, Any]]
Contenders = dict[Setting, list[Method | Assistant]]  # by sampling setting


def synthetic_clocks(config: Config, pair: ModelPair) -> dict[str, LatencyProfile]:
    shares = config.evaluate.gpu_like
    return {f"gpu_like_1/{1 / share:g}": gpu_like(pair.fingerprint, config.verifiers, share) for share in shares}


def synthetic_methods(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule
) -> Contenders:
    """The same network on another clock, tuned and judged with its step times; and the static trees that are fastest
    there."""
    verifier, settings = config.train.verifier, settings_of(config)
    train, validation = (by_setting(config, splits[name], profile) for name in ("train", "validation"))
    judged = judge(module, validation, statics(config, train))
    methods: Contenders = {}
    for setting, each in zip(settings, judged, strict=True):
        mode = each.mode if each.pays and module.is_regressor else each.mode.static_only()
        own = static_methods(splits["train"].setting_of(setting), config.verifiers, profile)
        methods[setting] = [*own, Method(SELECTOR, verifier, mode, module)]
    return methods


def replays(contenders: Contenders, texts: Texts, profile: LatencyProfile, clock: str) -> Rows:
    """The speed of every method that can be replayed: `ratio` and `error` over the best static tree; `over`
    it and plain decoding, too, and for the selector over each of the others."""
    rows = []
    for setting, own in watched(contenders.items(), f"replaying held-out texts, {clock}"):
        mine = texts.setting_of(setting)
        methods = [method for method in own if isinstance(method, Method)]
        found = {method.name: method.replay(mine, profile) for method in methods}
        for method in methods:
            replayed = found[method.name]
            over = {
                rival: ratio_of_speeds(replayed, other, mine.source_number_X)
                for rival, other in found.items()
                if method.name == SELECTOR or rival in (BEST_STATIC, PLAIN)
            }
            rows.append(
                {
                    "clock": clock,
                    "temperature": setting[0],
                    "top_p": setting[1],
                    "method": method.name,
                    "verifier": method.verifier,
                    "action": method.action and list(method.action),
                    "ratio": over[BEST_STATIC].value,
                    "error": over[BEST_STATIC].error,
                    "over": {rival: asdict(ratio) for rival, ratio in over.items()},
                    "tokens_per_second": replayed.speed,
                }
            )
    return rows


def choices(
    config: Config,
    profile: LatencyProfile,
    splits: dict[str, Texts],
    result: dict[str, Any],
    module: SelectorModule,
) -> list[Rows]:
    """What training chose from, for each sampling setting: the static tree, the lookup rule and the network, all with
    the trained verifier, and which of them is exported. `over_plain` is the speed over plain decoding, replayed on
    held-out texts, which had no part in the choice."""
    train, validation, test = (by_setting(config, splits[name], profile) for name in SPLITS)
    bases = statics(config, train)
    found = []
    all_of = list(zip(test, bases, judge(module, validation, bases), chosen_of(result)["modes"], strict=True))
    for own, base, judged, entry in watched(all_of, "replaying the choices"):
        kept = Mode.of(entry)
        exported = NETWORK if kept.decides else COPYING if kept.copies else STATIC
        rule = rule_of(result, own.setting, own.verifier)
        modes = {STATIC: base, COPYING: rule, NETWORK: judged.mode, exported: kept}
        plain = static_replay(own, EMPTY)
        rows = []
        for name, mode in modes.items():
            predictions = module.predictions(own.texts, mode)
            replayed = replay_mode(own, predictions, mode, not module.is_regressor)
            ratio = ratio_of_speeds(replayed, plain, own.texts.source_number_X)
            rows.append({"choice": name, "exported": name == exported, "over_plain": asdict(ratio)})
        found.append(rows)
    return found


def synthetic_summary(replayed: Rows) -> dict[str, float]:
    """The selector's speed over that of Traversal's best tree at the root, mean over synthetic clocks and settings."""
    found: dict[tuple, dict[str, float]] = {}
    for row in replayed:
        if row["clock"] != WALL:
            key = row["clock"], row["temperature"], row["top_p"]
            found.setdefault(key, {})[row["method"]] = row["tokens_per_second"]
    ratios = [own[SELECTOR] / own[AT_ROOT] for own in found.values() if AT_ROOT in own]
    return {"ratio_vs_static_traversal_gpu_like": sum(ratios) / len(ratios)} if ratios else {}
