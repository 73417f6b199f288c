"""What is drafted, given what every action yields and costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import NETWORK, RHOS, RULE, STATIC, LookupRule, Setting, choices, nearest
from selector.sampling import Sampling
from selector.schema import DRAFTER, EARLY, LIGHT, MATCH, TEXT

SPACE = ActionSpace(2, 1, 2, (4,))
CHAIN = SPACE.chain(2)
DECIDED = Setting(Sampling(0.7, 0.9), CHAIN, (LIGHT,), speed=120.0, rho=0.5)
COPIES = Setting(Sampling(0.7, 0.9), CHAIN, rule=LookupRule(least=3, length=4))


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("allowed", [(), (0, 2, 3), (4, 7, 8), (5,)], ids=str)
def test_the_action_with_the_most_net_tokens_is_chosen(
    rho: float, allowed: tuple[int, ...]
) -> None:
    """`E - price T`, by hand. Others are not chosen, nor do they move the price."""
    setting = replace(DECIDED, rho=rho, allowed=allowed)
    may = set(allowed or range(len(SPACE)))
    generator, shape = torch.Generator().manual_seed(1), (200, len(SPACE))
    efficiency_BA = 1 + 4 * torch.rand(shape, generator=generator)
    seconds_BA = 0.01 + 0.04 * torch.rand(shape, generator=generator)
    positions_K = setting.positions(SPACE)
    predicted_BK = efficiency_BA.numpy()[:, positions_K]
    chosen_B = choices(predicted_BK, seconds_BA.numpy()[:, positions_K], positions_K, setting)
    assert set(chosen_B.tolist()) == may
    for efficiency, seconds, chosen in zip(
        efficiency_BA.tolist(), seconds_BA.tolist(), chosen_B.tolist(), strict=True
    ):
        ratio = max(efficiency[a] / seconds[a] for a in may)
        price = setting.speed ** (1 - rho) * ratio**rho
        worth = {a: efficiency[a] - price * seconds[a] for a in may}
        assert worth[chosen] == pytest.approx(max(worth.values()), abs=1e-5)


def test_on_longer_texts_a_network_gives_way_to_the_rule() -> None:
    short = replace(DECIDED, rule=COPIES.rule, longest=175)
    rule, static = short.without_network(), DECIDED.without_network()
    assert (
        rule == replace(DECIDED, feature_levels=(), rule=COPIES.rule)
        and static == DECIDED.static_only()
    )
    assert [setting.decider for setting in (short, rule, static)] == [NETWORK, RULE, STATIC]
    assert [setting.asked for setting in (short, rule, static)] == [(LIGHT,), (MATCH,), ()]


def test_a_rule_copies_more_after_longer_matches() -> None:
    rule = LookupRule(2, 4, longer=((5, 8), (9, 16)))
    four, eight, sixteen = map(Action.copy, (4, 8, 16))
    assert rule.lookups == {2: four, 5: eight, 9: sixteen}
    setting = replace(COPIES, rule=rule)
    for match in range(20):
        lookup = sixteen if match >= 9 else eight if match >= 5 else four
        assert setting.copied(float(match)) == (lookup if match >= 2 else CHAIN)
    assert rule.within([four, sixteen, CHAIN]) == LookupRule(2, 4, longer=((9, 16),))
    assert rule.within([eight]) == LookupRule(5, 8) and rule.within([CHAIN]) is None
    tree = LookupRule(2, 4, ((0,),), ((5, 8),))
    assert list(tree.lookups.values()) == [Action.ranked(((0,),), 4), Action.ranked(((0,),), 8)]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(Sampling(0.0), EMPTY),
        DECIDED,
        replace(DECIDED, allowed=(0, 3, 4), rho=0.25),
        DECIDED.static_only(),
        COPIES,
        replace(DECIDED, feature_levels=(TEXT,), batch=16, level=TEXT),
        replace(DECIDED, sampling=Sampling(0.7, 0.9, 20, 0.05, 0.0)),
        replace(DECIDED, feature_levels=(DRAFTER,), batch=4, level=DRAFTER, joint=900.0),
        replace(DECIDED, rule=LookupRule(3, 4), longest=175),
        replace(COPIES, rule=LookupRule(3, 4, longer=((5, 8), (9, 16)))),
        replace(DECIDED, feature_levels=(EARLY, LIGHT)),
    ],
    ids=str,
)
def test_a_setting_survives_json(setting: Setting) -> None:
    row = json.loads(json.dumps({**setting.row(), "mean_efficiency": [1.0], "further": None}))
    back = Setting.of(row)
    assert back == setting
    assert (
        type(back.action) is Action
        and type(back.allowed) is tuple
        and type(back.feature_levels) is tuple
    )
    assert back.rule is None or type(back.rule) is LookupRule
    assert row["decides"] == (setting.decider == NETWORK)  # said for those who read the file


def test_the_nearest_sampling_is_taken_and_of_its_settings_the_nearest_number_of_requests() -> None:
    """By how often the number doubles; none makes up for another sampling."""
    settings = [
        Setting(Sampling(t, p), EMPTY) for t, p in ((0.0, 1.0), (0.6, 1.0), (1.0, 1.0), (1.0, 0.9))
    ]
    for numbers, wanted in (
        ((0.1, 1.0), 0),
        ((0.55, 1.0), 1),
        ((0.9, 1.0), 2),
        ((1.0, 0.94), 3),
        ((1.0, 0.96), 2),
        ((9.0, 0.1), 3),
    ):
        assert nearest(settings, Sampling(*numbers)) == settings[wanted], numbers
    settings = [
        Setting(Sampling(t), EMPTY, batch=batch) for t in (0.0, 0.1) for batch in (1, 4, 64)
    ]
    for T, batch, wanted in (
        (0.0, 1, 0),
        (0.0, 3, 1),
        (0.0, 15, 1),
        (0.0, 17, 2),
        (0.0, 512, 2),
        (0.06, 1, 3),
        (0.1, 64, 5),
    ):
        assert nearest(settings, Sampling(T), batch) == settings[wanted], (T, batch)
