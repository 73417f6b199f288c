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
from pipelines.train.judging import judge, judge_by_replay, keep_if_ahead
from selector.actions import EMPTY, IID, Action, ActionSpace
from selector.decision import NETWORK, RULE, STATIC, Setting
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.schema import FULL
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.ranked import candidates, united
from selector.train.replay import Replayed
from selector.train.tuning import Judged, StaticTable, best_static, tune_lookup_rule

TREES = "trees"
HIDDEN = "trees, with hidden states"
NARROW = "greedy trees and copies"
SHAPES = "shapes by rank and copies"
ALL_ACTIONS = "trees, shapes and copies"
# DDTE: the first one's selector is faster than the other's static trees
CLAIMED = ("specinfer", "traversal")
# DDTE has no policy network of theirs
BOTTOM_UP = ("traversal", "lifted_uniform", "lifted_best")
AT_ROOT = "root tree"
SHORT = "delayed tree of 8"
DELAYED = "delayed tree"
DELAYED_OR_GREEDY = "delayed tree or greedy trees"
WIDE_ROOT = "root tree, up to 32 branches"
SHAPE = "shape by rank"
ANY_TREE = "any tree or shape"
RULE_OF_TREES = f"{COPYING}, else a tree of up to 4 branches"
RULE_OF_SHAPES = f"{COPYING}, else any tree or shape"
ONE_TREE = "copies and shapes in one tree"
PRINTED = "policy (eq. 12)"
ORACLE = "oracle"
# by the actions of a regressor: the method that asks it
SELECTORS = {actions: f"selector, {actions}" for actions in (TREES, HIDDEN, ALL_ACTIONS)}
KEPT = f"{SELECTORS[ALL_ACTIONS]}, or the rule"  # what `train` would keep
SELECTING = {*SELECTORS.values(), KEPT}
# static trees that are chosen by tokens per step instead of speed
BY_STEPS = {
    tree: f"{tree}, by tokens per step"
    for tree in (AT_ROOT, SHORT, DELAYED, DELAYED_OR_GREEDY, WIDE_ROOT, SHAPE, ANY_TREE)
}
Replays = dict[str, Replayed]  # of held-out texts, by kind of prompts


def actions_of(verifier: str, features: str) -> list[str]:
    """What a verifier's regressors may choose from: trees; with hidden states, if the traces have
    them, those of DDTE's claim; and all actions, the bottom-up ones'."""
    actions = [TREES]
    if features == FULL and verifier in CLAIMED:
        actions.append(HIDDEN)
    if verifier in BOTTOM_UP:
        actions.append(ALL_ACTIONS)
    return actions


def space_of(actions: str, texts: Texts, ranked: tuple[Action, ...]) -> ActionSpace:
    """The actions of this name, of texts with all labels; `ranked` are the shapes, with and without
    a lookup."""
    if actions in (TREES, HIDDEN):
        return ActionSpace.default()
    if actions == NARROW:
        return ActionSpace.of_pairs()
    if actions == SHAPES:
        ranked = tuple(shape for shape in ranked if not shape.copied)
    return replace(texts.space, ranked=ranked)


def of_verifier(splits: Mapping[str, Texts], verifier: str, space: ActionSpace) -> dict[str, Texts]:
    """The texts with one verifier's labels of some actions."""
    labelled = {}
    for split, texts in splits.items():
        survivals = {verifier: texts.survivals[verifier]}
        labelled[split] = replace(texts, survivals=survivals, space=space)
    return labelled


def shapes_of(texts: Texts) -> tuple[Action, ...]:
    """The best shapes of every size and depth on some texts, with and without a lookup."""
    shapes: list[Action] = []
    for shape in candidates(texts.rank_RD):
        shapes += [shape, *united(shape, texts.space.lookups[1:])]
    return tuple(shapes)


def is_narrow(tree: Action) -> bool:
    """Whether it is a tree of the papers' sizes."""
    return isinstance(tree.style, str) and ActionSpace.default().max_K >= tree.K


