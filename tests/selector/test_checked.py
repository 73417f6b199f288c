"""What an artefact's reader refuses to decide on: one clear line instead of a decision without meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selector.runtime.artefact import checked
from selector.runtime.selector import checked_batch
from selector.sampling import Sampling
from selector.schema import EARLY_SCALARS, HIDDEN_STATES, PAIR, SCALARS_KEY, InputError

F, E, D = len(PAIR.names), len(EARLY_SCALARS), 5
LIGHT_WIDTHS = {SCALARS_KEY: F}
FULL_WIDTHS = {SCALARS_KEY: F, **dict.fromkeys(HIDDEN_STATES, D)}


def features(*batch: int) -> dict[str, torch.Tensor]:
    return {name: torch.ones(*batch, width) for name, width in FULL_WIDTHS.items()}


def test_features_of_one_root_and_of_a_batch_are_read() -> None:
    """Of early scalars alone, hidden states are not read, whether or not they are there."""
    assert set(checked(features(), LIGHT_WIDTHS, 1)) == {SCALARS_KEY}  # more than is read does no harm
    assert set(checked(features(), FULL_WIDTHS, 1)) == set(FULL_WIDTHS)
    assert checked(features(3), FULL_WIDTHS, 2)[SCALARS_KEY].shape == (3, F)
    early = {SCALARS_KEY: torch.ones(3, E)}
    for given in (early, {**features(3), **early}):
        assert set(checked(given, FULL_WIDTHS, 2, E)) == {SCALARS_KEY}


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({SCALARS_KEY: None}, "scalars is missing"),
        ({SCALARS_KEY: [0.0] * F}, "scalars is no tensor"),
        ({SCALARS_KEY: torch.ones(F - 7)}, rf"scalars is torch.float32 \[{F - 7}\]; torch.float32 \[{F}\] is needed"),
        ({SCALARS_KEY: torch.ones(2, F)}, rf"\[2, {F}\]; torch.float32 \[{F}\] is needed"),
        ({SCALARS_KEY: torch.ones(2, E)}, "is needed"),
        ({SCALARS_KEY: torch.ones(F, dtype=torch.float64)}, "scalars is torch.float64"),
        ({SCALARS_KEY: torch.full((E,), float("nan"))}, "scalars is not finite"),
        ({SCALARS_KEY: torch.tensor([1.0] * (F - 1) + [float("inf")])}, "scalars is not finite"),
        ({HIDDEN_STATES[1]: None}, f"{HIDDEN_STATES[1]} is missing"),
        ({HIDDEN_STATES[2]: torch.ones(D + 1)}, f"{HIDDEN_STATES[2]} is"),
        ({HIDDEN_STATES[0]: torch.tensor([1.0, 2, 3, 4, float("nan")])}, f"{HIDDEN_STATES[0]} is not finite"),
    ],
)
def test_a_feature_that_is_not_the_schemas_is_refused_by_name(spoilt: dict, message: str) -> None:
    given = {name: value for name, value in {**features(), **spoilt}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        checked(given, FULL_WIDTHS, 1, E)


def test_batches_of_different_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="batches of different sizes"):
        checked({**features(3), SCALARS_KEY: torch.ones(2, F)}, FULL_WIDTHS, 2)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "setting",
    [(-1.0,), (NAN,), (INF,), (1.0, 0.0), (1.0, 1.5), (1.0, 1.0, -1), (1.0, 1.0, 0, NAN), (1.0, 1.0, 0, 0.0, INF)],
)
def test_what_is_no_sampling_setting_is_refused(setting: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match="no sampling setting"):
        Sampling(*setting)


@pytest.mark.parametrize("batch", [0.0, 0.5, -1.0, float("inf"), float("nan")])
def test_what_is_no_number_of_requests_is_refused(batch: float) -> None:
    with pytest.raises(InputError, match="there is at least one request"):
        checked_batch(batch)
