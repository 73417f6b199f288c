"""Sampling settings and features beyond those that a selector was trained on."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selector.decision import Mode
from selector.runtime.selector import Tuned, load_selector
from selector.sampling import Sampling
from selector.schema import FULL, LIGHT, MATCH, PAIR, SCALARS_KEY, InputError
from tests.selector.exported import (
    COPIES,
    IN_TURN,
    SHORT,
    SOME,
    batch_of,
    early_of,
    loaded,
    modes_of,
    one_by_one,
    roots_of,
    scripted,
    setting_of,
)
from tests.selector.synthetic import SPACE, profile

TRAINED = Sampling(1.0, 0.9)


@pytest.mark.parametrize("setting", [(1.1, 0.9), (0.9, 0.95), (1.0, 0.85), (1.0, 0.9, 50), (1.0, 0.9, 0, 0.02)])
def test_a_mode_decides_near_its_setting(setting: tuple[Any, ...]) -> None:
    assert TRAINED.covers(Sampling(*setting))


@pytest.mark.parametrize(
    "setting", [(1.11, 0.9), (0.0, 0.9), (1.0, 0.96), (1.0, 0.84), (1.0, 0.9, 49), (1.0, 0.9, 0, 0.03)]
)
def test_a_mode_does_not_decide_far_from_its_setting(setting: tuple[Any, ...]) -> None:
    assert not TRAINED.covers(Sampling(*setting))


def test_top_k_and_min_p_are_compared_with_the_modes_own() -> None:
    own = Sampling(1.0, 0.9, 5, 0.1)
    assert own.covers(own) and not own.covers(Sampling(1.0, 0.9, 5)) and not own.covers(Sampling(1.0, 0.9, 6, 0.1))
    assert replace(own, temperature=0.0).covers(Sampling(0.0, 0.5))  # at temperature 0 they change nothing


@pytest.mark.parametrize(
    ("asked", "mode", "words"),
    [
        ({"temperature": 1.2}, SOME, "T=1.2: too far from the trained T=1; "),
        ({"temperature": 1.0, "top_k": 5}, SOME, "T=1, top-k=5: too far"),
        ({"temperature": 1.0, "min_p": 0.3}, SOME, "T=1, min-p=0.3: too far"),
        ({"temperature": 0.4, "top_p": 0.8}, COPIES, "T=0.4, top-p=0.8: too far"),
        ({"temperature": 9.0}, SHORT, "T=9: too far"),
    ],
    ids=["temperature", "top-k", "min-p", "top-p", "with a rule"],
)
def test_far_from_every_trained_setting_the_rule_and_the_static_tree_decide(
    artefact: Path, asked: dict[str, float], mode: Mode, words: str
) -> None:
    """And one line says so, once in a process."""
    selector = load_selector(artefact)
    data, rows = roots_of(replace(mode, sampling=Sampling(asked["temperature"])), LIGHT)
    with pytest.warns(UserWarning, match=words) as warned:
        tuned = selector.at(**asked)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selector.at(**asked).mode == tuned.mode
        assert selector.at(**asked, shapes=[(1, 2, 0)]).select(None) == (1, 2, 0, "iid")
    assert tuned.feature_levels == ((MATCH,) if mode.rule else ()) and tuned.select(None) == mode.action
    chosen = {tuned.select(features) for features in one_by_one(batch_of(data, rows, LIGHT))}
    assert chosen == {mode.action, *([mode.rule.lookup] if mode.rule else [])}


def test_the_nearest_of_the_modes_that_cover_a_setting_decides(artefact: Path) -> None:
    """SOME is farther from this setting than NUCLEUS, whose top-p is too far."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_selector(artefact).at(0.91, 0.96).mode == SOME