def _begins_at_root(tree: Action) -> bool:
    """Whether a tree has i.i.d. branches and no trunk before them; a chain, nothing after its
    trunk."""
    if tree.style != IID:
        return False
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

    actions: str
    tried: Mapping[str, Callable[[Action], bool]]  # static trees that may be chosen, by method
    fallback: str  # the one of these that is drafted where a selector does not decide


PAPERS_TREES = _Family(
    TREES,
    {
        AT_ROOT: _begins_at_root,
        SHORT: lambda tree: tree.depth <= 8,
        DELAYED: lambda _: True,
    },
    DELAYED,
)
ALL_TREES = _Family(
    ALL_ACTIONS,
    {
        DELAYED_OR_GREEDY: is_narrow,
        WIDE_ROOT: _begins_at_root,
        SHAPE: lambda tree: bool(tree.ranks) or tree == EMPTY,
        ANY_TREE: lambda _: True,
    },
    ANY_TREE,
)
# lookup rules by method: what they may choose from, and the static tree that they begin with
RULES = {
    RULE_OF_TREES: (NARROW, DELAYED_OR_GREEDY),
    RULE_OF_SHAPES: (SHAPES, ANY_TREE),
    ONE_TREE: (ALL_ACTIONS, ANY_TREE),
}


@dataclass(frozen=True)
class _SamplingTexts:
    """One verifier's texts of one sampling setting, with the step times of a machine."""

    splits: Mapping[str, Texts]
    verifier: str
    profile: LatencyProfile
    ranked: tuple[Action, ...]  # the shapes that static trees and rules may be
    # all machines share these, since the projection of the labels takes long
    cache: dict[tuple[str, ActionSpace, str], Timed] = field(default_factory=dict)

    @property
    def sampling(self) -> Sampling:
        return self.timed("test", TREES).sampling

    @property
    def kinds(self) -> list[str]:
        """The kinds of prompts of the held-out texts."""
        return list(dict.fromkeys(self.splits["test"].kind_X))

    def timed(self, split: str, actions: str, kind: str = "") -> Timed:
        """The texts of a kind of prompts; those of all kinds where the split has none of this one,
        and where no kind is named."""
        return self.in_space(split, space_of(actions, self.splits[split], self.ranked), kind)

    def in_space(self, split: str, space: ActionSpace, kind: str = "") -> Timed:
        key = split, space, kind
        if key not in self.cache:
            texts = of_verifier(self.splits, self.verifier, space)[split]
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
    families = [PAPERS_TREES]
    if verifier in BOTTOM_UP:
        families.append(ALL_TREES)
    of_sampling = {split: texts.of_sampling(sampling) for split, texts in splits.items()}
    ranked = shapes_of(of_sampling["train"])
    texts = _SamplingTexts(of_sampling, verifier, profiles[HERE], ranked)
    kind_X = of_sampling["test"].kind_X
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


class _StaticTrees(NamedTuple):
    """Static trees on one machine, by method."""

    replays: dict[str, Replays]
    bases: dict[str, Setting]  # the best tree for all kinds of prompts
    fallbacks: dict[str, dict[str, Action]]  # the best tree by kind of prompts


