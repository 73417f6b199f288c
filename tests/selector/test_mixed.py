"""Different requests in one batch: the joint choice against all choices, replay against a walk in plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from selector.actions import Action, ActionSpace
from selector.runtime.joint import Shapes, joint_choice, step_clock
from selector.schema import InputError
from selector.train.mixed import PARTS, MixedBatches
from tests.selector.logged import SPACE, profile, timed
from tests.selector.synthetic import profile as alone


def worth(tokens_BA: np.ndarray, chosen: tuple[int, ...], g: float, token: float, one_pass: float) -> float:
    shapes = Shapes.of(SPACE)
    tokens = sum(tokens_BA[b, a] for b, a in enumerate(chosen))
    drafted, passes = shapes.drafted_A[list(chosen)].sum(), shapes.passes_A[list(chosen)].max()
    return tokens - g * (token * drafted + one_pass * passes)


@pytest.mark.parametrize("seed", range(8))
def test_the_joint_choice_is_the_best_of_all_choices(seed: int) -> None:
    generator = np.random.default_rng(seed)
    tokens_BA = 1 + np.cumsum(generator.random((3, len(SPACE))), axis=1) % 5
    prices = {"g": 300.0, "token": 10 ** generator.uniform(-5, -3), "one_pass": 10 ** generator.uniform(-4, -2)}
    best = max(itertools.product(range(len(SPACE)), repeat=3), key=lambda chosen: worth(tokens_BA, chosen, **prices))
    found = joint_choice(tokens_BA, Shapes.of(SPACE), prices["g"], prices["token"], prices["one_pass"])
    assert worth(tokens_BA, tuple(found), **prices) == pytest.approx(worth(tokens_BA, best, **prices))


def test_trees_with_branches_are_refused() -> None:
    with pytest.raises(ValueError, match="not trees"):
        Shapes.of([Action(2, 0, 3)])
    assert Shapes.of(ActionSpace.chains(3, 2)).passes_A.tolist() == [0, 1, 2, 3, 0, 0]


def test_a_clock_without_a_batch_axis_is_refused() -> None:
    with pytest.raises(InputError, match="one request alone"):
        step_clock(alone(), 4)


def walk(batches: MixedBatches, action_R: torch.Tensor, batch: int) -> tuple[float, float]:
    """Tokens and seconds of all streams, in plain Python."""
    data, own = timed(batch), profile()
    assert own.batches is not None
    draft, target = (tables[(1, 2, 4).index(batch)] for tables in (own.batches.draft, own.batches.target))
    begin = torch.cumsum(data.texts.size_X, 0) - data.texts.size_X
    labels = data.survivals_RS
    tokens = seconds = 0.0
    for stream in batches._streams:
        waiting, flight = list(stream[batch:]), [[int(text), 0] for text in stream[:batch]]
        while waiting:
            rows = [int(begin[text]) + at for text, at in flight]
            chosen = [SPACE.actions[int(action_R[row])] for row in rows]
            context = float(data.texts.length_R[rows].float().mean())
            verified = 1 + sum(action.nodes for action in chosen) / batch
            low, high = (target.at(context, size) for size in (1, 64))
            seconds += low + (high - low) * (verified - 1) / 63
            seconds += max(action.drafts and action.nodes for action in chosen) * draft.at(context, 1)
            for place, (row, action) in enumerate(zip(rows, chosen, strict=True)):
                part = labels[row, : SPACE.depth] if not action.copies else labels[row, SPACE.depth :]
                committed = int(part[: action.nodes].sum()) + 1
                text, at = flight[place]
                size = int(data.texts.size_X[text])
                tokens += min(committed, size - at)
                flight[place][1] += committed
                if at + committed >= size:
                    flight[place] = [int(waiting.pop(0)) if waiting else text, 0]
    return tokens, seconds


@pytest.mark.parametrize("batch", [2, 4])
def test_replay_of_decisions_that_are_made_alone_is_a_walk(batch: int) -> None:
    data = timed(batch)
    batches = MixedBatches(data, profile(), batch)
    assert 1 < len(batches._streams) <= PARTS
    generator = torch.Generator().manual_seed(1)
    action_R = torch.randint(len(SPACE), (len(data.texts.length_R),), generator=generator)
    found = batches.replay(action_R)
    tokens, seconds = walk(batches, action_R, batch)
    assert float(found.tokens_P.sum()) == tokens
    assert float(found.seconds_P.sum()) == pytest.approx(seconds)


def test_joint_decisions_that_know_all_labels_are_faster_than_any_fixed_length() -> None:
    data = timed(4)
    batches = MixedBatches(data, profile(), 4)
    known_RA = SPACE.efficiencies(data.survivals_RS)
    fixed = [batches.replay(torch.full((len(known_RA),), SPACE.index(SPACE.chain(n)))) for n in range(SPACE.depth + 1)]
    best = max(fixed, key=lambda each: each.speed)
    oracle = batches.select(known_RA, batches.speed_of(known_RA, best.speed))
    assert oracle.over(best).value > 1.05
