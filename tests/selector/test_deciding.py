"""Decisions along the trunk: the arithmetic of further actions, playing them on traces, and where they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from selector import modes
from selector.actions import EMPTY, Action, ActionSpace
from selector.deciding import outcome, play
from selector.modes import Judged, jackknife_error, judge, ratios
from selector.network import NEVER, further_actions, further_cost, increment_matrix, increments_of, picked
from tests.selector.synthetic import SPACE, Traces, module, roots


def test_an_action_is_the_sum_of_its_increments() -> None:
    space = ActionSpace(3, 2, 2)
    increments = torch.rand(len(increment_matrix(space)), generator=torch.Generator().manual_seed(1))
    values_A = increments @ increment_matrix(space)
    chain = increments[:4]
    for a, (K, L1, L2) in enumerate(space):
        trunk = float(chain[: L1 + L2 if K == 1 else L1].sum())
        start = 4 + ((K - 2) * 3 + L1) * 2
        branches = float(increments[start : start + L2].sum()) if K > 1 else 0.0
        assert float(values_A[a]) == pytest.approx(trunk + branches)
    assert torch.allclose(increments_of(values_A, increment_matrix(space)), increments, atol=1e-5)


def test_verifiers_share_the_increments_of_chains_and_nothing_else() -> None:
    space = ActionSpace(3, 2, 2)
    alone_IA, both_IO = increment_matrix(space), increment_matrix(space, verifiers=2)
    branching = len(alone_IA) - 4
    assert both_IO.shape == (4 + 2 * branching, 2 * len(space))
    increments = torch.rand(len(both_IO), generator=torch.Generator().manual_seed(1))
    first_A, second_A = (increments @ both_IO).chunk(2)
    assert torch.allclose(first_A, increments[: 4 + branching] @ alone_IA)
    assert torch.allclose(second_A, torch.cat([increments[:4], increments[4 + branching :]]) @ alone_IA)
    chain = torch.tensor([action.K == 1 for action in space])
    assert torch.equal(first_A[chain], second_A[chain]) and not torch.isclose(first_A, second_A)[~chain].any()
    assert torch.allclose(increments_of(increments @ both_IO, both_IO), increments, atol=1e-5)


def test_every_action_is_picked_with_its_verifier() -> None:
    options_O = torch.arange(6.0)  # two verifiers, three actions
    assert picked(options_O, torch.tensor([1, 0, 1])).tolist() == [3, 1, 5]
    options_BSO = options_O.expand(2, 4, 6)
    of_roots = picked(options_BSO, torch.tensor([[[0, 0, 1]], [[1, 1, 1]]]))
    assert of_roots[0].tolist() == [[0, 1, 5]] * 4 and of_roots[1].tolist() == [[3, 4, 5]] * 4


def test_further_actions_begin_where_the_trunk_ends() -> None:
    whole_TA = further_actions(SPACE)
    assert whole_TA[0].tolist() == list(range(233))
    for t, action, whole in [
        (3, Action(2, 1, 4), Action(2, 4, 4)),
        (3, EMPTY, Action(1, 3, 0)),
        (6, Action(1, 4, 0), SPACE.chain(10)),
        (8, Action(4, 0, 1), Action(4, 8, 1)),
    ]:
        assert SPACE.actions[int(whole_TA[t, SPACE.index(action)])] == whole
    assert int(whole_TA[8, SPACE.index(Action(2, 1, 1))]) == int(whole_TA[15, SPACE.index(SPACE.chain(2))]) == -1
    cost_BTA = further_cost(torch.arange(233.0).expand(2, -1), SPACE)
    assert float(cost_BTA[0, 3, SPACE.index(EMPTY)]) == 0
    expected = SPACE.index(Action(2, 4, 4)) - SPACE.index(Action(1, 3, 0))
    assert float(cost_BTA[1, 3, SPACE.index(Action(2, 1, 4))]) == expected
    assert float(cost_BTA[1, 15, SPACE.index(SPACE.chain(2))]) == NEVER


def test_playing_follows_the_best_plan_token_by_token() -> None:
    """Gains that differ by sample: one stops at once, one after three tokens, one branches there, one never stops."""
    data = roots(2)
    gains_TSA = torch.zeros(16, 4, 233)
    gains_TSA[:, 1:, SPACE.index(SPACE.chain(1))] = 1.0
    gains_TSA[3:, 1] = 0.0
    gains_TSA[3, 2, SPACE.index(Action(3, 0, 5))] = 2.0
    index = torch.tensor([[0, 1], [2, 3]])
    free = further_cost(torch.zeros(2, 233), SPACE)
    action_BS, times_A = play(data, lambda t: gains_TSA[t][index], free)
    chosen = [[SPACE.actions[a] for a in row] for row in action_BS.tolist()]
    assert chosen == [[EMPTY, Action(1, 3, 0)], [Action(3, 3, 5), SPACE.chain(16)]]
    assert int(times_A.sum()) == 1 + 4 + 4 + 16 and int(times_A[SPACE.index(EMPTY)]) == 2
    played = outcome(data, action_BS, torch.ones(2, 233))
    assert played.tokens_BS[1, 0] == data.trunk_BSA[1, 0, SPACE.index(Action(3, 3, 5))]
    later, _ = play(data, lambda t: gains_TSA[t][index], free, first=2)  # not asked before two tokens are drafted
    assert [SPACE.actions[a] for a in later[0].tolist()] == [Action(1, 2, 0), Action(1, 3, 0)]


def test_the_error_of_a_ratio_is_that_over_prompts() -> None:
    """Against the spread of the ratio over many sets of roots."""
    data = roots(400)
    static = torch.full((400, 2), SPACE.index(Action(1, 3, 0)))
    longer = torch.full((400, 2), SPACE.index(Action(1, 6, 0)))
    seconds = data.static_seconds_BA
    found, errors = [], []
    for part in range(20):
        rows = data.rows(slice(20 * part, 20 * part + 20))
        played, base = (outcome(rows, a[:20], seconds[20 * part : 20 * part + 20]) for a in (longer, static))
        ratio, without = ratios(played, base)
        found.append(ratio)
        errors.append(jackknife_error(ratio, without))
    assert torch.tensor(errors).mean() == pytest.approx(float(torch.tensor(found).std()), rel=0.5)


@pytest.fixture(scope="module")
def judged() -> list:
    torch.manual_seed(0)
    trained, traces = module("regressor"), Traces()
    optimiser = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    trained.train()
    for _ in range(300):
        optimiser.zero_grad()
        trained.loss(traces.train).backward()
        optimiser.step()
    return judge(trained, traces)


def test_what_the_draft_tells_along_the_trunk_is_used(judged: list) -> None:
    ways = {(way.mode.at_root, way.mode.on_trunk): way for way in judged[0]}
    assert ways[False, False].ratio == 1 and ways[False, False].error == 0
    assert ways[False, True].ratio > 1.1
    assert judged[0][0].mode.on_trunk
    assert judged[0][0].mode.gain > 0


@pytest.mark.parametrize(("ratio", "decides"), [(1.03, False), (1.05, True)])
def test_a_decision_has_to_be_ahead_by_two_standard_errors(
    monkeypatch: pytest.MonkeyPatch, ratio: float, decides: bool
) -> None:
    def of_error(*args: object) -> Judged:
        return replace(judge_way(*args), ratio=ratio, error=0.02) if any(args[-2:]) else judge_way(*args)

    judge_way = modes._judge
    monkeypatch.setattr(modes, "_judge", of_error)
    ((kept, *_),) = judge(module("policy"), Traces(64))
    assert kept.mode.at_root == decides and kept.assured == pytest.approx(max(1, ratio - 0.04))


def test_a_policy_decides_at_the_root_alone() -> None:
    ways = judge(module("policy"), Traces(64))
    assert {(way.mode.at_root, way.mode.on_trunk) for way in ways[0]} == {(False, False), (True, False)}
    assert not ways[0][0].mode.on_trunk


def test_a_root_of_weight_two_counts_as_two() -> None:
    alike = replace(roots(6), weight_B=torch.ones(6))
    index = [0, 1, 1, 2, 3, 4, 4, 5]
    once = replace(alike, weight_B=torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0]))
    twice = alike.rows(torch.tensor(index))
    assert once.best_static() == pytest.approx(twice.best_static())
    action_BS = torch.randint(233, (6, 2), generator=torch.Generator().manual_seed(2))
    speeds = [
        outcome(data, action, data.seconds_BA).speed()
        for data, action in ((once, action_BS), (twice, action_BS[index]))
    ]
    assert speeds[0] == pytest.approx(speeds[1])
    assert speeds[0] != pytest.approx(outcome(alike, action_BS, once.seconds_BA).speed())