def _static_trees(texts: _SamplingTexts, family: _Family) -> _StaticTrees:
    """Trees that are chosen on each kind's training texts, by speed and by tokens per step; and the
    oracle of the papers' trees, which is a bound for all that choose among them."""
    train = texts.timed("train", family.actions)
    trees = train.space.trees
    by_method: defaultdict[str, Replays] = defaultdict(dict)
    fallbacks: defaultdict[str, dict[str, Action]] = defaultdict(dict)
    tables: list[StaticTable] = []
    for kind in texts.kinds:
        test = texts.timed("test", family.actions, kind)
        table = StaticTable.of(texts.timed("train", family.actions, kind))
        tables.append(table)
        for method, is_allowed in family.tried.items():
            allowed_A = torch.tensor([is_allowed(tree) for tree in trees])
            fastest = trees[table.best(allowed_A)]
            by_method[method][kind] = replay(test, Setting(texts.sampling, fastest))
            longest = trees[int(table.efficiencies().where(allowed_A, 0.0).argmax())]
            by_method[BY_STEPS[method]][kind] = replay(test, Setting(texts.sampling, longest))
            fallbacks[method][kind] = fastest
        if family is PAPERS_TREES:
            by_method[ORACLE][kind] = oracle(test)
    table_of_all = StaticTable(*map(torch.cat, zip(*tables, strict=True)))
    bases: dict[str, Setting] = {}
    for method, is_allowed in family.tried.items():
        allowed_A = torch.tensor([is_allowed(tree) for tree in trees])
        bases[method] = best_static(train, table_of_all, allowed_A)
    return _StaticTrees(by_method, bases, fallbacks)


def _of_family(
    texts: _SamplingTexts, family: _Family, contenders: Sequence[Contender]
) -> dict[str, Replays]:
    """By method, what is replayed."""
    static = _static_trees(texts, family)
    by_method = dict(static.replays)
    judged_rule: Judged | None = None
    if family is ALL_TREES:
        for method, (actions, tree) in RULES.items():
            rule = tune_lookup_rule(texts.timed("train", actions), static.bases[tree])
            by_method[method] = _by_rule(texts, static, method, rule)
            cases = [texts.timed(split, actions) for split in ("train", "validation")]
            judged_rule = judge_by_replay(rule, static.bases[tree], cases, texts.profile)
    base = static.bases[family.fallback]
    for contender in contenders:
        if (contender.actions == ALL_ACTIONS) != (family is ALL_TREES):
            continue
        validation = texts.in_space("validation", contender.module.space)
        fallback = replace(base, action=_within(validation.space, base.action))
        (judged,) = judge(contender.module, validation, fallback)
        by_method[contender.method] = _selected(texts, static, family, contender, judged)
        if judged_rule is not None:
            kept = keep_if_ahead(judged, judged_rule, base).setting
            deciding = {NETWORK: contender.method, RULE: ONE_TREE, STATIC: family.fallback}
            by_method[KEPT] = by_method[deciding[kept.decider]]
    return by_method


def _by_rule(texts: _SamplingTexts, static: _StaticTrees, method: str, rule: Setting) -> Replays:
    """Replays of a lookup rule, which drafts each kind's own best tree where it drafts that of all
    kinds."""
    actions, tree = RULES[method]
    replays_by_kind = {}
    for kind, fallback in static.fallbacks[tree].items():
        setting = rule
        if rule.action == static.bases[tree].action:
            setting = replace(rule, action=fallback)
        replays_by_kind[kind] = replay(texts.timed("test", actions, kind), setting)
    return replays_by_kind


def _selected(
    texts: _SamplingTexts,
    static: _StaticTrees,
    family: _Family,
    contender: Contender,
    judged: Judged,
) -> Replays:
    """Replays of a network's best setting, or of each kind's static tree where that does not
    pay."""
    if not judged.pays and contender.method != PRINTED:  # in the paper it always decides
        return static.replays[family.fallback]
    space = contender.module.space
    replays_by_kind = {}
    for kind, fallback in static.fallbacks[family.fallback].items():
        setting = replace(judged.setting, action=_within(space, fallback))
        test = texts.in_space("test", space, kind)
        replays_by_kind[kind] = replay(test, setting, contender.module)
    return replays_by_kind


def _within(space: ActionSpace, tree: Action) -> Action:
    """A tree where a space has it, else the space's shape of the nearest number of nodes: a network
    chooses among fewer shapes than are tried as static ones."""
    if not tree.ranks or tree in space.ranked:
        return tree
    shapes = [shape for shape in space.ranked if not shape.copied]
    return min(shapes, key=lambda shape: abs(shape.nodes - tree.nodes), default=EMPTY)
