"""The replay of every method with one verifier under one sampling setting, on every machine.

A *cell* is a kind of prompts under a setting. Each cell's labels are projected by themselves
(`monotone`), static trees are chosen on its training texts, and where a selector does not decide,
it drafts the cell's static tree, a greedy one only if it may choose these. Whether it decides is
judged on the setting's validation texts of all kinds.

Legend: X texts, A actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.evaluate.methods import COPYING
from pipelines.evaluate.replays import oracle, replay
from pipelines.evaluate.table import HERE
from pipelines.train.judging import judge, keep_if_ahead
from selector.actions import Action, ActionSpace
from selector.decision import NETWORK, RULE, STATIC, Setting
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.schema import FULL
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed
from selector.train.tuning import Judged, StaticTable, best_static, judge_setting, tune_lookup_rule

TREES = "trees"
GREEDY = "greedy trees"
COPIES = "copies"
BOTH = "greedy trees and copies"
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
BOTTOM_UP = ("traversal", "lifted_uniform")  # DDTE has no policy network of theirs
AT_ROOT = "root tree"
SHORT = "delayed tree of 8"
DELAYED = "delayed tree"
DELAYED_OR_GREEDY = f"{DELAYED} or {GREEDY}"
PRINTED = "policy (eq. 12)"
ORACLE = "oracle"
# by the actions of a regressor: the method that asks it
SELECTORS = {actions: f"selector, {actions}" for actions in OF}
# and what `train` would keep of a network that may copy
KEPT = {actions: f"selector, {actions}, or the rule" for actions in (COPIES, BOTH)}
SELECTING = {*SELECTORS.values(), *KEPT.values()}
# static trees that are chosen by tokens per step instead of speed
BY_STEPS = {
    tree: f"{tree}, by tokens per step" for tree in (AT_ROOT, SHORT, DELAYED, DELAYED_OR_GREEDY)
}
Replays = dict[str, Replayed]  # of held-out texts, by kind of prompts


def actions_of(verifier: str, features: str) -> list[str]:
    """What a verifier's regressors may choose from: trees; with hidden states, if the traces have
    them, those of DDTE's claim; and further actions, the bottom-up ones'."""
    actions = [TREES]
    if features == FULL and verifier in CLAIMED:
        actions.append(HIDDEN)
    if verifier in BOTTOM_UP:
        actions += [GREEDY, COPIES, BOTH]
    return actions


def of_verifier(splits: Mapping[str, Texts], verifier: str, actions: str) -> dict[str, Texts]:
    """The texts with one verifier's labels of some actions."""
    labelled = {}
    for split, texts in splits.items():
        survivals = {verifier: texts.survivals[verifier]}
        labelled[split] = replace(texts, survivals=survivals, space=OF[actions])
    return labelled


def _begins_at_root(tree: Action) -> bool:
    """Whether a tree has no trunk before its branches; a chain, nothing after its trunk."""
    if tree.K > 1:
        return tree.L1 == 0
    return tree.L2 == 0


class Contender(NamedTuple):
    """A method that asks a network, with what it may choose from."""

    method: str
    actions: str
    module: SelectorModule


@dataclass(frozen=True)
class _Family:
    """Methods that may draft the same trees."""

    drafted: str  # the actions without copies
    copied: str  # the same actions with copies
    suffix: str  # of the names of methods that both families have
    tried: Mapping[str, Callable[[Action], bool]]  # static trees that may be chosen, by method
    fallback: str  # the one of these that is drafted where a selector does not decide

    def has(self, actions: str) -> bool:
        return bool(OF[actions].styles) == bool(OF[self.drafted].styles)


SAMPLED_TREES = _Family(
    TREES,
    COPIES,
    "",
    {
        AT_ROOT: _begins_at_root,
        SHORT: lambda tree: tree.L1 + tree.L2 <= 8,
        DELAYED: lambda _: True,
    },
    DELAYED,
)
GREEDY_TREES = _Family(
    GREEDY, BOTH, f", {GREEDY}", {DELAYED_OR_GREEDY: lambda _: True}, DELAYED_OR_GREEDY
)


@dataclass(frozen=True)
class _SamplingTexts:
    """One verifier's texts of one sampling setting, with the step times of a machine."""

    splits: Mapping[str, Texts]
    verifier: str
    sampling: Sampling
    profile: LatencyProfile
    # all machines share these, since the projection of the labels takes long
    cache: dict[tuple[str, str, str], Timed] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """The kinds of prompts of the held-out texts."""
        return list(dict.fromkeys(self.splits["test"].of_sampling(self.sampling).kind_X))

    def timed(self, split: str, actions: str, kind: str = "") -> Timed:
        """The texts of a kind of prompts; those of all kinds where the split has none of this one,
        and where no kind is named."""
        key = split, actions, kind
        if key not in self.cache:
            labelled = of_verifier(self.splits, self.verifier, actions)
            texts = labelled[split].of_sampling(self.sampling)
            is_of_kind_X = torch.tensor([text_kind == kind for text_kind in texts.kind_X])
            if is_of_kind_X.any():
                texts = texts.take(is_of_kind_X.nonzero()[:, 0])
            self.cache[key] = Timed(texts, self.verifier, self.profile)
        return self.cache[key].on(self.profile)


