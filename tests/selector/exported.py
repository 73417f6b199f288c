"""Artefacts of selectors that are not trained, and what they must choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.decision import NEVER, LookupRule, Setting
from selector.export.torchscript import load_script, net_tokens
from selector.export.writer import write_artefact
from selector.runtime.artefact import Features
from selector.runtime.selector import Selector, load_selector
from selector.sampling import Sampling
from selector.schema import EARLY, FULL, HIDDEN_STATES, LIGHT, SCALARS_KEY, TEXT_SCALARS
from selector.train.data import Timed
from selector.train.module import SelectorModule
from tests.selector.synthetic import (
    SPACE,
    opinionated,
    profile,
    setting_row,
    survivals_of,
    texts,
    timed,
)

FALLBACK = Action(1, 3, 0)
BRANCHED = Action(3, 0, 4), Action(2, 2, 3), Action(4, 1, 8)
LIMITED = tuple(
    sorted(
        map(SPACE.index, [*map(SPACE.chain, range(17)), *BRANCHED, Action.copy(4), Action.copy(16)])
    )
)
STATIC = Setting(Sampling(0.2), Action(1, 4, 0), speed=180.0)
COPIES = Setting(
    Sampling(0.4), Action(1, 4, 0), speed=190.0, rule=LookupRule(5, 8, longer=((7, 16),))
)
ANY = Setting(Sampling(0.6), Action(1, 3, 0), (LIGHT,), speed=200.0, rho=0.0)
KNOWN_EARLY = Setting(Sampling(0.8), Action(1, 3, 0), (EARLY,), speed=210.0, rho=0.25)
SOME = Setting(Sampling(1.0), Action(2, 2, 3), (LIGHT,), speed=220.0, rho=0.5, allowed=LIMITED)
NUCLEUS = Setting(
    Sampling(1.0, 0.9), Action(1, 5, 0), (LIGHT,), speed=150.0, rho=1.0, allowed=LIMITED
)
IN_TURN = Setting(Sampling(1.4), Action(2, 2, 3), (EARLY, LIGHT), speed=220.0, rho=0.5)
SOME_IN_TURN = Setting(
    Sampling(1.4, 0.9), Action(2, 2, 3), (EARLY, LIGHT), speed=220.0, rho=0.25, allowed=LIMITED
)
SHORT = Setting(
    Sampling(1.8),
    Action(1, 3, 0),
    (EARLY, LIGHT),
    speed=210.0,
    rho=0.5,
    rule=LookupRule(5, 8),
    longest=70,
)
SETTINGS = STATIC, COPIES, ANY, KNOWN_EARLY, SOME, NUCLEUS, IN_TURN, SOME_IN_TURN, SHORT
KINDS = [(objective, level) for objective in ("policy", "regressor") for level in (LIGHT, FULL)]


def efficiencies(at: int) -> Tensor:
    """Of the static trees under a setting's sampling: the text is harder in one than in
    another."""
    return ActionSpace.recorded().efficiencies(survivals_of(torch.tensor([0.55 + 0.05 * at])))[0]


def settings_of(level: str) -> list[Setting]:
    """Of a selector that sees so much."""
    return [
        replace(
            setting,
            feature_levels=tuple(level if one == LIGHT else one for one in setting.feature_levels),
        )
        for setting in SETTINGS
    ]


def export(
    folder: Path,
    objective: str = "regressor",
    level: str = LIGHT,
    check: Callable[[Path], None] = lambda _: None,
    evaluation: dict | None = None,
) -> Selector:
    metrics = {"evaluation": evaluation}
    facts = {
        "pair": {"target": "t", "draft": "d", "fingerprint": profile().pair},
        "metrics": metrics,
        "run_id": "none",
    }
    rows = [setting_row(setting, efficiencies(at)) for at, setting in enumerate(settings_of(level))]
    module = module_of(objective, level)
    return write_artefact(folder, module, profile(), "traversal", FALLBACK, rows, facts, check)


@cache
def module_of(objective: str, level: str = LIGHT) -> SelectorModule:
    """One whose choices vary under every setting, and which asks for the draft at some roots
    alone."""
    return opinionated(objective, level, seed=7)


loaded, scripted = cache(load_selector), cache(load_script)


def roots_of(setting: Setting, level: str, count: int = 5) -> tuple[Timed, Tensor]:
    """Fresh texts of a setting's sampling, and their roots that have features."""
    data = timed(texts(count, 12, seed=9, level=level, sampling=setting.sampling, repeats=0.3))
    return data, (~data.texts.unknown_R).nonzero()[:, 0]


