"""The replay of every method with one verifier under one sampling setting, on every machine.

A *cell* is a kind of prompts under a setting. Each cell's labels are projected by themselves
(`monotone`), static trees are chosen on its training texts, and where a selector does not decide,
it drafts the cell's static tree, a greedy one only if it may choose these. Whether it decides is
judged on the setting's validation texts of all kinds.

Legend: X texts, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.evaluate.methods import COPYING
from pipelines.evaluate.replays import oracle, replay
from pipelines.evaluate.table import HERE
from pipelines.train.judging import judge, judge_by_replay, keep_if_ahead, too_few
from selector.actions import EMPTY, IID, Action, ActionSpace
from selector.decision import NETWORK, RULE, STATIC, Setting
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.schema import FULL
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.ranked import candidates, united
from selector.train.replay import Replayed
from selector.train.tuning import StaticTable, best_static, tune_lookup_rule

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
    sampling: Sampling
    profile: LatencyProfile
    ranked: tuple[Action, ...]  # the shapes that static trees and rules may be
    # all machines share these, since the projection of the labels takes long
    cache: dict[tuple[str, ActionSpace, str], Timed] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """The kinds of prompts of the held-out texts."""
        return list(dict.fromkeys(self.splits["test"].kind_X))

    def space(self, actions: str) -> ActionSpace:
        return space_of(actions, self.splits["test"], self.ranked)

    def timed(self, split: str, space: ActionSpace, kind: str = "") -> Timed:
        """The texts of a kind of prompts; those of all kinds where the split has none of this one,
        and where no kind is named."""
        key = split, space, kind
        if key not in self.cache:
            texts = of_verifier(self.splits, self.verifier, space)[split]
            is_of_kind_X = _is_of_kind(texts, kind)
            if is_of_kind_X.any():
                texts = texts.take(is_of_kind_X.nonzero()[:, 0])
            self.cache[key] = Timed(texts, self.verifier, self.profile)
        return self.cache[key].on(self.profile)

    def totals(self, space: ActionSpace, replay_kind: Callable[[str, Timed], Replayed]) -> Tensor:
        """Tokens, seconds and steps of each held-out text, float64 [X, 3], from the replay of the
        texts of each kind."""
        totals_X3 = torch.zeros(len(self.splits["test"]), 3, dtype=torch.float64)
        for kind in self.kinds:
            replayed = replay_kind(kind, self.timed("test", space, kind))
            columns = replayed.tokens_X, replayed.seconds_X, replayed.steps_X
            totals_X3[_is_of_kind(self.splits["test"], kind)] = torch.stack(columns, dim=-1)
        return totals_X3

    def drafting(
        self,
        space: ActionSpace,
        trees: Mapping[str, Action],
        setting: Setting,
        module: SelectorModule | None = None,
    ) -> Tensor:
        """The `totals` of a setting that drafts each kind's own tree where it decides nothing."""

        def replay_kind(kind: str, timed: Timed) -> Replayed:
            tree = _within(space, trees[kind])
            return replay(timed, replace(setting, action=tree), module)

        return self.totals(space, replay_kind)


def _is_of_kind(texts: Texts, kind: str) -> Tensor:
    return torch.tensor([text_kind == kind for text_kind in texts.kind_X])


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
    texts = _SamplingTexts(of_sampling, verifier, sampling, profiles[HERE], ranked)
    totals: dict[tuple[str, str], Tensor] = {}
    for (machine, profile), family in product(profiles.items(), families):
        static = _static_trees(replace(texts, profile=profile), family)
        totals_by_method = static.totals | _selectors(static, contenders[machine])
        for method, totals_X3 in totals_by_method.items():
            totals[machine, method] = totals_X3
    return totals


class _StaticTrees(NamedTuple):
    """A family's static trees on one machine, by method."""

    texts: _SamplingTexts
    family: _Family
    totals: dict[str, Tensor]
    bases: dict[str, Setting]  # the best tree for all kinds of prompts
    fastest: dict[str, dict[str, Action]]  # the best tree by kind of prompts


