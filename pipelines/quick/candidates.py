"""The ways to decode that `quick` compares: every verifier's fastest tree, and copies of earlier text.

They are chosen on the texts of every other source and judged on those between, by their speed over plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from data_gen.verification import get_verifier
from data_gen.verification.one_path import FirstPath
from selector.actions import EMPTY
from selector.decision import LookupRule, Mode
from selector.latency import LatencyProfile
from selector.schema import MATCH, InputError
from selector.train.data import Texts, Timed
from selector.train.tuning import LEASTS, Judged, StaticTable, judge_mode, replay_mode, tune_lookup_rule

SOURCES = 4  # at least: two to choose on, and two to judge on


@dataclass(frozen=True)
class Candidate:
    """A static tree or a lookup rule, with its verifier.

    Attributes:
        chosen: its speed over plain decoding on the texts on which it was chosen.
        judged: the same on the others.
    """

    verifier: str
    mode: Mode
    chosen: Judged
    judged: Judged

    @property
    def efficiency(self) -> float:
        """Tokens per step on the texts on which it is judged."""
        assert self.judged.replayed is not None
        return self.judged.replayed.block_efficiency

    @property
    def is_plain(self) -> bool:
        return self.mode.rule is None and self.mode.action == EMPTY

    def __str__(self) -> str:
        tree, rule = self.mode.action, self.mode.rule
        if rule is None:
            return "no draft" if tree == EMPTY else str(tree)
        copies = f"copy {rule.length} after a match of {rule.least}"
        return copies if tree == EMPTY else f"{copies}, else {tree}"


def halves(texts: Texts) -> tuple[Texts, Texts]:
    """The texts of every other source, and the others; InputError where one half has fewer than two sources."""
    number_X = texts.source_number_X
    if len(number_X.unique()) < SOURCES:
        raise InputError(f"quick: {len(number_X.unique())} sources have texts that can be labelled: four are needed")
    first, second = (texts.take((number_X % 2 == parity).nonzero()[:, 0]) for parity in (0, 1))
    return first, second


def candidates(texts: Texts, profile: LatencyProfile, verifiers: Sequence[str]) -> list[Candidate]:
    """The fastest tree of every verifier, the fastest of them first; then, with its verifier, lookups and nothing else,
    and the lookup rule, which drafts a tree where nothing is copied."""
    parts = {name: [Timed(half, name, profile) for half in halves(texts)] for name in verifiers}
    trees = {name: _fastest_tree(timed) for name, (timed, _) in parts.items()}
    ordered = sorted(verifiers, key=lambda name: trees[name].speed, reverse=True)
    timed, static = parts[ordered[0]][0], trees[ordered[0]]
    found = [(name, trees[name]) for name in ordered]
    found += [(ordered[0], mode) for mode in (_fastest_lookup(timed), tune_lookup_rule(timed, static))]
    return [Candidate(name, mode, *(judge_mode(own, {}, mode, EMPTY) for own in parts[name])) for name, mode in found]


def best_of(found: Sequence[Candidate]) -> Candidate:
    """The fastest tree, unless copies are ahead of it by a standard error on the texts on which they were chosen."""
    best, *_, lookup, rule = found
    for other in (lookup, rule):
        if other.chosen.is_ahead_of(best.chosen):
            best = other
    return best


def _fastest_tree(timed: Timed) -> Mode:
    """The other branches of a verifier that never accepts them cannot pay, though by chance they may seem to."""
    table, chains_only = StaticTable.of(timed), isinstance(get_verifier(timed.verifier), FirstPath)
    allowed_A = torch.tensor([not chains_only or tree.K == 1 for tree in timed.space.trees])
    best = table.best(allowed_A=allowed_A)
    return Mode(*timed.setting, timed.space.trees[best], speed=float(table.speeds()[best]))


def _fastest_lookup(timed: Timed) -> Mode:
    """Lookups of one length from some match on, and no draft elsewhere."""
    rules = (LookupRule(*each) for each in product(LEASTS, timed.space.lookups))
    modes = [Mode(*timed.setting, EMPTY, (MATCH,), rule=rule) for rule in rules]
    return max(modes, key=lambda mode: replay_mode(timed, {}, mode).speed)