@pytest.mark.parametrize(("far", "nearest"), [(1.15, SOME), (0.45, COPIES), (5.0, SHORT)], ids=["tree", "rule", "both"])
@torch.inference_mode()
def test_features_far_from_every_setting_give_the_rule_in_every_form(artefact: Path, far: float, nearest: Mode) -> None:
    """TorchScript, the selector, and a mode that was asked for another setting; both may say so."""
    selector, (data, rows) = load_selector(artefact), roots_of(replace(SOME, sampling=Sampling(far)), LIGHT)
    batch = batch_of(data, rows, LIGHT)
    if nearest is COPIES:
        batch[SCALARS_KEY][:, PAIR.index("top_p")] = 0.5
    expected = [nearest.copied(float(match)) for match in batch[SCALARS_KEY][:, PAIR.index("match")]]
    assert [SPACE.actions[a] for a in scripted(artefact)(batch)[0]] == expected
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert [selector.select(root) for root in one_by_one(batch)] == expected
        assert [SPACE.actions[a] for a in selector.scores(batch).argmax(-1)] == expected
        assert {Tuned(SOME, selector).select(root) for root in one_by_one(batch)} == {SOME.action}
    if nearest.feature_levels:
        assert all("too far from the trained" in str(each.message) for each in warned) and 0 < len(warned) < 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scalars_of_another_dtype_are_refused(artefact: Path, dtype: torch.dtype) -> None:
    """In one line, also where NumPy has no such dtype."""
    data, rows = roots_of(IN_TURN, LIGHT, count=1)
    scalars = one_by_one(batch_of(data, rows, LIGHT))[0][SCALARS_KEY]
    for ask in (loaded(artefact).at(*setting_of(IN_TURN)).select, loaded(artefact).select):
        with pytest.raises(InputError, match=f"features: scalars is {dtype}"):
            ask({SCALARS_KEY: scalars[: PAIR.first].to(dtype)})


@pytest.mark.parametrize("match", [float("nan"), float("inf")])
def test_a_match_that_is_not_finite_is_refused(artefact: Path, match: float) -> None:
    scalars = torch.ones(len(PAIR.names))
    scalars[PAIR.index("match")] = match
    for features, name in (({MATCH: torch.tensor(match)}, "match"), ({SCALARS_KEY: scalars}, "scalars")):
        with pytest.raises(InputError, match=f"features: {name} is not finite"):
            loaded(artefact).at(*setting_of(COPIES)).select(features)


def test_another_pair_and_another_machine_are_named_once(artefact: Path) -> None:
    selector = load_selector(artefact)  # for the models `t` and `d`
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selector.check_pair("t", "models/d/", f"{profile().device}, 2 threads, float32")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        selector.check_pair("org/other", "d", "a laptop")
        selector.check_pair("org/other", "d", "a laptop")
    assert [str(each.message) for each in warned] == [
        "the selector was trained for t and d; org/other and d decode",
        "the selector has the step times of test machine; a laptop decodes",
    ]


def test_other_weights_under_the_same_names_are_named(artefact: Path) -> None:
    """And the same weights under other names are not."""
    selector = load_selector(artefact)
    selector.latency = replace(selector.latency, weights=["a", "b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selector.check_pair("elsewhere", "moved", weights=["a", "b"])
        selector.check_pair("t", "d")  # not known
    with pytest.warns(UserWarning, match="trained for t and d; t with other weights and d with other weights decode"):
        selector.check_pair("t", "d", weights=["a", "c"])


@pytest.mark.parametrize("level", [LIGHT, FULL])
@torch.inference_mode()
def test_no_form_gives_its_network_an_input_beyond_its_range_in_training(
    artefacts: dict[tuple[str, str], Path], level: str
) -> None:
    """Features far outside the range, which the artefact states, give what the nearest features inside give."""
    folder = artefacts["regressor", level]
    stated = json.loads((folder / "config.json").read_text())["features"]["scalars"]
    low_F, high_F = (torch.tensor([scalar[side] for scalar in stated]) for side in ("lowest", "highest"))
    own_F = torch.tensor(
        [not scalar["learned"] or scalar["name"] in ("temperature", "top_p", MATCH) for scalar in stated]
    )
    for mode in modes_of(level)[2:]:
        data, rows = roots_of(mode, level, count=1)
        inside = batch_of(data, rows, level)
        inside[SCALARS_KEY] = torch.where(own_F, inside[SCALARS_KEY], inside[SCALARS_KEY].clamp(low_F, high_F))
        up_F = torch.arange(len(stated)) % 2 == 0
        beyond, edge = ({**inside} for _ in range(2))
        beyond[SCALARS_KEY] = torch.where(own_F, inside[SCALARS_KEY], torch.where(up_F, high_F + 1e3, low_F - 1e3))
        edge[SCALARS_KEY] = torch.where(own_F, inside[SCALARS_KEY], torch.where(up_F, high_F, low_F))
        for view in (lambda features: features, early_of):
            for scores in (loaded(folder).scores, lambda batch: scripted(folder)(batch)[1]):
                far_BA, near_BA, own_BA = (scores(view(each)) for each in (beyond, edge, inside))
                torch.testing.assert_close(far_BA, near_BA, atol=1e-3, rtol=1e-5)
                assert not torch.allclose(near_BA, own_BA, atol=1e-2)
