"""The replay of every method with one verifier under one sampling setting, on every clock.

A *cell* is a kind of prompts under a setting. Each cell's labels are made lawful by themselves,
static trees are chosen on its training texts, and where a selector does not decide, it drafts the
cell's static tree, a greedy one only if it may choose these. Whether it decides is judged on the
setting's validation texts of all kinds.

Legend: X texts, A actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.evaluate.methods import COPYING
from pipelines.train.judging import judge, keep_if_ahead
from selector.actions import Action, ActionSpace
from selector.decision import NETWORK, RULE, Mode
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.schema import FULL, LIGHT
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed, fastest_possible
from selector.train.tuning import (
    Judged,
    StaticTable,
    best_static,
    judge_mode,
    replay_mode,
    tune_lookup_rule,
)

TREES = "trees"
GREEDY = "greedy trees"
COPIES = "copies"
BOTH = "greedy trees and copies"
SPACES = (TREES, GREEDY, COPIES, BOTH)
HIDDEN = "trees, with hidden states"
OF = {  # the actions of each kind of selector
    TREES: ActionSpace.default(),
    GREEDY: ActionSpace.recorded(),
    COPIES: ActionSpace.with_lookups(),
    BOTH: ActionSpace.of_pairs(),
    HIDDEN: ActionSpace.default(),
}
# DDTE: the first one's selector is faster than the other's static trees
CLAIMED = ("specinfer", "traversal")
BOTTOM_UP = ("traversal", "lifted_uniform")  # DDTE has no policy of theirs
HERE = "this machine"
AT_ROOT = "root tree"
DELAYED = "delayed tree"
DELAYED_OR_GREEDY = f"{DELAYED} or {GREEDY}"
PRINTED = "policy (eq. 12)"
ORACLE = "oracle"
RIVAL = "traversal", AT_ROOT  # that speeds are over


def _begins_at_root(tree: Action) -> bool:
    """Whether a tree has no trunk before its branches; a chain, nothing after its trunk."""
    if tree.K > 1:
        return tree.L1 == 0
    return tree.L2 == 0


# which trees are tried as static ones
STATIC = {
    TREES: {
        AT_ROOT: torch.tensor([_begins_at_root(tree) for tree in OF[TREES].trees]),
        f"{DELAYED} of 8": torch.tensor([tree.L1 + tree.L2 <= 8 for tree in OF[TREES].trees]),
        DELAYED: torch.ones(len(OF[TREES].trees), dtype=torch.bool),
    },
    GREEDY: {DELAYED_OR_GREEDY: torch.ones(len(OF[GREEDY].trees), dtype=torch.bool)},
}
# which of these static trees is drafted where a selector does not decide
FALLBACK = {TREES: DELAYED, GREEDY: DELAYED_OR_GREEDY}
KEPT = ", or the rule"  # what `train` would keep of a network that may copy
# static trees that are chosen by tokens per step instead of speed
BY_STEPS = ", by tokens per step"


class Network(NamedTuple):
    """A regressor: its verifier and its kind of actions."""

    verifier: str
    actions: str

    @property
    def level(self) -> str:
        return FULL if self.actions == HIDDEN else LIGHT


def asked(verifiers: Sequence[str], features: str) -> list[Network]:
    """Each verifier's over trees; with hidden states, if the traces have them, those of DDTE's
    claim; and over further actions the bottom-up ones'."""
    networks = [Network(name, TREES) for name in verifiers]
    if features == FULL:
        networks += [Network(name, HIDDEN) for name in CLAIMED]
    networks += [Network(name, actions) for name, actions in product(BOTTOM_UP, SPACES[1:])]
    return [network for network in networks if network.verifier in verifiers]


def of_verifier(splits: Mapping[str, Texts], verifier: str, actions: str) -> dict[str, Texts]:
    """The texts with one verifier's labels of some actions."""
    labelled = {}
    for split, texts in splits.items():
        survivals = {verifier: texts.survivals[verifier]}
        labelled[split] = replace(texts, survivals=survivals, space=OF[actions])
    return labelled


class _Family(NamedTuple):
    """Methods that may draft the same trees."""

    drafted: str  # the actions without copies
    copied: str  # the same actions with copies
    suffix: str  # of the names of methods that both families have

    @property
    def has_styles(self) -> bool:
        return bool(OF[self.drafted].styles)


