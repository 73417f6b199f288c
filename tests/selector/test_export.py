"""What is exported decides as the trained module, however it is asked."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from selector.actions import Action
from selector.decision import NEVER, Setting
from selector.export.torchscript import torchscript
from selector.runtime.artefact import Features
from selector.runtime.selector import Policy
from selector.schema import LIGHT, MATCH, PAIR, SCALARS_KEY, InputError
from selector.train.tuning import decide
from tests.selector.exported import (
    COPIES,
    FALLBACK,
    IN_TURN,
    KINDS,
    SHORT,
    SOME,
    SOME_IN_TURN,
    STATIC,
    batch_of,
    coordinates_of,
    early_of,
    in_turn,
    loaded,
    mask_of,
    module_of,
    most_lost,
    one_by_one,
    roots_of,
    scripted,
    settings_of,
    worth,
)
from tests.selector.synthetic import SPACE


@pytest.mark.parametrize(("objective", "level"), KINDS)
@torch.inference_mode()
def test_all_ways_to_ask_choose_as_the_trained_module(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str
) -> None:
    """TorchScript, the selector, and the same under one setting. They add up in other orders: an
    action counts as the same where it is worth the same to 1e-4 tokens. Without features there is
    the static tree."""
    folder, made = artefacts[objective, level], module_of(objective, level)
    selector, script = loaded(folder), scripted(folder)
    for setting in settings_of(level):
        data, rows = roots_of(setting, level, count=3)
        batch = batch_of(data, rows, level)
        predictions = made.predictions(data.texts, setting)
        policy = selector.at(*coordinates_of(setting))
        assert policy.setting == setting and policy.feature_levels == setting.asked
        assert policy.select(None) == setting.action and selector.select(None) == FALLBACK
        roots = one_by_one(batch)

        def by_script(features: Features) -> Action:
            return SPACE.actions[int(script(features)[0])]

        trained = decide(data, predictions, setting, objective == "policy").action_R[rows].tolist()
        asked = {"module": trained}
        for name, ask in (("script", by_script), ("all", selector.select), ("at", policy.select)):
            asked[name] = [in_turn(ask, setting, features) for features in roots]
        for name, chosen in asked.items():
            assert most_lost(made, data, setting, rows, chosen) < 1e-4, name
            same = [a == b for a, b in zip(chosen, trained, strict=True)]
            assert sum(same) >= 0.95 * len(rows), name
        kinds = len(set(asked["at"]))
        lookups = len(setting.rule.lookups) if setting.rule else 0
        assert kinds > 2 if setting.feature_levels else kinds == 1 + lookups


@pytest.mark.parametrize(("objective", "level"), KINDS)
@torch.inference_mode()
def test_scores_are_what_the_trained_module_and_the_torchscript_say(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str
) -> None:
    """With all features and with the early ones alone, of a batch and of one root; the highest is
    chosen, and what may not be drafted has `NEVER`."""
    folder, made = artefacts[objective, level], module_of(objective, level)
    selector, script = loaded(folder), scripted(folder)
    for setting in settings_of(level):
        data, rows = roots_of(setting, level, count=2)
        may_BA = mask_of(setting, data)[rows]
        whole = batch_of(data, rows, level)
        for batch, early in ((whole, False), (early_of(whole), True)):
            scores_BA = selector.scores(batch)
            assert scores_BA.shape == (len(rows), 453) and scores_BA.dtype == torch.float32
            assert torch.allclose(
                scores_BA, worth(made, data, setting, early)[rows], atol=1e-3, rtol=1e-5
            )
            assert torch.allclose(scores_BA, script(batch)[1], atol=1e-3, rtol=1e-5)
            assert (scores_BA[~may_BA] == NEVER).all() and (scores_BA[may_BA] > NEVER / 2).all()
            features = one_by_one(batch)[1]
            assert torch.equal(selector.scores(features), scores_BA[1])
            assert selector.select(features) == SPACE.actions[int(scores_BA[1].argmax())]


@pytest.mark.parametrize("setting", [IN_TURN, SOME_IN_TURN], ids=["any", "limited"])
@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_the_draft_is_asked_for_where_the_early_choice_needs_it(
    artefacts: dict[tuple[str, str], Path], objective: str, setting: Setting
) -> None:
    """And nowhere else; both happen. Who has all features may give them at once."""
    selector = loaded(artefacts[objective, LIGHT])
    policy = selector.at(*coordinates_of(setting))
    asked_again = []
    for features in one_by_one(batch_of(*roots_of(setting, LIGHT), LIGHT)):
        early = early_of(features)
        first = selector.select(early)
        assert policy.select(early) == (None if first.drafts else first)
        assert policy.select(features) is not None
        asked_again.append(first.drafts)
    assert 0.05 < sum(asked_again) / len(asked_again) < 0.95


def test_the_match_alone_will_do_for_the_rule(artefact: Path) -> None:
    selector, chosen = loaded(artefact), set()
    policy = selector.at(0.4)
    for features in one_by_one(batch_of(*roots_of(COPIES, LIGHT), LIGHT)):
        match = features[SCALARS_KEY][PAIR.index("match")]
        action = COPIES.copied(float(match))
        for chooser in (policy, Policy(COPIES)):
            assert chooser.select({MATCH: match}) == action
        assert policy.select(early_of(features)) == selector.select(features) == action
        chosen.add(action)
    assert chosen == {COPIES.action, Action.copy(8), Action.copy(16)}


def test_on_long_texts_the_match_alone_will_do_without_the_rules_lookup_too(artefact: Path) -> None:
    """Of an engine that cannot draft it; the static tree is then drafted."""
    whole, fewer = (
        loaded(artefact).at(1.8, shapes=shapes) for shapes in (None, [(1, 3, 0), (1, 2, 0)])
    )
    assert fewer.setting.rule is None and fewer.longest == whole.longest == SHORT.longest
    for match in (0.0, 9.0):
        assert fewer.select({MATCH: torch.tensor(match)}) == fewer.setting.action
        assert whole.select({MATCH: torch.tensor(match)}) == SHORT.copied(match)


def test_a_setting_without_a_network_needs_no_selector() -> None:
    static, copies = Policy(STATIC), Policy(COPIES)
    assert static.select(None) == static.select({}) == STATIC.action
    assert copies.select(None) == COPIES.action
    with pytest.raises(InputError, match="match is missing"):
        copies.select({})
    with pytest.raises(InputError, match="its selector"):
        Policy(SOME)


@pytest.mark.parametrize(
    "remark",
    ["`torch.jit.script` is ", "`torch.jit.save` is not supported in Python 3.14+", "x is "],
)
def test_only_warnings_about_torchscript_are_suppressed(remark: str) -> None:
    with warnings.catch_warnings(record=True) as caught, torchscript():
        warnings.warn(f"{remark}deprecated", DeprecationWarning, stacklevel=1)
    assert len(caught) == (remark == "x is ")


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(50),
        torch.full((len(PAIR.scalars),), torch.nan),
        torch.zeros(len(PAIR.scalars)).double(),
    ],
)
def test_the_exported_module_refuses_scalars_of_another_kind(
    artefact: Path, wrong: torch.Tensor
) -> None:
    with pytest.raises(torch.jit.Error, match="scalars are "):
        scripted(artefact)({SCALARS_KEY: wrong})
