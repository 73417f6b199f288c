"""What actions save over a policy: exactly what replay says when one of them is taken at one root."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from selector.actions import Lookup
from selector.data import Timed
from selector.decision import Rule
from selector.objective import saving_loss
from selector.replay import Replayed, replay, savings
from selector.schema import EARLY, MATCH
from selector.tuning import decided
from tests.selector.synthetic import SPACE, static_mode, texts, timed

DATA = timed(texts(6, 30, seed=3, repeats=0.4))
STATIC = static_mode(DATA)
COPIES = replace(STATIC, sees=(MATCH,), rule=Rule(4, 8))


def replayed(data: Timed, action_R: Tensor) -> Replayed:
    seconds_R = data.seconds((EARLY,)).gather(-1, action_R.unsqueeze(-1))[:, 0]
    return replay(data.survivals_RS, action_R, seconds_R, data.texts.layout, SPACE)


@pytest.mark.parametrize("mode", [STATIC, COPIES], ids=["static", "copies"])
def test_a_saving_is_what_replay_says(mode: object) -> None:
    """Of one action at one root. Tokens beyond the text's end are worth the policy's own time."""
    action_R = decided(DATA, {}, mode).action_R  # type: ignore[arg-type]
    own = replayed(DATA, action_R)
    saved_RA = savings(DATA.survivals_RS, action_R, DATA.seconds((EARLY,)), DATA.texts.layout, SPACE)
    assert saved_RA.gather(-1, action_R.unsqueeze(-1)).abs().max() < 1e-6
    visited = [*own.visits_R.topk(12).indices.tolist(), 29, 28, 59]  # and the last ones of a text
    for root in visited:
        for action in (0, 7, SPACE.index(Lookup(16)), 100, 200):
            changed_R = action_R.clone()
            changed_R[root] = action
            other = replayed(DATA, changed_R)
            seconds = float((own.seconds_X - other.seconds_X).sum())
            tokens = float((own.tokens_X - other.tokens_X).sum())
            expected = float(own.visits_R[root] * saved_RA[root, action])
            assert expected == pytest.approx(seconds - tokens / own.speed, abs=1e-8)


def test_taking_what_saves_most_is_faster() -> None:
    """One step of policy improvement, and another, on texts whose labels are all known."""
    action_R, speeds = decided(DATA, {}, COPIES).action_R, []
    for _ in range(3):
        speeds.append(replayed(DATA, action_R).speed)
        saved_RA = savings(DATA.survivals_RS, action_R, DATA.seconds((EARLY,)), DATA.texts.layout, SPACE)
        action_R = torch.where(DATA.texts.first_R, action_R, saved_RA.argmax(-1))
    assert speeds[1] > 1.05 * speeds[0] and speeds[2] >= speeds[1]


def test_the_loss_of_savings_counts_roots_by_how_often_they_are_decided_at() -> None:
    predicted_BA, saved_BA = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    assert saving_loss(predicted_BA, saved_BA, torch.tensor([1.0, 0.0])).item() == pytest.approx(1)
    assert saving_loss(predicted_BA, saved_BA, torch.tensor([1.0, 1.0])).item() == pytest.approx(5)
    assert saving_loss(saved_BA, saved_BA, torch.tensor([1.0, 2.0])).item() == 0