def coordinates_of(setting: Setting) -> tuple[float, float]:
    return setting.sampling.temperature, setting.sampling.top_p


def batch_of(data: Timed, rows: Tensor, level: str) -> Features:
    scalars_BF, states = data.texts.features(rows, level == FULL)
    return {SCALARS_KEY: scalars_BF, **dict(zip(HIDDEN_STATES, states, strict=False))}


def one_by_one(batch: Features) -> list[Features]:
    return [{name: rows[b] for name, rows in batch.items()} for b in range(len(batch[SCALARS_KEY]))]


def early_of(features: Features) -> Features:
    """What is known before the draft has passed the root."""
    return {SCALARS_KEY: features[SCALARS_KEY][..., : len(TEXT_SCALARS)]}


def mask_of(setting: Setting, data: Timed) -> Tensor:
    """What may be chosen at every root, bool [R, A]."""
    matches = data.texts.scalar("match").tolist()
    by_rule = torch.tensor(
        [[action == setting.copied(match) for action in SPACE] for match in matches]
    )
    if not setting.feature_levels:
        return by_rule
    beyond_R1 = (data.texts.length_R > (setting.longest or torch.inf)).unsqueeze(-1)
    allowed_A = torch.zeros(len(SPACE), dtype=torch.bool)
    allowed_A[setting.positions(SPACE)] = True
    return torch.where(beyond_R1, by_rule, allowed_A)


def worth(made: SelectorModule, data: Timed, setting: Setting, early: bool = False) -> Tensor:
    """What the module and the decision rule say of every action at every root, [R, A]; with all
    features, or with the early ones alone. The others are not looked at where the setting does not
    ask for them."""
    early = early or setting.feature_levels in ((), (EARLY,))
    scores_RA = made.scores(data.texts, EARLY if early else None)
    if not made.is_regressor:
        return scores_RA.masked_fill(~mask_of(setting, data), NEVER)
    g, rho = torch.tensor([[setting.speed]]), torch.tensor([[setting.rho]])
    seconds_RA = data.seconds(
        [level for level in setting.feature_levels if level == EARLY or not early]
    )
    return net_tokens(scores_RA, seconds_RA, g, rho, mask_of(setting, data))


DRAFTS = SPACE.needs_draft_A


def most_lost(
    made: SelectorModule, data: Timed, setting: Setting, rows: Tensor, chosen: list[int]
) -> float:
    """By how many tokens the worst of some choices falls short of the best. Of a setting that is
    asked in turn a choice without a draft may be that of the early features; any other is the one
    with all, where the early one would draft.
    """

    def lost(early: bool) -> Tensor:
        worth_BA = worth(made, data, setting, early)[rows]
        return worth_BA.amax(-1, keepdim=True) - worth_BA

    chosen_B1 = torch.tensor(chosen).unsqueeze(-1)
    late_B = lost(early=False).gather(-1, chosen_B1)[:, 0]
    if len(setting.feature_levels) < 2:
        return float(late_B.max())
    early_BA = lost(early=True)
    asks_again_B = early_BA[:, DRAFTS].amin(-1)
    early_B = early_BA.masked_fill(DRAFTS, torch.inf).gather(-1, chosen_B1)[:, 0]
    return float(torch.minimum(early_B, torch.maximum(late_B, asks_again_B)).max())


def in_turn(ask: Callable[[Features], Action | None], setting: Setting, features: Features) -> int:
    """What an engine drafts: where the early features will do, the rest is never computed."""
    action = ask(early_of(features)) if EARLY in setting.feature_levels else None
    if action is None or (len(setting.feature_levels) > 1 and action.drafts):
        action = ask(features)
    assert action is not None
    return SPACE.index(action)