SAMPLED_TREES = _Family(TREES, COPIES, "")
GREEDY_TREES = _Family(GREEDY, BOTH, f", {GREEDY}")


class _SettingTexts:
    """One verifier's texts of one sampling setting; `in_kind` are the held-out ones by kind of
    prompts, bool [X]."""

    def __init__(
        self,
        splits: Mapping[str, Texts],
        verifier: str,
        sampling: Sampling,
        profile: LatencyProfile,
    ) -> None:
        self._splits = splits
        self._verifier = verifier
        self._sampling = sampling
        self._profile = profile
        self._timed: dict[tuple[str, str, str], Timed] = {}
        kind_X = self._labelled("test", TREES, "").texts.kind_X
        self.in_kind: dict[str, Tensor] = {}
        for kind in dict.fromkeys(kind_X):
            self.in_kind[kind] = torch.tensor([text_kind == kind for text_kind in kind_X])
        self._count = len(kind_X)

    def timed(self, profile: LatencyProfile, split: str, actions: str, kind: str = "") -> Timed:
        """The texts of a kind of prompts with a clock's times; those of all kinds where the split
        has none of this one, and where no kind is named."""
        return self._labelled(split, actions, kind).on(profile)

    def empty_totals(self) -> Tensor:
        """Room for the tokens, seconds and steps of each held-out text, float64 [3, X]."""
        return torch.zeros(3, self._count, dtype=torch.float64)

    def _labelled(self, split: str, actions: str, kind: str) -> Timed:
        # all clocks share these, since it takes long to make labels lawful
        key = split, actions, kind
        if key not in self._timed:
            labelled = of_verifier(self._splits, self._verifier, actions)
            texts = labelled[split].setting_of(self._sampling)
            is_of_kind_X = torch.tensor([text_kind == kind for text_kind in texts.kind_X])
            index_X = is_of_kind_X.nonzero()[:, 0]
            if len(index_X):
                texts = texts.take(index_X)
            self._timed[key] = Timed(texts, self._verifier, self._profile)
        return self._timed[key]


class _StaticTrees(NamedTuple):
    """Static trees on one clock."""

    totals: dict[str, Tensor]  # as of `replays`, by tree
    base: Mode  # the best tree for all kinds of prompts
    fallbacks: dict[str, Action]  # by kind of prompts, what is drafted where nothing decides


class _NetworkMethod(NamedTuple):
    """A method that asks a network, with what it may choose from."""

    method: str
    actions: str
    module: SelectorModule


def replays(
    verifier: str,
    sampling: Sampling,
    splits: Mapping[str, Texts],
    clocks: Mapping[str, LatencyProfile],
    modules: Mapping[Network, SelectorModule],
    policies: Mapping[str, SelectorModule],  # of equation 12, by clock
) -> dict[tuple[str, str], Tensor]:
    """Tokens, seconds and steps of each held-out text, float64 [3, X], by clock and method; all of
    one verifier."""
    texts = _SettingTexts(splits, verifier, sampling, clocks[HERE])
    families = [SAMPLED_TREES]
    if verifier in BOTTOM_UP:
        families.append(GREEDY_TREES)
    totals: dict[tuple[str, str], Tensor] = {}
    for (clock, profile), family in product(clocks.items(), families):
        deciding = list(_selectors(family, modules))
        if clock in policies:
            deciding.append(_NetworkMethod(PRINTED, TREES, policies[clock]))
        static = _static_trees(texts, profile, family, with_steps=clock == HERE)
        for method, method_totals in static.totals.items():
            totals[clock, method] = method_totals
        for method, method_totals in _deciders(texts, profile, family, static, deciding).items():
            totals[clock, method] = method_totals
    return totals


def _selectors(
    family: _Family, modules: Mapping[Network, SelectorModule]
) -> Iterator[_NetworkMethod]:
    """The selectors of a family."""
    for network, module in modules.items():
        if bool(OF[network.actions].styles) == family.has_styles:
            yield _NetworkMethod(f"selector, {network.actions}", network.actions, module)


