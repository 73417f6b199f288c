"""Texts of a log, whose labels are certain: their replay against walks in plain Python and the best
policy of all, and the joint choice for different requests in one batch against all choices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from selector.actions import Action, ActionSpace
from selector.decision import LookupRule, Setting
from selector.runtime.joint import Shapes, joint_choice
from selector.sampling import Sampling
from selector.schema import DRAFTER, MATCH, TEXT, InputError
from selector.train.mixed import PARTS, MixedBatches
from selector.train.replay import fastest_possible
from selector.train.tuning import replay_setting
from tests.selector import synthetic
from tests.selector.logged import SIZES, SPACE, committed, profile, ten_lines, timed


@pytest.mark.parametrize("batch", [1, 4])
def test_fixed_lengths_and_rules_of_a_log_are_a_walk_to_the_last_token(batch: int) -> None:
    data = timed(batch)
    match_R = data.texts.scalar("match")
    for chain, least in product(map(SPACE.chain, range(SPACE.depth + 1)), (2, 4, 99)):

        def choice(row: int, least: int = least, chain: Action = chain) -> Action:
            return Action.copy(4) if match_R[row] >= least else chain

        steps, tokens, seconds = ten_lines(data, choice)
        replayed = replay_setting(
            data, {}, Setting(Sampling(0.0), chain, rule=LookupRule(least, 4))
        )
        assert float(replayed.steps_X.sum()) == steps and float(replayed.tokens_X.sum()) == tokens
        assert float(replayed.seconds_X.sum()) == pytest.approx(seconds, rel=1e-6)


def test_whoever_is_told_everything_takes_the_least_time() -> None:
    data = timed(seed=3, count=4, roots=9)
    seconds_RA, size_X = data.seconds(), data.texts.size_X
    oracle = fastest_possible(data.survivals_RS, seconds_RA, size_X, SPACE)

    @cache
    def least(row: int, end: int) -> float:
        """By trying everything."""
        if row >= end:
            return 0.0
        later = [least(row + committed(data, row, action), end) for action in SPACE]
        return min(float(now) + then for now, then in zip(seconds_RA[row], later, strict=True))

    ends = zip(size_X.tolist(), size_X.cumsum(0).tolist(), strict=True)
    assert oracle.seconds_X.tolist() == pytest.approx(
        [least(end - size, end) for size, end in ends], rel=1e-6
    )


def worth(
    tokens_BA: np.ndarray, chosen: tuple[int, ...], g: float, token: float, one_pass: float
) -> float:
    shapes = Shapes.of(SPACE)
    tokens = sum(tokens_BA[b, a] for b, a in enumerate(chosen))
    drafted, passes = shapes.drafted_A[list(chosen)].sum(), shapes.passes_A[list(chosen)].max()
    return tokens - g * (token * drafted + one_pass * passes)


@pytest.mark.parametrize("seed", range(8))
def test_the_joint_choice_is_the_best_of_all_choices(seed: int) -> None:
    generator = np.random.default_rng(seed)
    tokens_BA = 1 + np.cumsum(generator.random((3, len(SPACE))), axis=1) % 5
    prices = {
        "g": 300.0,
        "token": 10 ** generator.uniform(-5, -3),
        "one_pass": 10 ** generator.uniform(-4, -2),
    }
    best = max(
        product(range(len(SPACE)), repeat=3), key=lambda chosen: worth(tokens_BA, chosen, **prices)
    )
    chosen = joint_choice(
        tokens_BA, Shapes.of(SPACE), prices["g"], prices["token"], prices["one_pass"]
    )
    assert worth(tokens_BA, tuple(chosen), **prices) == pytest.approx(
        worth(tokens_BA, best, **prices)
    )


def test_trees_with_branches_are_refused() -> None:
    with pytest.raises(ValueError, match="not trees"):
        Shapes.of([Action(2, 0, 3)])
    assert Shapes.of(ActionSpace.chains(3, 2)).passes_A.tolist() == [0, 1, 2, 3, 0, 0]


def test_a_profile_without_a_batch_axis_is_refused() -> None:
    with pytest.raises(InputError, match="one request alone"):
        synthetic.profile().step_times(4)


def step_seconds(nodes: list[int], passes: int, context: float) -> float:
    """Of requests that verify so many drafted tokens each, after so many draft passes of all."""
    times = profile()
    assert times.batches is not None
    draft, target = (
        tables[SIZES.index(len(nodes))] for tables in (times.batches.draft, times.batches.target)
    )
    low, high = (target.at(context, size) for size in (1, 64))
    return low + (high - low) * (sum(nodes) / len(nodes)) / 63 + passes * draft.at(context, 1)


def walk(
    batches: MixedBatches, choose: Callable[[list[int]], list[int]], batch: int
) -> tuple[float, float]:
    """Tokens and seconds of all streams, in plain Python; `choose` gets the roots of a step, and
    returns actions."""
    data = timed(batch)
    begin = torch.cumsum(data.texts.size_X, 0) - data.texts.size_X
    tokens = seconds = 0.0
    for stream in batches._streams:
        waiting, flight = list(stream[batch:]), [[int(text), 0] for text in stream[:batch]]
        while waiting:
            rows = [int(begin[text]) + at for text, at in flight]
            chosen = [SPACE.actions[a] for a in choose(rows)]
            context, passes = (
                float(data.texts.length_R[rows].float().mean()),
                max(action.drafts and action.nodes for action in chosen),
            )
            seconds += step_seconds([action.nodes for action in chosen], passes, context)
            for place, (row, action) in enumerate(zip(rows, chosen, strict=True)):
                text, at = flight[place]
                size, more = int(data.texts.size_X[text]), committed(data, row, action)
                tokens += min(more, size - at)
                flight[place][1] += more
                if at + more >= size:
                    flight[place] = [int(waiting.pop(0)) if waiting else text, 0]
    return tokens, seconds


@pytest.mark.parametrize("batch", [2, 4])
def test_replay_of_decisions_that_are_made_alone_is_a_walk(batch: int) -> None:
    data = timed(batch)
    batches = MixedBatches(data, profile(), batch)
    assert 1 < len(batches._streams) <= PARTS
    generator = torch.Generator().manual_seed(1)
    action_R = torch.randint(len(SPACE), (len(data.texts.length_R),), generator=generator)
    replayed = batches.replay(action_R)
    tokens, seconds = walk(batches, lambda rows: action_R[rows].tolist(), batch)
    assert float(replayed.tokens_X.sum()) == tokens
    assert float(replayed.seconds_X.sum()) == pytest.approx(seconds)
    deciding = MixedBatches(timed(batch, decision=1e-3), profile(1e-3), batch)
    seconds += 1e-3 * batch * float(replayed.steps_X.sum())
    charged = deciding.replay(action_R, (TEXT,))
    assert float(charged.seconds_X.sum()) == pytest.approx(seconds)
    assert torch.equal(deciding.replay(action_R, (MATCH,)).seconds_X, replayed.seconds_X)


def test_decisions_between_timed_batch_sizes_are_linear() -> None:
    assert profile(1e-3).at_batch(3).decide == pytest.approx({MATCH: 0, TEXT: 3e-3, DRAFTER: 3e-3})


@pytest.mark.parametrize("speed", [20.0, 400.0])
def test_one_length_for_all_requests_of_a_step_is_the_best_chain(speed: float) -> None:
    """By the sum of their predicted tokens and the time of the step, priced by `speed`."""
    data, batch = timed(4), 4
    batches = MixedBatches(data, profile(), batch)
    generator = torch.Generator().manual_seed(2)
    efficiency_RA = (
        1 + 3 * torch.rand(len(data.texts.length_R), len(SPACE), generator=generator).double()
    )
    chosen = set()

    def choose(rows: list[int]) -> list[int]:
        context = float(data.texts.length_R[rows].float().mean())

        def worth(nodes: int) -> float:
            seconds = step_seconds([nodes] * batch, nodes, context)
            return (
                float(efficiency_RA[rows, SPACE.index(SPACE.chain(nodes))].sum()) - speed * seconds
            )

        best = max(range(SPACE.depth + 1), key=worth)
        chosen.add(best)
        return [SPACE.index(SPACE.chain(best))] * batch

    replayed = batches.select(efficiency_RA, speed, common=True)
    tokens, seconds = walk(batches, choose, batch)
    assert float(replayed.tokens_X.sum()) == tokens and len(chosen) > 1
    assert float(replayed.seconds_X.sum()) == pytest.approx(seconds)
