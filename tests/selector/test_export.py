from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selector.actions import Choice, Lookup, without_draft
from selector.decision import NEVER
from selector.export.write import load_script
from selector.runtime.artefact import Features
from selector.runtime.selector import load_selector
from selector.runtime.tuned import Tuned
from selector.schema import EARLY, LIGHT, MATCH, PAIR, SCALARS_KEY, InputError
from selector.train.tuning import decide
from tests.selector.exported import (
    ANY,
    COPIES,
    DRAFTS,
    FALLBACK,
    IN_TURN,
    KINDS,
    KNOWN_EARLY,
    MODES,
    NAMES,
    NUCLEUS,
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
    worth,
)
from tests.selector.synthetic import SPACE


@pytest.mark.parametrize("at", range(len(MODES)), ids=NAMES)
@pytest.mark.parametrize(("objective", "level"), KINDS)
def test_all_ways_to_ask_choose_as_the_trained_module(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str, at: int
) -> None:
    """TorchScript in batches and one root at a time, the selector, the same under one setting, and the module's own
    choices. They add up in other orders: an action counts as the same where it is worth the same to 1e-4 tokens."""
    selector, made, mode = loaded(artefacts[objective, level]), module_of(objective, level), modes_of(level)[at]
    module = load_script(artefacts[objective, level])
    data, rows = roots_of(mode, level)
    batch = batch_of(data, rows, level)
    roots = one_by_one(batch)
    own_R = decide(data, made.predictions(data.texts, mode), mode, objective == "policy").action_R
    tuned = selector.at(mode.temperature, mode.top_p)
    assert tuned.mode == mode
    assert tuned.feature_levels == mode.feature_levels

    def script(features: Features) -> Choice:
        return SPACE.actions[int(module(features)[0])]

    with torch.inference_mode():
        index_B, _ = module(batch)
        if EARLY in mode.feature_levels:
            early_B, _ = module(early_of(batch))
            index_B = torch.where(DRAFTS[early_B] & (len(mode.feature_levels) > 1), index_B, early_B)
        alone = [in_turn(script, mode, features) for features in roots]
    asked = {
        "module": own_R[rows].tolist(),
        "batch": index_B.tolist(),
        "script": alone,
        "select": [in_turn(selector.select, mode, features) for features in roots],
        "tuned": [in_turn(tuned.select, mode, features) for features in roots],
    }
    for name, chosen in asked.items():
        assert most_lost(made, data, mode, rows, chosen) < 1e-4, name
        assert sum(a == b for a, b in zip(chosen, asked["module"], strict=True)) >= 0.95 * len(rows), name
    kinds = len(set(asked["tuned"]))
    assert kinds > 2 if mode.decides else kinds == (1 if mode.rule is None else 2)


