"""Compares a selector on every kind of work with the best fixed choice for all kinds, and with the best for that kind.

    .venv/bin/python -m pipelines.studies.workloads configs/results.yaml

Replays a trained run's held-out texts with this machine's times and with synthetic ones; prints a Markdown table for
each. A *fixed choice* is one tree for all steps, or a prompt lookup of a fixed length wherever the match is long enough
and nothing elsewhere; it is chosen on the training texts. Speeds are relative to the best one for all kinds together.
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
from pipelines.evaluate.replays import synthetic_clocks
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import load_pair
from pipelines.run import console
from pipelines.train.judging import by_setting, judge, judge_rules, statics, tune_rules
from pipelines.train.result import chosen_of, load_module, load_result, rule_of
from pipelines.train.stage import keep_if_ahead
from selector.actions import EMPTY
from selector.decision import LookupRule, Mode
from selector.latency import LatencyProfile, gpu_like
from selector.schema import MATCH
from selector.tables import Table
from selector.train.data import Setting, Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import ratio_of_speeds
from selector.train.tuning import LEASTS, StaticTable, replay_mode

EVERYTHING = "all kinds"
LENGTHS = (4, 8, 16)  # of lookups
STEP = 8  # tokens; a pass of the step-shaped profile costs more with every STEP tokens
HEADS = (
    "setting | work | texts | fixed choice for it | its speed | lookup rule | selector | over that choice | "
    "over the lookup rule"
)


def main(config: Config) -> None:
    result, pair, verifier = load_result(config), load_pair(config), config.train.verifier
    measured = load_profile(config, pair)
    splits, module = load_traces(config, measured.pair), load_module(config, result["chosen"], result)
    clocks = synthetic_clocks(config, pair) | {f"steps of {STEP} tokens": step_shaped(pair.fingerprint, config)}
    for name, profile in {"this machine": measured, **clocks}.items():
        if profile is measured:
            modes = list(map(Mode.of, chosen_of(result)["modes"]))
            rules = [rule_of(result, setting, verifier) for setting in settings_of(config)]
        else:  # tuned as training does it
            train, validation = (by_setting(config, splits[split], profile) for split in ("train", "validation"))
            bases = statics(config, train)
            judged, tuned = judge(module, validation, bases), tune_rules(train, {verifier: bases})
            rules = [rule[verifier] for rule in tuned]
            judged_rules = judge_rules(tuned, validation, bases)
            each = zip(judged, judged_rules, bases, strict=True)
            modes = [keep_if_ahead(own, rule, base, module.longest).mode for own, rule, base in each]
        console.print(f"\n**{name}**\n\n| {HEADS} |\n{'|---' * 9}|", soft_wrap=True, highlight=False)
        for mode, rule in zip(modes, rules, strict=True):
            for row in rows(config, splits, profile, mode, rule, module):
                console.print(f"| {' | '.join(row)} |", soft_wrap=True, highlight=False)


def step_shaped(pair: str, config: Config) -> LatencyProfile:
    """A latency profile in which every `STEP` tokens add half the time of a target pass over one token."""
    flat = gpu_like(pair, config.verifiers, 0.05)
    one = flat.target.seconds[0][0]
    steps = range(64 // STEP)
    edges = [edge for n in steps for edge in (n * STEP + 1, (n + 1) * STEP)]
    heights = [one * (1 + 0.5 * n) for n in steps for _ in range(2)]
    return replace(flat, device=f"synthetic: steps of {STEP} tokens", target=Table([1], edges, [heights]))


def rows(
    config: Config, splits: dict[str, Texts], profile: LatencyProfile, mode: Mode, rule: Mode, module: SelectorModule
) -> Iterator[list[str]]:
    """One row of the table for all kinds, then one for each."""
    setting, verifier = (mode.temperature, mode.top_p), config.train.verifier
    train, held_out = (splits[split].setting_of(setting) for split in ("train", "test"))
    fixed = FixedChoices.of(config, setting, train, profile)
    overall = fixed.best(of_kind(train, EVERYTHING))
    for kind in (EVERYTHING, *sorted(set(held_out.kind_X))):
        mine = held_out.take(of_kind(held_out, kind))
        timed, own = Timed(mine, verifier, profile), fixed.best(of_kind(train, kind))
        base, best = (replay_mode(Timed(mine, choice.verifier, profile), {}, choice.mode) for choice in (overall, own))
        selector = replay_mode(timed, module.predictions(mine, mode), mode, not module.is_regressor)
        ruled = replay_mode(timed, {}, rule)
        pairs = ((best, base), (ruled, base), (selector, base), (selector, best), (selector, ruled))
        ratios = [str(ratio_of_speeds(a, b, mine.source_number_X)) for a, b in pairs]
        yield [f"T = {setting[0]:g}", kind, str(len(mine)), str(own), *ratios]


def of_kind(texts: Texts, kind: str) -> Tensor:
    """Numbers of the texts of one kind, or of all."""
    return torch.tensor([x for x, own in enumerate(texts.kind_X) if kind in (own, EVERYTHING)])


class FixedChoice(NamedTuple):
    verifier: str
    mode: Mode

    def __str__(self) -> str:
        rule = self.mode.rule
        return f"lookup of {rule.length} from {rule.least} on" if rule else f"{self.mode.action} {self.verifier}"


@dataclass(frozen=True)
class FixedChoices:
    """All fixed choices on some texts: every tree with every verifier, and lookups alone. C choices, X texts."""

    choices_C: list[FixedChoice]
    tokens_XC: Tensor
    seconds_XC: Tensor

    @classmethod
    def of(cls, config: Config, setting: Setting, texts: Texts, profile: LatencyProfile) -> FixedChoices:
        found: list[tuple[FixedChoice, Tensor, Tensor]] = []
        for verifier in config.verifiers:
            timed = Timed(texts, verifier, profile)
            table = StaticTable.of(timed)
            choices = [FixedChoice(verifier, Mode(*setting, tree)) for tree in timed.space.trees]
            found += zip(choices, table.tokens_XA.T, table.seconds_XA.T, strict=True)
        timed = Timed(texts, config.train.verifier, profile)  # all verifiers check copies alike
        for least, length in itertools.product(LEASTS, LENGTHS):
            mode = Mode(*setting, EMPTY, feature_levels=(MATCH,), rule=LookupRule(least, length))
            replayed = replay_mode(timed, {}, mode)
            found.append((FixedChoice(timed.verifier, mode), replayed.tokens_X, replayed.seconds_X))
        every, tokens, seconds = zip(*found, strict=True)
        return cls(list(every), torch.stack(tokens, dim=1), torch.stack(seconds, dim=1))

    def best(self, index_X: Tensor) -> FixedChoice:
        """The fastest on some of the texts."""
        speed_C = self.tokens_XC[index_X].sum(0) / self.seconds_XC[index_X].sum(0)
        return self.choices_C[int(speed_C.argmax())]


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[2:]))
