"""What a selector is worth on every kind of work, beside the best fixed choice for all of it and for that kind alone.

    .venv/bin/python -m pipelines.studies.workloads configs/workloads.yaml

Replays the held-out texts of a run that has been trained, on this machine's clock and on synthetic ones, and prints one
Markdown table a clock. A *fixed choice* is what an engine is set to: one tree for all steps, or prompt lookup of a
fixed length wherever a match is long enough and nothing elsewhere. The best of them is taken, by the training texts.
Speeds are over the fixed choice that is best for all kinds together. What the selector gains over the choice that is
best for one kind, it gains by looking at the text.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces, settings_of
from pipelines.evaluate.methods import SPACE
from pipelines.evaluate.replays import synthetic_clocks
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import load_pair
from pipelines.run import console
from pipelines.train.judging import Statics, judge, judge_rules, statics
from pipelines.train.result import chosen_of, load_module, load_result
from pipelines.train.stage import kept
from selector.actions import EMPTY
from selector.decision import LookupRule, Mode
from selector.latency import LatencyProfile, gpu_like
from selector.schema import MATCH
from selector.tables import Table
from selector.train.data import Setting, Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import ratio_of_speeds
from selector.train.tuning import LEASTS, StaticTable, best_static, replay_mode, sources, tune_lookup_rule

EVERYTHING = "all kinds"
LENGTHS = (4, 8, 16)  # of lookups
STEP = 8  # tokens that a pass of the step-shaped clock takes at the price of one


def main(config: Config) -> None:
    result = load_result(config)
    pair = load_pair(config)
    profile = load_profile(config, pair)
    splits = load_traces(config, profile.pair)
    module = load_module(config, result["chosen"], result)
    modes = list(map(Mode.of, chosen_of(result)["modes"]))
    print_table(config, "this machine", splits, profile, modes, module)
    clocks = synthetic_clocks(config, pair) | {f"steps of {STEP} tokens": step_shaped(pair.fingerprint, config)}
    for name, clock in clocks.items():
        bases = statics(splits, settings_of(config), config.train.verifier, clock)
        print_table(config, name, splits, clock, retuned(config, splits, bases, clock, module), module)


def step_shaped(pair: str, config: Config) -> LatencyProfile:
    """A clock on which the target's pass costs more with every `STEP` tokens: half a pass of one token."""
    flat = gpu_like(pair, config.verifiers, 0.05)
    one = flat.target.seconds[0][0]
    steps = range(64 // STEP)
    edges = [edge for n in steps for edge in (n * STEP + 1, (n + 1) * STEP)]
    heights = [one * (1 + 0.5 * n) for n in steps for _ in range(2)]
    return replace(flat, device=f"synthetic: steps of {STEP} tokens", target=Table([1], edges, [heights]))


def retuned(
    config: Config, splits: dict[str, Texts], bases: list[Statics], clock: LatencyProfile, module: SelectorModule
) -> list[Mode]:
    """How the selector decides on another clock, tuned as training tunes it on this machine's."""
    verifier = config.train.verifier
    judged = judge(module, splits["validation"], bases, verifier, clock)
    rules = judge_rules(splits, bases, verifier, clock)
    return [kept(*each).mode for each in zip(judged, rules, [base.mode for base in bases], strict=True)]


def print_table(
    config: Config,
    clock: str,
    splits: dict[str, Texts],
    profile: LatencyProfile,
    modes: list[Mode],
    module: SelectorModule,
) -> None:
    console.print(f"\n**{clock}**\n", highlight=False)
    heads = (
        "setting | work | texts | fixed choice for it | its speed | rule | selector | over that choice | over the rule"
    )
    console.print(f"| {heads} |", soft_wrap=True)
    console.print("|---|---|---|---|---|---|---|---|---|")
    for setting, mode in zip(settings_of(config), modes, strict=True):
        train, held_out = (splits[split].setting_of(setting) for split in ("train", "test"))
        for row in rows(config, setting, train, held_out, profile, mode, module):
            console.print("| " + " | ".join(row) + " |", soft_wrap=True, highlight=False)


def rows(
    config: Config,
    setting: Setting,
    train: Texts,
    held_out: Texts,
    profile: LatencyProfile,
    mode: Mode,
    module: SelectorModule,
) -> Iterator[list[str]]:
    """One row of the table for all kinds, then one for each."""
    verifier = config.train.verifier
    fixed = FixedChoices.of(config, setting, train, profile)
    learned = Timed(train, verifier, profile)
    rule = tune_lookup_rule(learned, best_static(learned, StaticTable.of(learned), setting))
    overall = fixed.best(of_kind(train, EVERYTHING))
    for kind in (EVERYTHING, *sorted(set(held_out.kind_X))):
        mine = held_out.take(of_kind(held_out, kind))
        timed = Timed(mine, verifier, profile)
        own = fixed.best(of_kind(train, kind))
        base, best = (replay_mode(Timed(mine, choice.verifier, profile), {}, choice.mode) for choice in (overall, own))
        selector = replay_mode(timed, module.predictions(mine, mode), mode, not module.is_regressor)
        ruled = replay_mode(timed, {}, rule)
        pairs = ((best, base), (ruled, base), (selector, base), (selector, best), (selector, ruled))
        ratios = [str(ratio_of_speeds(a, b, sources(mine))) for a, b in pairs]
        yield [f"T = {setting[0]:g}", kind, str(len(mine)), str(own), *ratios]


def of_kind(texts: Texts, kind: str) -> Tensor:
    """Numbers of the texts of one kind, or of all."""
    return torch.tensor([x for x, own in enumerate(texts.kind_X) if kind in (own, EVERYTHING)])


class FixedChoice(NamedTuple):
    verifier: str
    mode: Mode

    def __str__(self) -> str:
        rule = self.mode.rule
        return (
            f"{self.mode.action} {self.verifier}" if rule is None else f"lookup of {rule.length} from {rule.least} on"
        )


@dataclass(frozen=True)
class FixedChoices:
    """All fixed choices on some texts: every tree with every verifier, and lookups alone. C choices, X texts."""

    choices_C: list[FixedChoice]
    tokens_XC: Tensor
    seconds_XC: Tensor

    @classmethod
    def of(cls, config: Config, setting: Setting, texts: Texts, profile: LatencyProfile) -> FixedChoices:
        choices, tokens, seconds = [], [], []
        for verifier in config.verifiers:
            table = StaticTable.of(Timed(texts, verifier, profile))
            choices += [FixedChoice(verifier, Mode(*setting, tree)) for tree in SPACE.trees]
            tokens.append(table.tokens_XA)
            seconds.append(table.seconds_XA)
        verifier = config.train.verifier  # any will do: copies are checked by one for all
        timed = Timed(texts, verifier, profile)
        for least, length in itertools.product(LEASTS, LENGTHS):
            mode = Mode(*setting, EMPTY, feature_levels=(MATCH,), rule=LookupRule(least, length))
            replayed = replay_mode(timed, {}, mode)
            choices.append(FixedChoice(verifier, mode))
            tokens.append(replayed.tokens_X[:, None])
            seconds.append(replayed.seconds_X[:, None])
        return cls(choices, torch.cat(tokens, dim=1), torch.cat(seconds, dim=1))

    def best(self, index_X: Tensor) -> FixedChoice:
        """The fastest on some of the texts."""
        speed_C = self.tokens_XC[index_X].sum(0) / self.seconds_XC[index_X].sum(0)
        return self.choices_C[int(speed_C.argmax())]


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[2:]))
