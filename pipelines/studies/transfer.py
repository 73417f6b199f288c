"""Replays selectors where they were not trained: on longer texts, or under other sampling settings.

    cp -r runs/demo runs/long
    .venv/bin/espalier data --config configs/demo.yaml name=long data.tokens=1100 data.texts=48
    .venv/bin/python -m pipelines.studies.transfer configs/demo.yaml --on name=long data.tokens=1100 data.texts=48

What follows an `--on` changes the config for another run, whose stages up to `data` must be finished; there may be
several. Networks are trained on the first run's texts with three seeds, and tuned there, as are the lookup rules. All
are replayed on the held-out texts of the other runs, or of the first one where there is no `--on`, from the beginning
and from token `LATE` on. A sampling setting that no mode covers is decided as by `Selector.at`: by a lookup rule and
static trees that follow the accepted lengths from text to text. These depend on what happened before, so they are
simulated, `RUNS` times for each text. Speeds are relative to the best static tree for the other run's training texts.

Legend: X texts, R roots, T trees, A actions, J accepted lengths + 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path

import torch

from data_gen.models.sampling import Sampling
from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces
from pipelines.latency.profile import load_profile
from pipelines.run import console
from pipelines.tracking import mlflow_run
from pipelines.train.fitting import module_of
from pipelines.train.judging import by_setting, judge, judge_rules, statics, tune_rules
from pipelines.train.stage import SECTIONS, keep_if_ahead, trained
from selector.decision import Mode, nearest
from selector.latency import LatencyProfile
from selector.runtime.online import Online
from selector.schema import LIGHT
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed, outcomes, ratio_of_speeds
from selector.train.tuning import replay_mode

SEEDS, LATE = 3, 500
TREE = "tree of the nearest setting"
RUNS = 20
HEADS = "setting | tokens | texts | lookup rule | selector: each seed | lowest over the lookup rule"
Seed = tuple[SelectorModule, list[Mode]]


def main(config: Config, others: list[Config]) -> None:
    rules, seeds, trees = _trained(config, load_profile(config))
    for other in others:
        profile = load_profile(other)
        theirs = load_traces(other, profile.pair)
        train, held_out = (by_setting(other, theirs[split], profile) for split in ("train", "test"))
        console.print(f"\n{other.name}\n\n| {HEADS} |\n{'|---' * 6}|", soft_wrap=True, highlight=False)
        for base, timed in zip(statics(other, train), held_out, strict=True):
            for first in (0, LATE):
                if bool((timed.texts.size_X > first).any()):
                    row = _row(_from(timed, first), first, base, rules, seeds, trees)
                    console.print(f"| {' | '.join(row)} |", soft_wrap=True, highlight=False)


def _trained(config: Config, profile: LatencyProfile) -> tuple[list[Mode], list[Seed], list[Mode]]:
    """The lookup rules, for each seed a network with the mode of each setting, and the static trees."""
    splits, verifier = load_traces(config, profile.pair), config.train.verifier
    train, validation = (by_setting(config, splits[split], profile) for split in ("train", "validation"))
    bases = statics(config, train)
    rules = tune_rules(train, {verifier: bases})
    judged_rules = judge_rules(rules, validation, bases)
    seeds = []
    for seed in range(config.seed, config.seed + SEEDS):
        own = config.model_copy(update={"seed": seed})
        with mlflow_run(own, "transfer", SECTIONS) as mlflow:
            run_id = mlflow.active_run().info.run_id
            folder = config.folder / "transfer" / str(seed)
            module = module_of(own, "regressor", LIGHT, [])
            module = trained(own, module, splits, validation, bases, folder, run_id)
        each = zip(judge(module, validation, bases), judged_rules, bases, strict=True)
        seeds.append((module, [keep_if_ahead(judged, rule, base, module.longest).mode for judged, rule, base in each]))
    return [rule[verifier] for rule in rules], seeds, bases


def _from(timed: Timed, first: int) -> Timed:
    """The texts from their root number `first` on, without those that end before."""
    if first == 0:
        return timed
    texts = timed.texts.take((timed.texts.size_X > first).nonzero()[:, 0])
    kept_R = texts.number_R >= first
    rows = {each.name: getattr(texts, each.name)[kept_R] for each in fields(Texts) if each.name.endswith(("_R", "_RF"))}
    survivals = {name: labels[kept_R] for name, labels in texts.survivals.items()}
    cut = replace(texts, size_X=texts.size_X - first, survivals=survivals, from_the_start=True, **rows)
    return Timed(cut, timed.verifier, timed.profile)


def online(timed: Timed, mode: Mode) -> Replayed:
    """What follows the accepted lengths from text to text, from the mode of the nearest trained setting on: means over
    `RUNS` simulations, each with the texts in another order."""
    space, seconds_RA = timed.space, timed.seconds(mode.feature_levels)
    actions = [*space.trees, *([mode.rule.lookup] if mode.rule else [])]
    seconds = seconds_RA[:, list(map(space.index, actions))].double().mean(0)
    fresh = Online(space, mode, seconds, range(len(space)))
    generator = torch.Generator().manual_seed(0)
    sums_X3 = torch.zeros(len(timed.texts), 3, dtype=torch.float64)
    size_X, begin_X = timed.texts.size_X, timed.texts.size_X.cumsum(0) - timed.texts.size_X
    match_R = timed.texts.scalar("match").masked_fill(timed.texts.unknown_R, 0).tolist()
    for _ in range(RUNS):
        follows = copy(fresh)
        for x in torch.randperm(len(size_X), generator=generator).tolist():
            root, size = 0, int(size_X[x])
            while root < size:
                at = int(begin_X[x]) + root
                action = follows.choose(match_R[at])
                a = space.index(action)
                law_J = outcomes(timed.survivals_RS[at : at + 1], torch.tensor([a]), space)[0].clamp(min=0)
                tau = int(torch.multinomial(law_J, 1, generator=generator))
                sums_X3[x] += torch.tensor([min(tau + 1, size - root), float(seconds_RA[at, a]), 1.0])
                follows.observe(action, tau)
                root += tau + 1
    tokens_X, seconds_X, steps_X = (sums_X3 / RUNS).unbind(-1)
    return Replayed(tokens_X, seconds_X, steps_X, torch.zeros(0))


def _row(
    timed: Timed, first: int, base: Mode, rules: list[Mode], seeds: list[Seed], trees: list[Mode]
) -> Iterator[str]:
    """A line of the table; `trees` are the best static ones of the trained settings."""
    sources, found = timed.texts.source_number_X, []
    static, rule = (replay_mode(timed, {}, mode) for mode in (base, _nearest(rules, base)))
    if any(_covers(mode, base) for mode in trees):
        for module, modes in seeds:
            mode = _nearest(modes, base)
            found.append((_decider(mode), replay_mode(timed, module.predictions(timed.texts, mode), mode)))
    else:
        tree = _nearest(trees, base)
        found.append((TREE, replay_mode(timed, {}, tree)))
        follows = replace(_nearest(seeds[0][1], base).by_rule(), action=tree.action)
        found.append(("follows", online(timed, follows)))
    yield str(Sampling(*base.setting, top_k=base.top_k, min_p=base.min_p))
    yield f"from {first}" if first else "all"
    yield str(len(timed.texts))
    yield str(ratio_of_speeds(rule, static, sources))
    yield "; ".join(f"{ratio_of_speeds(own, static, sources)} {decider}" for decider, own in found)
    judged = [own for decider, own in found if decider != TREE]
    lowest = min((ratio_of_speeds(own, rule, sources) for own in judged), key=lambda ratio: ratio.value)
    yield str(lowest)


def _nearest(modes: list[Mode], base: Mode) -> Mode:
    return nearest(modes, *base.setting, top_k=base.top_k, min_p=base.min_p)


def _covers(mode: Mode, base: Mode) -> bool:
    return mode.covers(*base.setting, base.top_k, base.min_p)


def _decider(mode: Mode) -> str:
    return "network" if mode.decides else "rule" if mode.rule else "tree"


if __name__ == "__main__":
    path, parts = Path(sys.argv[1]), [list(part) for on, part in groupby(sys.argv[2:], "--on".__ne__) if on]
    shared = parts.pop(0) if sys.argv[2:3] != ["--on"] and parts else []
    main(load_config(path, shared), [load_config(path, [*shared, *part]) for part in parts or [[]]])
