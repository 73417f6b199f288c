"""Methods compared by exact replay: of a pair, of a log, and of the papers' tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from pipelines.evaluate.methods import BASES, SELECTOR, Method
from pipelines.evaluate.table import HERE, Figure, setting_name, with_rivals
from pipelines.run import watched
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed, fastest_possible, ratio_of_speeds
from selector.train.tuning import replay_mode


def replay(timed: Timed, mode: Mode, module: SelectorModule | None = None) -> Replayed:
    """What a mode does, with a module's predictions where a network decides."""
    if module is None:
        return replay_mode(timed, {}, mode)
    predictions = module.predictions(timed.texts, mode)
    return replay_mode(timed, predictions, mode, policy=not module.is_regressor)


def oracle(timed: Timed) -> Replayed:
    """A bound for all methods with the texts' actions."""
    return fastest_possible(timed.survivals_RS, timed.seconds(), timed.texts.size_X, timed.space)


def compared(
    replays: Mapping[str, Replayed],
    bases: Collection[str],
    selectors: Collection[str],
    source_X: Tensor | None,
    **columns: Any,
) -> Iterator[Figure]:
    """The speeds of replays of the same texts, by method, over those of their rivals; the texts'
    sources, int64, are those of `ratio_of_speeds`."""
    for method, rival in with_rivals(replays, bases, selectors):
        ratio = ratio_of_speeds(replays[method], replays[rival], source_X)
        yield Figure.of_ratio(ratio, method=method, rival=rival, **columns)


def replayed(
    methods: Mapping[Sampling, list[Method]],
    texts: Texts,
    profile: LatencyProfile,
    clock: str = HERE,
) -> Iterator[Figure]:
    """The speed of every method over plain decoding and the best static tree, and of the selector
    over each of the others; `clock` is the profile's machine."""
    words = "replaying held-out texts"
    if clock != HERE:
        words += f", {clock}"
    for sampling, setting_methods in watched(methods.items(), words):
        setting_texts = texts.setting_of(sampling)
        replays: dict[str, Replayed] = {}
        for method in setting_methods:
            timed = Timed(setting_texts, method.verifier, profile)
            replays[method.name] = replay(timed, method.mode, method.network)
        source_X = setting_texts.source_number_X
        setting = setting_name(sampling.temperature, sampling.top_p)
        yield from compared(replays, BASES, [SELECTOR], source_X, setting=setting, clock=clock)