def replays(
    verifier: str,
    sampling: Sampling,
    splits: Mapping[str, Texts],
    profiles: Mapping[str, LatencyProfile],
    contenders: Mapping[str, Sequence[Contender]],  # by machine
) -> dict[tuple[str, str], Tensor]:
    """Tokens, seconds and steps of each held-out text, float64 [X, 3], by machine and method; all
    of one verifier."""
    families = [SAMPLED_TREES]
    if verifier in BOTTOM_UP:
        families.append(GREEDY_TREES)
    texts = _SamplingTexts(splits, verifier, sampling, profiles[HERE])
    kind_X = splits["test"].of_sampling(sampling).kind_X
    totals: dict[tuple[str, str], Tensor] = {}
    for (machine, profile), family in product(profiles.items(), families):
        replays_by_method = _of_family(replace(texts, profile=profile), family, contenders[machine])
        for method, replays_by_kind in replays_by_method.items():
            totals[machine, method] = _totals(replays_by_kind, kind_X)
    return totals


def _totals(replays_by_kind: Replays, kind_X: list[str]) -> Tensor:
    totals_X3 = torch.zeros(len(kind_X), 3, dtype=torch.float64)
    for kind, replayed in replays_by_kind.items():
        is_of_kind_X = torch.tensor([text_kind == kind for text_kind in kind_X])
        columns = replayed.tokens_X, replayed.seconds_X, replayed.steps_X
        totals_X3[is_of_kind_X] = torch.stack(columns, dim=-1)
    return totals_X3


def _of_family(
    texts: _SamplingTexts, family: _Family, contenders: Sequence[Contender]
) -> dict[str, Replays]:
    """By method, what is replayed."""
    static = _static_trees(texts, family)
    by_method = dict(static.replays)
    copying = COPYING + family.suffix
    rule = tune_lookup_rule(texts.timed("train", family.copied), static.base)
    validation = texts.timed("validation", family.copied)
    judged_rule = judge_setting(validation, {}, rule, static.base.action)
    by_method[copying] = {}
    for kind, fallback in static.fallbacks.items():
        setting = rule
        if rule.action == static.base.action:  # the best static tree is that of each kind
            setting = replace(rule, action=fallback)
        by_method[copying][kind] = replay(texts.timed("test", family.copied, kind), setting)
    for contender in contenders:
        if not family.has(contender.actions):
            continue
        validation = texts.timed("validation", contender.actions)
        (judged,) = judge(contender.module, validation, static.base)
        by_method[contender.method] = _selected(texts, static, contender, judged)
        if contender.actions in KEPT:
            kept = keep_if_ahead(judged, judged_rule, static.base).setting
            deciding = {NETWORK: contender.method, RULE: copying, STATIC: family.fallback}
            by_method[KEPT[contender.actions]] = by_method[deciding[kept.decider]]
    return by_method


class _StaticTrees(NamedTuple):
    """Static trees on one machine."""

    replays: dict[str, Replays]  # by method
    base: Setting  # the best tree for all kinds of prompts
    fallbacks: dict[str, Action]  # by kind of prompts, what is drafted where nothing decides


def _static_trees(texts: _SamplingTexts, family: _Family) -> _StaticTrees:
    """Trees that are chosen on each kind's training texts, by speed and by tokens per step; and the
    oracle, which is a bound for all trees."""
    trees = OF[family.drafted].trees
    by_method: defaultdict[str, Replays] = defaultdict(dict)
    fallbacks: dict[str, Action] = {}
    tables: list[StaticTable] = []
    for kind in texts.kinds:
        test = texts.timed("test", family.drafted, kind)
        table = StaticTable.of(texts.timed("train", family.drafted, kind))
        tables.append(table)
        for method, is_allowed in family.tried.items():
            allowed_A = torch.tensor([is_allowed(tree) for tree in trees])
            fastest = trees[table.best(allowed_A)]
            by_method[method][kind] = replay(test, Setting(texts.sampling, fastest))
            longest = trees[int(table.efficiencies().where(allowed_A, 0.0).argmax())]
            by_method[BY_STEPS[method]][kind] = replay(test, Setting(texts.sampling, longest))
            if method == family.fallback:
                fallbacks[kind] = fastest
        by_method[ORACLE + family.suffix][kind] = oracle(test)
    table_of_all = StaticTable(*map(torch.cat, zip(*tables, strict=True)))
    base = best_static(texts.timed("train", family.drafted), table_of_all)
    return _StaticTrees(by_method, base, fallbacks)


def _selected(
    texts: _SamplingTexts, static: _StaticTrees, contender: Contender, judged: Judged
) -> Replays:
    """Replays of a network's best setting, or of each kind's static tree where that does not
    pay."""
    decides = judged.pays or contender.method == PRINTED  # as in the paper, where it always does
    replays_by_kind = {}
    for kind, fallback in static.fallbacks.items():
        setting = replace(judged.setting, action=fallback)
        if not decides:
            setting = setting.static_only()
        test = texts.timed("test", contender.actions, kind)
        replays_by_kind[kind] = replay(test, setting, contender.module)
    return replays_by_kind