def _static_trees(
    texts: _SettingTexts, profile: LatencyProfile, family: _Family, with_steps: bool
) -> _StaticTrees:
    """Trees that are chosen on each kind's training texts by speed; `with_steps`, also by tokens
    per step. Last the oracle, which is a bound for all trees."""
    totals: dict[str, Tensor] = {}

    def fill(name: str, in_kind_X: Tensor, totals_3X: Tensor) -> None:
        if name not in totals:
            totals[name] = texts.empty_totals()
        totals[name][:, in_kind_X] = totals_3X

    fallbacks: dict[str, Action] = {}
    tables: list[StaticTable] = []
    trees = OF[family.drafted].trees
    tried = STATIC[family.drafted]
    for kind, in_kind_X in texts.in_kind.items():
        train = texts.timed(profile, "train", family.drafted, kind)
        test = texts.timed(profile, "test", family.drafted, kind)
        train_table = StaticTable.of(train)
        tables.append(train_table)
        test_3XA = torch.stack(StaticTable.of(test))
        for name, allowed_A in tried.items():
            fill(name, in_kind_X, test_3XA[..., train_table.best(allowed_A)])
            if with_steps:
                most_tokens = int(train_table.efficiencies().where(allowed_A, 0.0).argmax())
                fill(name + BY_STEPS, in_kind_X, test_3XA[..., most_tokens])
        fallbacks[kind] = trees[train_table.best(tried[FALLBACK[family.drafted]])]
        oracle = fastest_possible(test.survivals_RS, test.seconds(), test.texts.size_X, test.space)
        fill(ORACLE + family.suffix, in_kind_X, _totals(oracle))
    table_of_all = StaticTable(*map(torch.cat, zip(*tables, strict=True)))
    base = best_static(texts.timed(profile, "train", family.drafted), table_of_all)
    return _StaticTrees(totals, base, fallbacks)


def _deciders(
    texts: _SettingTexts,
    profile: LatencyProfile,
    family: _Family,
    static: _StaticTrees,
    deciding: Sequence[_NetworkMethod],
) -> dict[str, Tensor]:
    """Totals of the lookup rule and of every method that asks a network; and, where this may copy,
    those of what `train` would keep of it."""
    copying = COPYING + family.suffix
    rule = tune_lookup_rule(texts.timed(profile, "train", family.copied), static.base)
    totals = {copying: _rule_totals(texts, profile, family, static, rule)}
    validation = texts.timed(profile, "validation", family.copied)
    judged_rule = judge_mode(validation, {}, rule, static.base.action)
    for network in deciding:
        validation = texts.timed(profile, "validation", network.actions)
        (judged,) = judge(network.module, [validation], [static.base])
        totals[network.method] = _network_totals(texts, profile, static, network, judged)
        if OF[network.actions].lookups:
            decider = keep_if_ahead(judged, judged_rule, static.base).mode.decider
            if decider == NETWORK:
                kept_totals = totals[network.method]
            elif decider == RULE:
                kept_totals = totals[copying]
            else:
                kept_totals = static.totals[FALLBACK[family.drafted]]
            totals[network.method + KEPT] = kept_totals
    return totals


def _rule_totals(
    texts: _SettingTexts,
    profile: LatencyProfile,
    family: _Family,
    static: _StaticTrees,
    rule: Mode,
) -> Tensor:
    """Of the lookup rule; where it drafts the best static tree, it drafts each kind's own."""
    totals_3X = texts.empty_totals()
    for kind, in_kind_X in texts.in_kind.items():
        mode = rule
        if rule.action == static.base.action:
            mode = replace(rule, action=static.fallbacks[kind])
        replayed = replay_mode(texts.timed(profile, "test", family.copied, kind), {}, mode)
        totals_3X[:, in_kind_X] = _totals(replayed)
    return totals_3X


def _network_totals(
    texts: _SettingTexts,
    profile: LatencyProfile,
    static: _StaticTrees,
    network: _NetworkMethod,
    judged: Judged,
) -> Tensor:
    """Of a network's best mode, or of each kind's static tree where that mode does not pay."""
    module = network.module
    decides = judged.pays or network.method == PRINTED  # as in the paper, where it always does
    totals_3X = texts.empty_totals()
    for kind, in_kind_X in texts.in_kind.items():
        test = texts.timed(profile, "test", network.actions, kind)
        mode = replace(judged.mode, action=static.fallbacks[kind])
        if not decides:
            mode = mode.static_only()
        predicted = module.predictions(test.texts, mode)
        replayed = replay_mode(test, predicted, mode, policy=not module.is_regressor)
        totals_3X[:, in_kind_X] = _totals(replayed)
    return totals_3X


def _totals(replayed: Replayed) -> Tensor:
    return torch.stack([replayed.tokens_X, replayed.seconds_X, replayed.steps_X])
