"""Methods compared by exact replay: of a pair, of a log, and of the papers' tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from scipy import stats
from torch import Tensor

from pipelines.evaluate.methods import BASES, SELECTOR, Method
from pipelines.evaluate.table import HERE, Figure, sampling_name_of, with_rivals
from pipelines.terminal import watched
from selector.decision import Setting
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed, fastest_possible, ratio_of_speeds
from selector.train.tuning import replay_setting


def replay(timed: Timed, setting: Setting, module: SelectorModule | None = None) -> Replayed:
    """What a setting does, with a module's predictions where a network decides, among the module's
    actions."""
    if module is None:
        return replay_setting(timed, {}, setting)
    if timed.space != module.space:
        timed = replace(timed, texts=replace(timed.texts, space=module.space))
    predictions = module.predictions(timed.texts, setting)
    return replay_setting(timed, predictions, setting, are_logits=not module.is_regressor)


def oracle(timed: Timed) -> Replayed:
    """A bound for all methods with the texts' actions."""
    return fastest_possible(timed.survivals_RS, timed.seconds(), timed.texts.size_X, timed.space)


def rank_correlation(predicted_RA: Tensor, texts: Timed) -> float:
    """Spearman's, over the roots with features: whether the roots that a network's predicted block
    efficiencies put first are those at which most is accepted, both as means over actions. 0 where
    one of them is the same at all roots."""
    known_R = ~texts.texts.unknown_R
    labelled_RA = texts.space.efficiencies(texts.survivals_RS)
    means_R = [tokens_RA.mean(-1)[known_R].numpy() for tokens_RA in (predicted_RA, labelled_RA)]
    if any(len(set(mean_R.tolist())) == 1 for mean_R in means_R):
        return 0.0
    return float(stats.spearmanr(*means_R).statistic)


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
    machine: str = HERE,
) -> Iterator[Figure]:
    """The speed of every method over plain decoding and the best static tree, and of the selector
    over each of the others; `machine` is the profile's machine."""
    words = "replaying held-out texts"
    if machine != HERE:
        words += f", {machine}"
    for sampling, sampling_methods in watched(methods.items(), words):
        sampling_texts = texts.of_sampling(sampling)
        replays: dict[str, Replayed] = {}
        for method in sampling_methods:
            timed = Timed(sampling_texts, method.verifier, profile)
            replays[method.name] = replay(timed, method.setting, method.network)
        source_X = sampling_texts.source_number_X
        sampling_name = sampling_name_of(sampling.temperature, sampling.top_p)
        yield from compared(
            replays, BASES, [SELECTOR], source_X, setting=sampling_name, clock=machine
        )
