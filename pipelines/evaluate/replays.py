"""Methods replayed on held-out texts: with this machine's latency profile, and with synthetic ones."""

from __future__ import annotations

from collections.abc import Iterator

from data_gen.models.pair import ModelPair
from pipelines.config import Config
from pipelines.data.recorded import settings_of
from pipelines.evaluate.methods import BEST_STATIC, NETWORK, PLAIN, SELECTOR, Method, static_methods
from pipelines.evaluate.table import Figure, replayed, replayed_figure, setting_name
from pipelines.run import watched
from pipelines.train.judging import by_setting, judge, statics
from selector.latency import LatencyProfile, gpu_like
from selector.train.data import Setting, Texts
from selector.train.module import SelectorModule
from selector.train.replay import ratio_of_speeds
from selector.train.tuning import Judged

Methods = dict[Setting, list[Method]]  # by sampling setting


def networks(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule
) -> dict[Setting, Method]:
    """The network as it decides best on the validation texts, by sampling setting, whatever is exported."""
    judged = _judged(config, profile, splits, module).items()
    return {setting: Method(NETWORK, config.train.verifier, each.mode, module) for setting, each in judged}


def synthetic(
    config: Config, pair: ModelPair, splits: dict[str, Texts], module: SelectorModule, share: float
) -> Iterator[Figure]:
    """The same network, tuned and judged on a synthetic clock, and the static trees that are fastest there. A draft
    pass takes this share of a target pass."""
    profile = gpu_like(pair.fingerprint, config.verifiers, share)
    methods: Methods = {}
    for setting, each in _judged(config, profile, splits, module).items():
        mode = each.mode if each.pays and module.is_regressor else each.mode.static_only()
        own = static_methods(splits["train"].setting_of(setting), config.verifiers, profile)
        methods[setting] = [*own, Method(SELECTOR, config.train.verifier, mode, module)]
    return replays(methods, splits["test"], profile, f"gpu_like_1/{1 / share:g}")


def _judged(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule
) -> dict[Setting, Judged]:
    train, validation = (by_setting(config, splits[name], profile) for name in ("train", "validation"))
    return dict(zip(settings_of(config), judge(module, validation, statics(config, train)), strict=True))


def replays(methods: Methods, texts: Texts, profile: LatencyProfile, clock: str = "") -> Iterator[Figure]:
    """The speed of every method over plain decoding and the best static tree, and of the selector over each of the
    others; `clock` names a synthetic profile."""
    for setting, own in watched(methods.items(), f"replaying held-out texts{clock and f', {clock}'}"):
        mine = texts.setting_of(setting)
        found = {method.name: method.replay(mine, profile) for method in own}
        for name, replay in found.items():
            for rival in found if name == SELECTOR else (PLAIN, BEST_STATIC):
                if rival != name:
                    ratio = ratio_of_speeds(replay, found[rival], mine.source_number_X)
                    yield replayed_figure(setting_name(*setting), name, replayed(rival, clock), ratio)