def _static_trees(texts: _SamplingTexts, family: _Family) -> _StaticTrees:
    """Trees that are chosen on each kind's training texts, by speed and by tokens per step; and the
    oracle of the papers' trees, which is a bound for all that choose among them."""
    space = texts.space(family.actions)
    tables = {}
    for kind in texts.kinds:
        tables[kind] = StaticTable.of(texts.timed("train", space, kind))
    table_of_all = StaticTable(*map(torch.cat, zip(*tables.values(), strict=True)))
    static = _StaticTrees(texts, family, {}, {}, {})
    for method, is_allowed in family.tried.items():
        allowed_A = torch.tensor([is_allowed(tree) for tree in space.trees])
        fastest = {}
        longest = {}
        for kind, table in tables.items():
            fastest[kind] = space.trees[table.best(allowed_A)]
            longest[kind] = space.trees[int(table.efficiencies().where(allowed_A, 0.0).argmax())]
        base = best_static(texts.timed("train", space), table_of_all, allowed_A)
        static.totals[method] = texts.drafting(space, fastest, base)
        static.totals[BY_STEPS[method]] = texts.drafting(space, longest, base)
        static.bases[method] = base
        static.fastest[method] = fastest
    if family is PAPERS_TREES:
        static.totals[ORACLE] = texts.totals(space, lambda _, timed: oracle(timed))
    return static


def _selectors(static: _StaticTrees, contenders: Sequence[Contender]) -> dict[str, Tensor]:
    """The lookup rules, and the networks, each in its best setting; where that does not pay, as the
    static tree."""
    texts, family = static.texts, static.family
    base = static.bases[family.fallback]
    totals: dict[str, Tensor] = {}
    rules: dict[str, Setting] = {}
    if family is ALL_TREES:
        for method, (actions, tree) in RULES.items():
            totals[method], rules[method] = _rule(static, texts.space(actions), tree)
    for contender in contenders:
        if (contender.actions == ALL_ACTIONS) != (family is ALL_TREES):
            continue
        space = contender.module.space
        tree_within = replace(base, action=_within(space, base.action))
        (judged,) = judge(contender.module, texts.timed("validation", space), tree_within)
        totals[contender.method] = static.totals[family.fallback]
        if judged.pays or contender.method == PRINTED:  # in the paper it always decides
            totals[contender.method] = texts.drafting(
                space, static.fastest[family.fallback], judged.setting, contender.module
            )
        if family is ALL_TREES:
            offered = texts.space(ALL_ACTIONS)
            cases = [texts.timed(split, offered) for split in ("train", "validation")]
            rule = judge_by_replay(rules[ONE_TREE], base, cases, texts.profile)
            is_judged = not too_few(cases[-1].texts)
            kept = keep_if_ahead(judged, rule, base, is_judged=is_judged).setting
            deciding = {NETWORK: contender.method, RULE: ONE_TREE, STATIC: family.fallback}
            totals[KEPT] = (static.totals | totals)[deciding[kept.decider]]
    return totals


def _rule(static: _StaticTrees, space: ActionSpace, tree: str) -> tuple[Tensor, Setting]:
    """A lookup rule, which drafts each kind's own best tree where it drafts that of all kinds."""
    texts = static.texts
    base = static.bases[tree]
    rule = tune_lookup_rule(texts.timed("train", space), base)
    trees = static.fastest[tree]
    if rule.action != base.action:
        trees = dict.fromkeys(texts.kinds, rule.action)
    return texts.drafting(space, trees, rule), rule


def _within(space: ActionSpace, tree: Action) -> Action:
    """A tree where a space has it, else the space's one of its style with the nearest number of
    nodes: a network chooses among fewer trees than are tried as static ones."""
    if tree in space.trees:
        return tree
    alike = [other for other in space.trees if other.style_name == tree.style_name]
    return min(alike, key=lambda other: abs(other.nodes - tree.nodes), default=EMPTY)
