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
from selector.sampling import Sampling
from selector.train.data import Texts
from selector.train.module import SelectorModule
from selector.train.replay import ratio_of_speeds
from selector.train.tuning import Judged

Methods = dict[Sampling, list[Method]]  # by sampling setting


def synthetic_clocks(config: Config, pair: ModelPair) -> dict[str, LatencyProfile]:
    """By name, which tells the share of a target pass that a draft pass takes."""
    shares = config.evaluate.gpu_like
    return {f"gpu_like_1/{1 / share:g}": gpu_like(pair.fingerprint, config.verifiers, share) for share in shares}


def networks(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule
) -> dict[Sampling, Method]:
    """The network as it decides best on the validation texts, by sampling setting, whatever is exported."""
    judged = _judged(config, profile, splits, module).items()
    return {setting: Method(NETWORK, config.train.verifier, each.mode, module) for setting, each in judged}


def synthetic_methods(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule
) -> Methods:
    """The same network on another clock, tuned and judged with its step times; and the static trees that are fastest
    there."""
    methods: Methods = {}
    for setting, each in _judged(config, profile, splits, module).items():
        mode = each.mode if each.pays and module.is_regressor else each.mode.static_only()
        own = static_methods(splits["train"].setting_of(setting), config.verifiers, profile)
        methods[setting] = [*own, Method(SELECTOR, config.train.verifier, mode, module)]
    return methods


def _judged(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule
) -> dict[Sampling, Judged]:
    train, validation = (by_setting(config, splits[name], profile) for name in ("train", "validation"))
    return dict(zip(settings_of(config), judge(module, validation, statics(train)), strict=True))


def replays(methods: Methods, texts: Texts, profile: LatencyProfile, clock: str = "") -> Iterator[Figure]:
    """The speed of every method over plain decoding and the best static tree, and of the selector over each of the
    others; `clock` names a synthetic profile."""
    for setting, own in watched(methods.items(), f"replaying held-out texts{clock and f', {clock}'}"):
        mine = texts.setting_of(setting)
        found = {method.name: method.replay(mine, profile) for method in own}
        place = setting_name(setting.temperature, setting.top_p)
        for name, replay in found.items():
            for rival in found if name == SELECTOR else (PLAIN, BEST_STATIC):
                if rival != name:
                    ratio = ratio_of_speeds(replay, found[rival], mine.source_number_X)
                    yield replayed_figure(place, name, replayed(rival, clock), ratio)
