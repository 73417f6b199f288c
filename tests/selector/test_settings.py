"""Sampling settings and features beyond those that a selector was trained on, and those that are
refused: one clear line instead of a decision without meaning."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selector.decision import Setting
from selector.runtime.artefact import checked
from selector.runtime.selector import Policy, load_selector
from selector.sampling import Sampling
from selector.schema import (
    FULL,
    HIDDEN_STATES,
    LIGHT,
    MATCH,
    PAIR,
    SCALARS_KEY,
    TEXT_SCALARS,
    InputError,
)
from tests.selector import exported
from tests.selector.exported import (
    COPIES,
    SHORT,
    SOME,
    batch_of,
    early_of,
    loaded,
    one_by_one,
    roots_of,
    scripted,
)
from tests.selector.synthetic import SPACE, profile

NAN, INF = float("nan"), float("inf")
F, E, D = len(PAIR.names), len(TEXT_SCALARS), 5
LIGHT_WIDTHS = {SCALARS_KEY: F}
FULL_WIDTHS = {SCALARS_KEY: F, **dict.fromkeys(HIDDEN_STATES, D)}


def test_a_setting_decides_near_its_sampling_alone() -> None:
    trained, narrow = Sampling(1.0, 0.9), Sampling(1.0, 0.9, 5, 0.1)
    for near in ((1.1, 0.9), (0.9, 0.95), (1.0, 0.85), (1.0, 0.9, 50), (1.0, 0.9, 0, 0.02)):
        assert trained.covers(Sampling(*near)), near
    for far in (
        (1.11, 0.9),
        (0.0, 0.9),
        (1.0, 0.96),
        (1.0, 0.84),
        (1.0, 0.9, 49),
        (1.0, 0.9, 0, 0.03),
    ):
        assert not trained.covers(Sampling(*far)), far
    assert (
        narrow.covers(narrow)
        and not narrow.covers(Sampling(1.0, 0.9, 5))
        and not narrow.covers(Sampling(1.0, 0.9, 6, 0.1))
    )
    # at temperature 0 they change nothing
    assert replace(narrow, temperature=0.0).covers(Sampling(0.0, 0.5))


@pytest.mark.parametrize(
    ("asked", "setting", "words"),
    [
        ({"temperature": 1.2}, SOME, "T=1.2: too far from the trained T=1; "),
        ({"temperature": 1.0, "top_k": 5}, SOME, "T=1, top-k=5: too far"),
        ({"temperature": 1.0, "min_p": 0.3}, SOME, "T=1, min-p=0.3: too far"),
        ({"temperature": 0.4, "top_p": 0.8}, COPIES, "T=0.4, top-p=0.8: too far"),
        ({"temperature": 9.0}, SHORT, "T=9: too far"),
    ],
)
def test_far_from_every_trained_setting_the_rule_and_the_static_tree_decide(
    artefact: Path, asked: dict[str, float], setting: Setting, words: str
) -> None:
    """And one line says so, once in a process. Of the settings that cover a sampling the nearest
    one
    decides: SOME is farther from (0.91, 0.96) than NUCLEUS, whose top-p is too far."""
    selector = load_selector(artefact)
    asked_sampling = replace(setting, sampling=Sampling(asked["temperature"]))
    roots = one_by_one(batch_of(*roots_of(asked_sampling, LIGHT), LIGHT))
    with pytest.warns(UserWarning, match=words) as warned:
        policy = selector.at(**asked)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selector.at(**asked).setting == policy.setting
        assert selector.at(0.91, 0.96).setting == SOME
        assert selector.at(**asked, shapes=[(1, 2, 0)]).select(None) == (1, 2, 0, "iid")
    assert policy.select(None) == setting.action
    chosen = {policy.select(features) for features in roots}
    if setting.rule is None:
        assert policy.feature_levels == () and chosen == {setting.action}
    else:
        assert policy.feature_levels == (MATCH,) and chosen == {
            setting.action,
            *setting.rule.lookups.values(),
        }


@pytest.mark.parametrize(
    ("far", "nearest"), [(1.15, SOME), (0.45, COPIES), (5.0, SHORT)], ids=["tree", "rule", "both"]
)
@torch.inference_mode()
def test_features_far_from_every_setting_give_the_rule_in_every_form(
    artefact: Path, far: float, nearest: Setting
) -> None:
    """TorchScript, the selector, and a setting that was asked for another sampling; both may say
    so."""
    selector = load_selector(artefact)
    batch = batch_of(*roots_of(replace(SOME, sampling=Sampling(far)), LIGHT), LIGHT)
    if nearest is COPIES:
        batch[SCALARS_KEY][:, PAIR.index("top_p")] = 0.5
    expected = [nearest.copied(match) for match in batch[SCALARS_KEY][:, PAIR.index("match")]]
    assert [SPACE.actions[a] for a in scripted(artefact)(batch)[0]] == expected
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert [selector.select(root) for root in one_by_one(batch)] == expected
        assert [SPACE.actions[a] for a in selector.scores(batch).argmax(-1)] == expected
        assert {Policy(SOME, selector).select(root) for root in one_by_one(batch)} == {SOME.action}
    if nearest.feature_levels:
        assert 0 < len(warned) < 3 and "too far from the trained" in str(warned[0].message)


def ones(*batch: int) -> dict[str, torch.Tensor]:
    return {name: torch.ones(*batch, width) for name, width in FULL_WIDTHS.items()}


def test_features_of_one_root_and_of_a_batch_are_read() -> None:
    """Of early scalars alone, hidden states are not read, whether or not they are there."""
    assert set(checked(ones(), LIGHT_WIDTHS, 1)) == {SCALARS_KEY}  # more than is read does no harm
    assert set(checked(ones(), FULL_WIDTHS, 1)) == set(FULL_WIDTHS)
    assert checked(ones(3), FULL_WIDTHS, 2)[SCALARS_KEY].shape == (3, F)
    early = {SCALARS_KEY: torch.ones(3, E)}
    for given in (early, {**ones(3), **early}):
        assert set(checked(given, FULL_WIDTHS, 2, E)) == {SCALARS_KEY}
    with pytest.raises(InputError, match="batches of different sizes"):
        checked({**ones(3), SCALARS_KEY: torch.ones(2, F)}, FULL_WIDTHS, 2)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({SCALARS_KEY: None}, "scalars is missing, or no tensor"),
        ({SCALARS_KEY: [0.0] * F}, "scalars is missing, or no tensor"),
        (
            {SCALARS_KEY: torch.ones(F - 7)},
            rf"scalars is torch.float32 \[{F - 7}\]; torch.float32 \[{F}\] is needed",
        ),
        ({SCALARS_KEY: torch.ones(2, F)}, rf"\[2, {F}\]; torch.float32 \[{F}\] is needed"),
        ({SCALARS_KEY: torch.ones(2, E)}, "is needed"),
        ({SCALARS_KEY: torch.ones(F, dtype=torch.float64)}, "scalars is torch.float64"),
        ({SCALARS_KEY: torch.full((E,), NAN)}, "scalars is not finite"),
        ({SCALARS_KEY: torch.tensor([1.0] * (F - 1) + [INF])}, "scalars is not finite"),
        ({HIDDEN_STATES[1]: None}, f"{HIDDEN_STATES[1]} is missing"),
        ({HIDDEN_STATES[2]: torch.ones(D + 1)}, f"{HIDDEN_STATES[2]} is"),
        (
            {HIDDEN_STATES[0]: torch.tensor([1.0, 2, 3, 4, NAN])},
            f"{HIDDEN_STATES[0]} is not finite",
        ),
    ],
)
def test_a_feature_that_is_not_the_schemas_is_refused_by_name(spoilt: dict, message: str) -> None:
    given = {name: value for name, value in {**ones(), **spoilt}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        checked(given, FULL_WIDTHS, 1, E)


@pytest.mark.parametrize(
    "setting",
    [
        (-1.0,),
        (NAN,),
        (INF,),
        (1.0, 0.0),
        (1.0, 1.5),
        (1.0, 1.0, -1),
        (1.0, 1.0, 0, NAN),
        (1.0, 1.0, 0, 0.0, INF),
    ],
)
def test_what_is_no_sampling_setting_is_refused(setting: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match="no sampling setting"):
        Sampling(*setting)


def test_a_match_that_is_not_finite_and_no_number_of_requests_are_refused(artefact: Path) -> None:
    for batch in (0.0, 0.5, -1.0, INF, NAN):
        with pytest.raises(InputError, match="there is at least one request"):
            loaded(artefact).at(1.0, batch=batch)
    for match in (NAN, INF):
        with pytest.raises(InputError, match="features: match is not finite"):
            loaded(artefact).at(*exported.coordinates_of(COPIES)).select(
                {MATCH: torch.tensor(match)}
            )


def test_the_rule_decides_for_all_requests_as_for_each(artefact: Path) -> None:
    policy = loaded(artefact).at(*exported.coordinates_of(COPIES))
    matches = torch.arange(40.0)
    alone = [policy.select({MATCH: match}) for match in matches]
    assert policy.select_jointly({MATCH: matches}) == alone and len(set(alone)) > 1
    with pytest.raises(InputError, match="features: match is not finite"):
        policy.select_jointly({MATCH: torch.tensor([1.0, NAN])})


def test_another_pair_other_weights_and_another_machine_are_named_once(artefact: Path) -> None:
    """The same weights under other names are not."""
    selector = load_selector(artefact)  # for the models `t` and `d`
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selector.check_pair("t", "models/d/", f"{profile().device}, 2 threads, float32")
        selector.latency = replace(selector.latency, weights=["a", "b"])
        selector.check_pair("elsewhere", "moved", weights=["a", "b"])
    for target, weights in (("org/other", ()), ("t", ["a", "c"])):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                selector.check_pair(target, "d", "a laptop", weights)
        pair_said = str(warned[0].message)
        assert pair_said.startswith(f"the selector was trained for t and d; {target} and d")
    assert len(warned) == 1, "the machine was named before"


@pytest.mark.parametrize("level", [LIGHT, FULL])
@torch.inference_mode()
def test_no_form_gives_its_network_an_input_beyond_its_range_in_training(
    artefacts: dict[tuple[str, str], Path], level: str
) -> None:
    """Features far outside the range, which the artefact states, give what the nearest features
    inside give."""
    folder = artefacts["regressor", level]
    selector, script = loaded(folder), scripted(folder)
    low_F, high_F = torch.tensor(selector.config.ranges).T
    kept = ("temperature", "top_p", MATCH)
    kept_F = torch.tensor([not each.learned or each.name in kept for each in PAIR.scalars])
    up_F = torch.arange(len(PAIR.scalars)) % 2 == 0
    edge_F = torch.where(up_F, high_F, low_F)
    beyond_F = torch.where(up_F, high_F + 1e3, low_F - 1e3)
    for setting in exported.settings_of(level)[2:]:
        batch = batch_of(*roots_of(setting, level, count=1), level)
        scalars_BF = batch[SCALARS_KEY]
        edge = {**batch, SCALARS_KEY: torch.where(kept_F, scalars_BF, edge_F)}
        beyond = {**batch, SCALARS_KEY: torch.where(kept_F, scalars_BF, beyond_F)}
        for view in (dict, early_of):
            for scores in (selector.scores, lambda features: script(features)[1]):
                edge_BA = scores(view(edge))
                torch.testing.assert_close(scores(view(beyond)), edge_BA, atol=1e-3, rtol=1e-5)
                assert not torch.allclose(edge_BA, scores(view(batch)), atol=1e-2)
