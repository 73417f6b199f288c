"""Recent acceptance: chains as long as recent acceptance says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from selector.decision import RHOS, choices
from selector.schema import DECAYS, LIGHT, PAIR, SCALARS_KEY
from selector.train.data import Timed
from selector.train.recent_acceptance import MOST, RecentAcceptance, chain_efficiencies
from selector.train.replay import replay
from selector.train.tuning import StaticTable, best_static
from tests.selector.synthetic import EASY, HARD, SPACE, texts, timed

CHAINS = SPACE.chain_positions


def told() -> Timed:
    """Texts whose running means tell where it is easy: those that forget fast, best."""
    data = texts(10, 40)
    easy_R = data.survivals["traversal"][:, 0] > 0.5
    noise_R = torch.rand(len(easy_R), generator=torch.Generator().manual_seed(7)) - 0.5
    scalars_RF = data.scalars_RF.clone()
    for weight, decay in zip((0.2, 0.6, 1.2, 2.0), DECAYS, strict=True):
        own_R = torch.where(easy_R, EASY, HARD) + weight * noise_R
        scalars_RF[:, PAIR.index(f"accepted_mean_{decay:g}")] = own_R.clamp(0, 1)
    scalars_RF[data.unknown_R] = 0
    return timed(replace(data, scalars_RF=scalars_RF))


@pytest.mark.parametrize("decay", DECAYS)
def test_chains_yield_a_geometric_sum(decay: float) -> None:
    a_B = torch.tensor([0.0, 0.25, 0.5, 0.9, 1.0])
    scalars_BF = torch.rand(5, len(PAIR.names), generator=torch.Generator().manual_seed(1))
    scalars_BF[:, PAIR.index(f"accepted_mean_{decay:g}")] = a_B
    efficiency_BA = chain_efficiencies(scalars_BF, decay, SPACE)
    assert len(CHAINS) == 17
    for length, at in enumerate(CHAINS):
        assert SPACE.actions[at] == SPACE.chain(length)
        for b, a in enumerate(a_B.clamp(max=MOST).tolist()):
            assert float(efficiency_BA[b, at]) == pytest.approx(sum(a**n for n in range(length + 1)), rel=2e-4)
    others = [a for a in range(len(SPACE)) if a not in CHAINS]
    assert efficiency_BA.shape == (5, len(SPACE)) and len(others) == len(SPACE) - 17
    assert bool((efficiency_BA[:, others] == 1).all())


def test_the_tuned_rule_is_the_fastest_of_all_that_are_tried() -> None:
    data = told()
    static = best_static(data, StaticTable.of(data))
    rule = RecentAcceptance.tuned(data, static)
    speeds = {}
    at, seconds_RA = SPACE.index(static.action), data.seconds((LIGHT,))
    for rho in (0.0, 0.5, 1.0):
        assert rho in RHOS
        for decay in DECAYS:
            mode = replace(static, feature_levels=(LIGHT,), rho=rho, allowed=CHAINS)
            chosen_R = choices(chain_efficiencies(data.texts.scalars_RF, decay, SPACE), seconds_RA, mode, SPACE)
            chosen_R[data.texts.unknown_R] = at
            seconds_R = seconds_RA.gather(-1, chosen_R.unsqueeze(-1))[:, 0]
            speeds[rho, decay] = replay(data.survivals_RS, chosen_R, seconds_R, data.texts.size_X, SPACE).speed
    assert (rule.mode.rho, rule.decay) == max(speeds, key=speeds.__getitem__)
    assert rule.replay(data).speed == pytest.approx(max(speeds.values()))
    assert rule.decay == DECAYS[0]
    assert rule.replay(data).speed > 1.1 * static.speed


def test_it_decides_one_root_at_a_time_as_it_does_in_replay() -> None:
    data = told()
    static = best_static(data, StaticTable.of(data))
    for decay in (DECAYS[0], DECAYS[2]):
        rule = replace(RecentAcceptance.tuned(data, static), decay=decay)
        seconds_RA = data.seconds((LIGHT,))
        chosen_R = choices(chain_efficiencies(data.texts.scalars_RF, decay, SPACE), seconds_RA, rule.mode, SPACE)
        assert set(chosen_R.tolist()) <= set(CHAINS) and len(set(chosen_R.tolist())) > 2
        for r in (~data.texts.unknown_R).nonzero()[:, 0].tolist():
            assert data.texts.scalars_RF[r, PAIR.index("context_length")] == data.texts.length_R[r]
            assert rule.select({SCALARS_KEY: data.texts.scalars_RF[r]}) == SPACE.actions[int(chosen_R[r])]
        assert rule.select(None) == static.action
        assert rule.feature_levels == (LIGHT,)
