"""Replay of logs, whose labels are certain: against a walk of ten lines, and the best policy of all."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from selector.actions import Action
from selector.decision import LookupRule, Mode
from selector.sampling import Sampling
from selector.train.replay import fastest_possible, replay
from selector.train.tuning import replay_mode
from tests.selector import logged


@pytest.mark.parametrize("batch", [1, 4])
def test_fixed_lengths_and_rules_of_a_log_are_a_walk_to_the_last_token(batch: int) -> None:
    data = logged.timed(batch)
    match_R = data.texts.scalar("match")
    for length in range(logged.SPACE.depth + 1):
        chain = logged.SPACE.chain(length)
        for least in (2, 4, 99):
            mode = Mode(Sampling(0.0), chain, rule=LookupRule(least, 4))
            found = replay_mode(data, {}, mode)
            steps, tokens, seconds = logged.ten_lines(
                data, lambda r, least=least, chain=chain: Action.copy(4) if match_R[r] >= least else chain
            )
            assert float(found.steps_X.sum()) == steps and float(found.tokens_X.sum()) == tokens
            assert float(found.seconds_X.sum()) == pytest.approx(seconds, rel=1e-6)


def test_whoever_is_told_everything_takes_the_least_time() -> None:
    data = logged.timed(seed=3, count=4, roots=9)
    seconds_RA = data.seconds()
    oracle = fastest_possible(data.survivals_RS, seconds_RA, data.texts.size_X, logged.SPACE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        action_R = torch.randint(len(logged.SPACE), (len(seconds_RA),), generator=generator)
        times_R = seconds_RA.gather(-1, action_R.unsqueeze(-1))[:, 0]
        other = replay(data.survivals_RS, action_R, times_R, data.texts.size_X, logged.SPACE)
        assert bool((oracle.seconds_X <= other.seconds_X + 1e-9).all())

    def least(begin: int, size: int, at: int) -> float:
        """By trying everything."""
        if at >= size:
            return 0.0
        found = []
        for a, action in enumerate(logged.SPACE):
            row = data.survivals_RS[begin + at]
            own = row[logged.SPACE.depth :] if action.copies else row
            found.append(float(seconds_RA[begin + at, a]) + known(begin, size, at + int(own[: action.nodes].sum()) + 1))
        return min(found)

    known = cache(least)
    begin = 0
    for x, size in enumerate(data.texts.size_X.tolist()):
        assert float(oracle.seconds_X[x]) == pytest.approx(known(begin, size, 0), rel=1e-6)
        begin += size
