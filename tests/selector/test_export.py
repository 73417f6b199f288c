"""What is exported decides as the trained module, however it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selector.actions import Action
from selector.decision import NEVER, Mode
from selector.runtime.selector import Tuned
from selector.schema import EARLY, LIGHT, MATCH, PAIR, SCALARS_KEY, InputError
from selector.train.tuning import decide
from tests.selector.exported import (
    COPIES,
    DRAFTS,
    FALLBACK,
    IN_TURN,
    KINDS,
    SHORT,
    SOME,
    SOME_IN_TURN,
    STATIC,
    batch_of,
    early_of,
    in_turn,
    loaded,
    mask_of,
    modes_of,
    module_of,
    most_lost,
    one_by_one,
    roots_of,
    scripted,
    setting_of,
    worth,
)
from tests.selector.synthetic import SPACE


@pytest.mark.parametrize(("objective", "level"), KINDS)
@torch.inference_mode()
def test_all_ways_to_ask_choose_as_the_trained_module(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str
) -> None:
    """TorchScript, the selector, and the same under one setting. They add up in other orders: an action counts as the
    same where it is worth the same to 1e-4 tokens. Without features there is the static tree."""
    folder, made = artefacts[objective, level], module_of(objective, level)
    selector, script = loaded(folder), scripted(folder)
    for mode in modes_of(level):
        data, rows = roots_of(mode, level, count=3)
        batch = batch_of(data, rows, level)
        own_R = decide(data, made.predictions(data.texts, mode), mode, objective == "policy").action_R
        tuned = selector.at(*setting_of(mode))
        assert tuned.mode == mode and tuned.feature_levels == mode.asked
        assert tuned.select(None) == mode.action and selector.select(None) == FALLBACK
        index_B, _ = script(batch)
        if EARLY in mode.feature_levels:
            early_B, _ = script(early_of(batch))
            index_B = torch.where(DRAFTS[early_B] & (len(mode.feature_levels) > 1), index_B, early_B)
        asked = {
            "module": own_R[rows].tolist(),
            "script": index_B.tolist(),
            "selector": [in_turn(selector.select, mode, features) for features in one_by_one(batch)],
            "tuned": [in_turn(tuned.select, mode, features) for features in one_by_one(batch)],
        }
        for name, chosen in asked.items():
            assert most_lost(made, data, mode, rows, chosen) < 1e-4, name
            assert sum(a == b for a, b in zip(chosen, asked["module"], strict=True)) >= 0.95 * len(rows), name
        kinds = len(set(asked["tuned"]))
        assert kinds > 2 if mode.feature_levels else kinds == (1 if mode.rule is None else 2)


@pytest.mark.parametrize(("objective", "level"), KINDS)
@torch.inference_mode()
def test_scores_are_what_the_trained_module_and_the_torchscript_say(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str
) -> None:
    """With all features and with the early ones alone, of a batch and of one root; the highest is chosen, and what may
    not be drafted has `NEVER`."""
    folder, made = artefacts[objective, level], module_of(objective, level)
    selector, script = loaded(folder), scripted(folder)
    for mode in modes_of(level):
        data, rows = roots_of(mode, level, count=2)
        may_BA = mask_of(mode, data)[rows]
        for early in (False, True):
            batch = early_of(batch_of(data, rows, level)) if early else batch_of(data, rows, level)
            scores_BA = selector.scores(batch)
            assert scores_BA.shape == (len(rows), 453) and scores_BA.dtype == torch.float32
            assert torch.allclose(scores_BA, worth(made, data, mode, early)[rows], atol=1e-3, rtol=1e-5)
            assert torch.allclose(scores_BA, script(batch)[1], atol=1e-3, rtol=1e-5)
            assert (scores_BA[~may_BA] == NEVER).all() and (scores_BA[may_BA] > NEVER / 2).all()
            features = one_by_one(batch)[1]
            assert torch.equal(selector.scores(features), scores_BA[1])
            assert selector.select(features) == SPACE.actions[int(scores_BA[1].argmax())]


@pytest.mark.parametrize("mode", [IN_TURN, SOME_IN_TURN], ids=["any", "limited"])
@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_the_draft_is_asked_for_where_the_early_choice_needs_it(
    artefacts: dict[tuple[str, str], Path], objective: str, mode: Mode
) -> None:
    """And nowhere else; both happen. Who has all features may give them at once, and gets the later choice."""
    selector = loaded(artefacts[objective, LIGHT])
    roots = one_by_one(batch_of(*roots_of(mode, LIGHT), LIGHT))
    tuned = selector.at(*setting_of(mode))
    early = [tuned.select(early_of(features)) for features in roots]
    known = [tuned.select(early_of(features), final=True) for features in roots]
    assert early == [None if action.drafts else action for action in known]
    assert 0.05 < sum(action is None for action in early) / len(roots) < 0.95
    late = [tuned.select(features) for features in roots]
    assert any(own is not None and own != other for own, other in zip(early, late, strict=True)) and None not in late


def test_the_match_alone_will_do_for_the_rule(artefact: Path) -> None:
    selector, chosen = loaded(artefact), set()
    tuned = selector.at(0.4)
    for features in one_by_one(batch_of(*roots_of(COPIES, LIGHT), LIGHT)):
        match = features[SCALARS_KEY][PAIR.index("match")]
        action = tuned.select({MATCH: match})
        assert action == tuned.select(early_of(features)) == selector.select(features) == COPIES.copied(float(match))
        assert Tuned(COPIES).select({MATCH: match}) == action
        chosen.add(action)
    assert chosen == {COPIES.action, Action.copy(8)}


def test_on_long_texts_the_match_alone_will_do_without_the_rules_lookup_too(artefact: Path) -> None:
    """Of an engine that cannot draft it; the static tree is then drafted."""
    whole, fewer = (loaded(artefact).at(1.8, shapes=shapes) for shapes in (None, [(1, 3, 0), (1, 2, 0)]))
    assert fewer.mode.rule is None and fewer.longest == whole.longest == SHORT.longest
    for match in (0.0, 9.0):
        assert fewer.select({MATCH: torch.tensor(match)}) == fewer.mode.action
        assert whole.select({MATCH: torch.tensor(match)}) == SHORT.copied(match)


def test_a_mode_without_a_network_needs_no_selector() -> None:
    assert Tuned(STATIC).select(None) == Tuned(STATIC).select({}) == STATIC.action
    assert Tuned(COPIES).select(None) == COPIES.action
    with pytest.raises(InputError, match="match is missing"):
        Tuned(COPIES).select({})
    with pytest.raises(InputError):
        Tuned(SOME)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(50), torch.full((len(PAIR.scalars),), torch.nan), torch.zeros(len(PAIR.scalars)).double()]
)
def test_the_exported_module_refuses_scalars_of_another_kind(
    artefacts: dict[tuple[str, str], Path], wrong: torch.Tensor
) -> None:
    with pytest.raises(torch.jit.Error, match="scalars are "):
        scripted(artefacts["regressor", LIGHT])({SCALARS_KEY: wrong})
