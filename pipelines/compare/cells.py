"""The replay of every method with one verifier under one sampling setting, on every clock.

A *cell* is a kind of prompts under a setting. Each cell's labels are made lawful by themselves,
static trees are chosen on its training texts, and where a selector does not decide, it drafts the
cell's static tree, a greedy one only if it may choose these. Whether it decides is judged on the
setting's validation texts of all kinds.

Legend: X texts, A actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.evaluate.methods import COPYING
from pipelines.train.judging import judge, keep_if_ahead
from selector.actions import Action, ActionSpace
from selector.decision import NETWORK, RULE
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.schema import FULL, LIGHT
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed, fastest_possible
from selector.train.tuning import (
    StaticTable,
    best_static,
    judge_mode,
    replay_mode,
    tune_lookup_rule,
)

TREES, GREEDY, COPIES, BOTH = SPACES = (
    "trees",
    "greedy trees",
    "copies",
    "greedy trees and copies",
)
OF = {  # the actions of each kind of selector
    TREES: ActionSpace.default(),
    GREEDY: ActionSpace.recorded(),
    COPIES: ActionSpace.with_lookups(),
    BOTH: ActionSpace.of_pairs(),
    (HIDDEN := "trees, with hidden states"): ActionSpace.default(),
}
# DDTE: the first one's selector is faster than the other's static trees
CLAIMED = ("specinfer", "traversal")
BOTTOM_UP = ("traversal", "lifted_uniform")  # DDTE has no policy of theirs
HERE = "this machine"
AT_ROOT, DELAYED, PRINTED, ORACLE = "root tree", "delayed tree", "policy (eq. 12)", "oracle"
RIVAL = "traversal", AT_ROOT  # that speeds are over
# which trees are tried as static ones; the last of each is drafted where a selector does not decide
STATIC = {
    TREES: {
        AT_ROOT: torch.tensor(
            [tree.L1 == 0 if tree.K > 1 else tree.L2 == 0 for tree in OF[TREES].trees]
        ),
        f"{DELAYED} of 8": torch.tensor([tree.L1 + tree.L2 <= 8 for tree in OF[TREES].trees]),
        DELAYED: torch.ones(len(OF[TREES].trees), dtype=torch.bool),
    },
    GREEDY: {f"{DELAYED} or {GREEDY}": torch.ones(len(OF[GREEDY].trees), dtype=torch.bool)},
}
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
    combinations = [(name, TREES) for name in verifiers] + [
        (name, HIDDEN) for name in CLAIMED if features == FULL
    ]
    combinations += [*product(BOTTOM_UP, SPACES[1:])]
    return [Network(*combination) for combination in combinations if combination[0] in verifiers]


def of_verifier(splits: Mapping[str, Texts], verifier: str, actions: str) -> dict[str, Texts]:
    """The texts with one verifier's labels of some actions."""
    survivals = {split: {verifier: texts.survivals[verifier]} for split, texts in splits.items()}
    return {
        split: replace(texts, survivals=survivals[split], space=OF[actions])
        for split, texts in splits.items()
    }


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

    @cache
    def timed(split: str, actions: str, kind: str = "") -> Timed:
        setting_texts = of_verifier(splits, verifier, actions)[split].setting_of(sampling)
        index_X = torch.tensor([text_kind == kind for text_kind in setting_texts.kind_X]).nonzero()[
            :, 0
        ]
        return Timed(
            setting_texts.take(index_X) if len(index_X) else setting_texts, verifier, clocks[HERE]
        )

    kind_X = timed("test", TREES).texts.kind_X
    in_kind = {
        kind: torch.tensor([text_kind == kind for text_kind in kind_X])
        for kind in dict.fromkeys(kind_X)
    }
    totals: dict[tuple[str, str], Tensor] = defaultdict(
        lambda: torch.zeros(3, len(kind_X), dtype=torch.float64)
    )
    families = [(TREES, COPIES, ""), (GREEDY, BOTH, f", {GREEDY}")][: 1 + (verifier in BOTTOM_UP)]
    for (clock, profile), (drafted, copied, suffix) in product(clocks.items(), families):
        trees, tables = dict[str, Action](), list[StaticTable]()
        for kind, in_kind_X in in_kind.items():
            train, test = (timed(split, drafted, kind).on(profile) for split in ("train", "test"))
            tables.append(train_table := StaticTable.of(train))
            static = torch.stack(StaticTable.of(test))
            for tree, allowed_A in STATIC[drafted].items():
                best = train_table.best(allowed_A)
                totals[clock, tree][:, in_kind_X] = static[..., best]
                if clock == HERE:
                    most_tokens = int(train_table.efficiencies().where(allowed_A, 0.0).argmax())
                    totals[clock, tree + BY_STEPS][:, in_kind_X] = static[..., most_tokens]
            trees[kind] = OF[drafted].trees[best]
            oracle = fastest_possible(
                test.survivals_RS, test.seconds(), test.texts.size_X, test.space
            )
            totals[clock, ORACLE + suffix][:, in_kind_X] = _totals(oracle)
        base = best_static(
            timed("train", drafted).on(profile),
            StaticTable(*map(torch.cat, zip(*tables, strict=True))),
        )
        module_of_actions = {
            network.actions: module
            for network, module in modules.items()
            if bool(OF[network.actions].styles) == bool(suffix)
        }
        deciding = [
            (f"selector, {actions}", actions, module)
            for actions, module in module_of_actions.items()
        ]
        deciding += [(PRINTED, TREES, policies[clock])] if clock in policies else []
        rule = tune_lookup_rule(timed("train", copied).on(profile), base)
        for kind, in_kind_X in in_kind.items():
            mode = replace(rule, action=trees[kind]) if rule.action == base.action else rule
            replay = replay_mode(timed("test", copied, kind).on(profile), {}, mode)
            totals[clock, COPYING + suffix][:, in_kind_X] = _totals(replay)
        judged_rule = judge_mode(timed("validation", copied).on(profile), {}, rule, base.action)
        for method, actions, module in deciding:
            (judged,) = judge(module, [timed("validation", actions).on(profile)], [base])
            decides = judged.pays or method == PRINTED  # as in the paper, where it always does
            for kind, in_kind_X in in_kind.items():
                test, mode = (
                    timed("test", actions, kind).on(profile),
                    replace(judged.mode, action=trees[kind]),
                )
                mode = mode if decides else mode.static_only()
                replay = replay_mode(
                    test, module.predictions(test.texts, mode), mode, policy=not module.is_regressor
                )
                totals[clock, method][:, in_kind_X] = _totals(replay)
            if OF[actions].lookups:
                kept = {NETWORK: method, RULE: COPYING + suffix}  # else the static tree
                decider = keep_if_ahead(judged, judged_rule, base).mode.decider
                totals[clock, method + KEPT] = totals[clock, kept.get(decider, tree)]
    return dict(totals)


def _totals(replayed: Replayed) -> Tensor:
    return torch.stack([replayed.tokens_X, replayed.seconds_X, replayed.steps_X])