@pytest.mark.parametrize(("objective", "level"), KINDS)
def test_scores_are_what_the_trained_module_says(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str
) -> None:
    """With all features and with the early ones alone, of a batch and of one root."""
    selector, made = loaded(artefacts[objective, level]), module_of(objective, level)
    for mode in modes_of(level):
        data, rows = roots_of(mode, level, count=2)
        for early in (False, True):
            batch = early_of(batch_of(data, rows, level)) if early else batch_of(data, rows, level)
            scores_BA = selector.scores(batch)
            assert torch.allclose(scores_BA, worth(made, data, mode, early)[rows], atol=1e-3, rtol=1e-5)
            for features, scores_A in zip(one_by_one(batch), scores_BA, strict=True):
                assert torch.allclose(selector.scores(features), scores_A, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("at", [NAMES.index("in turn"), NAMES.index("limited in turn")], ids=["any", "limited"])
@pytest.mark.parametrize(("objective", "level"), KINDS)
def test_the_draft_is_asked_for_where_the_early_choice_needs_it(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str, at: int
) -> None:
    """And nowhere else; both happen. Who has all features may give them at once, and gets the later choice."""
    selector, mode = loaded(artefacts[objective, level]), modes_of(level)[at]
    data, rows = roots_of(mode, level)
    roots = one_by_one(batch_of(data, rows, level))
    tuned = selector.at(mode.temperature, mode.top_p)
    early = [tuned.select(early_of(features)) for features in roots]
    known = [selector.select(early_of(features)) for features in roots]
    assert early == [action if without_draft(action) else None for action in known]
    assert 0.05 < sum(action is None for action in early) / len(roots) < 0.95
    late = [tuned.select(features) for features in roots]
    assert all(action is not None for action in late)
    assert any(own is not None and own != other for own, other in zip(early, late, strict=True))


def test_early_features_are_read_where_they_are_asked_for_and_refused_elsewhere(artefact: Path) -> None:
    """By the fast path. More than is asked for does no harm."""
    selector = loaded(artefact)
    for mode in MODES:
        data, rows = roots_of(mode, LIGHT, count=1)
        features = one_by_one(batch_of(data, rows, LIGHT))[0]
        tuned = selector.at(mode.temperature, mode.top_p)
        if mode.feature_levels == (LIGHT,):
            with pytest.raises(InputError, match=r"scalars is torch\.float32"):
                tuned.select(early_of(features))
        elif len(mode.feature_levels) < 2:
            assert tuned.select(early_of(features)) == tuned.select(features)


def test_the_match_alone_will_do_for_the_rule(artefact: Path) -> None:
    selector = loaded(artefact)
    tuned = selector.at(COPIES.temperature)
    data, rows = roots_of(COPIES, LIGHT)
    chosen = set()
    for features in one_by_one(batch_of(data, rows, LIGHT)):
        match = features[SCALARS_KEY][PAIR.index("match")]
        action = tuned.select({MATCH: match})
        assert action == tuned.select(early_of(features)) == selector.select(features) == COPIES.copied(float(match))
        assert Tuned(COPIES).select({MATCH: match}) == action
        chosen.add(action)
    assert chosen == {COPIES.action, Lookup(8)}


def test_on_long_texts_the_match_alone_will_do_without_the_rules_lookup_too(artefact: Path) -> None:
    """Of an engine that cannot draft it; the static tree is then drafted."""
    whole, fewer = (loaded(artefact).at(SHORT.temperature, nodes=nodes) for nodes in (None, 4))
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


@pytest.mark.parametrize(("objective", "level"), KINDS)
def test_the_highest_score_is_chosen_and_the_rest_is_never_drafted(
    artefacts: dict[tuple[str, str], Path], objective: str, level: str
) -> None:
    selector = loaded(artefacts[objective, level])
    for mode in modes_of(level):
        data, rows = roots_of(mode, level, count=2)
        batch = batch_of(data, rows, level)
        scores_BA = selector.scores(batch)
        assert scores_BA.shape == (len(rows), 453)
        may_BA = mask_of(mode, data)[rows]
        assert ((scores_BA > NEVER / 2) == may_BA).all()
        assert (scores_BA[~may_BA] == NEVER).all()
        for b, features in enumerate(one_by_one(batch)):
            scores_A = selector.scores(features)
            assert scores_A.shape == (453,)
            assert torch.allclose(scores_A, scores_BA[b], atol=1e-4, rtol=1e-5)
            assert selector.select(features) == SPACE.actions[int(scores_A.argmax())]


def test_a_root_without_features_gets_the_static_tree(artefact: Path) -> None:
    selector = load_selector(artefact)
    assert selector.select(None) == FALLBACK
    for mode in MODES:
        assert selector.at(mode.temperature, mode.top_p).select(None) == mode.action


def test_the_nearest_sampling_setting_decides(artefact: Path) -> None:
    """In a batch, too, where each root has its own."""
    selector = load_selector(artefact)
    near = {(0.1, 1.0): STATIC, (0.42, 1.0): COPIES, (0.55, 1.0): ANY, (0.87, 1.0): KNOWN_EARLY}
    near |= {(1.08, 1.0): SOME, (1.1, 0.85): NUCLEUS, (1.5, 1.0): IN_TURN, (1.35, 0.85): SOME_IN_TURN}
    batches = []
    for setting, mode in near.items():
        assert selector.at(*setting).mode == mode
        data, rows = roots_of(replace(mode, temperature=setting[0], top_p=setting[1]), LIGHT, count=1)
        batches.append(batch_of(data, rows, LIGHT)[SCALARS_KEY])
    mixed_BF = torch.cat(batches)[torch.randperm(88, generator=torch.Generator().manual_seed(1))]
    scores_BA = selector.scores({SCALARS_KEY: mixed_BF})
    for scalars_F, scores_A in zip(mixed_BF, scores_BA, strict=True):
        assert torch.allclose(selector.scores({SCALARS_KEY: scalars_F}), scores_A, atol=1e-4, rtol=1e-5)
    assert selector.at(1.0).mode == SOME  # top-p 1 unless it is said
