from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from selector.decision import Setting
from selector.schema import EARLY, FULL, LIGHT, PAIR
from selector.train.data import Timed
from selector.train.module import (
    Batch,
    Roots,
    SelectorModule,
    learned_rows,
    policy_ratios,
    survival_loss,
)
from selector.train.tuning import StaticTable, best_static, replay_setting, tune_setting
from tests.selector.exported import KINDS
from tests.selector.synthetic import SPACE, module, opinionated, static_setting, texts, timed

STEPS = 500


def whole_batch(data: Timed, static: Setting, level: str) -> Batch:
    rows = learned_rows(data.texts, 1)
    return Batch(
        *data.texts.features(rows, level == FULL),
        data.survivals_RS[rows],
        data.seconds((level,))[rows],
        torch.full((len(rows),), static.speed),
    )


def train(made: SelectorModule, batch: Batch, rate: float) -> None:
    made.log = lambda *_, **__: None  # no trainer here
    optimiser, generator = torch.optim.AdamW(made.parameters()), torch.Generator().manual_seed(0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=STEPS)
    made.train()
    for _ in range(STEPS):
        rows = torch.randint(len(batch.scalars_BF), (96,), generator=generator)
        rest = (
            column[rows] for column in (batch.survivals_BS, batch.seconds_BA, batch.base_speed_B)
        )
        optimiser.zero_grad()
        own = Batch(batch.scalars_BF[rows], [state[rows] for state in batch.hidden], *rest)
        made.training_step(own, 0).backward()
        optimiser.step()
        schedule.step()
    made.eval()


@pytest.mark.parametrize(
    ("objective", "level", "rate"), [("policy", FULL, 1e-2), ("regressor", LIGHT, 2e-2)]
)
def test_training_finds_what_a_feature_tells(objective: str, level: str, rate: float) -> None:
    """On fresh texts whose best depth follows from a feature, and whose repeats from another: at
    least half of what could be gained, and it pays."""
    data, fresh = (
        timed(texts(count, 24, seed, level, repeats=0.1)) for count, seed in ((240, 0), (48, 5))
    )
    static, made, policy = (
        best_static(data, StaticTable.of(data)),
        module(objective, level, seed=4),
        objective == "policy",
    )
    train(made, whole_batch(data, static, level), rate)

    def asked(own: Timed) -> dict[str, Tensor]:
        return {level: made.scores(own.texts, level) for level in made.asked}

    setting = tune_setting(data, asked(data), static, policy).setting
    ratio = (
        replay_setting(fresh, asked(fresh), setting, policy).speed
        / replay_setting(fresh, {}, static).speed
    )
    truth = tune_setting(fresh, {level: SPACE.efficiencies(fresh.survivals_RS)}, static).ratio.value
    assert ratio > 1 + 0.5 * (truth - 1) > 1.1
    assert tune_setting(fresh, asked(fresh), static, policy).pays
    if not policy:
        # repeats are known early, and save the pass
        assert setting.feature_levels == (EARLY, level)


def test_each_objective_has_its_own_loss() -> None:
    """A regressor's is that before and that after the draft has passed the root, a policy's that
    after it."""
    data = timed(texts(4, 10, 1))
    batch = whole_batch(data, static_setting(data), LIGHT)
    passed_B1 = torch.ones(36, 1)
    regressor, policy = opinionated("regressor"), opinionated("policy")
    late, early = (
        regressor.network(batch.scalars_BF, [], passed) for passed in (passed_B1, 0 * passed_B1)
    )
    parts = [survival_loss(outputs, batch.survivals_BS, SPACE) for outputs in (late, early)]
    assert torch.equal(regressor.loss(batch), sum(parts)) and parts[0] != parts[1]
    logits_BA = policy.network(batch.scalars_BF, [], passed_B1)
    efficiency_BA = SPACE.efficiencies(batch.survivals_BS)
    ratio_B = policy_ratios(logits_BA, efficiency_BA, batch.seconds_BA, batch.base_speed_B)
    worst = (1 - ratio_B).clamp(min=0).square().topk(2).values.mean()  # a twentieth of 36 roots
    assert policy.loss(batch).item() == pytest.approx(
        (worst - ratio_B.log().mean()).item(), rel=1e-5
    )


@pytest.mark.parametrize(("objective", "level"), KINDS)
def test_training_begins_at_the_mean_of_the_training_roots(objective: str, level: str) -> None:
    """As the network's own tests say exactly; some scalars are not seen."""
    data = timed(texts(level=level, repeats=0.1))
    rows = (~data.texts.unknown_R).nonzero()[:, 0]
    made = module(objective, level)
    body = made.network.body if objective == "regressor" else made.network
    unseen = ("batch",) if objective == "policy" else ("context_length", "batch")
    far_F = body.scale_F.isinf().tolist()
    assert [scalar.name for scalar, far in zip(PAIR.scalars, far_F, strict=True) if far] == [
        *unseen
    ]
    if objective == "regressor":
        mean_A = SPACE.efficiencies(data.survivals_RS[rows]).mean(0)
        for each in (EARLY, level):
            predicted_A = made.scores(data.texts, each)[rows].mean(0)
            assert float((predicted_A / mean_A).log().abs().max()) < 0.25


@pytest.mark.parametrize("stride", [1, 3, 100])
def test_learned_roots_are_every_nth_of_each_text(stride: int) -> None:
    data = replace(texts(3, 8), size_X=torch.tensor([8, 1, 15]))
    expected = [
        start + n for start, size in ((0, 8), (8, 1), (9, 15)) for n in range(1, size, stride)
    ]
    assert learned_rows(data, stride).tolist() == expected


def test_batches_hold_the_roots_they_say() -> None:
    splits = {"train": texts(4, 10, 1, FULL), "validation": texts(3, 10, 2, FULL, repeats=0.5)}
    further = {
        name: (timed(data).seconds((FULL,)), torch.arange(float(len(data.length_R))))
        for name, data in splits.items()
    }
    roots = Roots(module("policy", FULL), splits, "traversal", 6, 1, 2, further)
    batches = list(roots.loader("validation"))
    data, wanted = splits["validation"], [n for n in range(30) if n % 10 % 2 == 1]
    assert [len(batch.scalars_BF) for batch in batches] == [6, 6, 3]
    scalars_BF = torch.cat([batch.scalars_BF for batch in batches])
    assert torch.equal(scalars_BF, data.scalars_RF[wanted])
    assert len(scalars_BF.unique(dim=0)) == len(wanted)
    batch, rows = batches[1], torch.tensor(wanted[6:12])
    assert torch.equal(batch.survivals_BS, data.labels("traversal", rows, SPACE))
    assert 0 < float(batch.survivals_BS[:, SPACE.tree_survivals :].mean()) < 1
    assert torch.equal(batch.seconds_BA, timed(data).seconds((FULL,))[rows])
    assert batch.base_speed_B.tolist() == rows.tolist()
    _, states = data.features(rows, True)
    assert all(
        torch.equal(kept, expected) for kept, expected in zip(batch.hidden, states, strict=True)
    )
