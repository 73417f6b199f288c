from __future__ import annotations

from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from selector.data import Timed
from selector.decision import Mode
from selector.module import Batch, RootsModule, SelectorModule, learned_rows
from selector.objective import policy_ratios, survival_loss
from selector.schema import FULL, LIGHT
from selector.tuning import StaticTable, best_static, replay_mode, tuned
from tests.selector.synthetic import SPACE, TELLS, joined, module, opinionated, static_mode, texts, timed

BOTH = pytest.mark.parametrize(("objective", "sees"), [(o, s) for o in ("policy", "regressor") for s in (LIGHT, FULL)])


def whole_batch(data: Timed, static: Mode, sees: str) -> Batch:
    rows = learned_rows(data.texts, 1)
    return Batch(
        *data.texts.features(rows, sees == FULL),
        data.survivals_RS[rows],
        data.seconds(sees)[rows],
        torch.full((len(rows),), static.speed),
    )


def trained(objective: str, sees: str, data: Timed, static: Mode, steps: int = 250) -> SelectorModule:
    made = module(objective, sees)
    made.log = lambda *_, **__: None  # no trainer here
    optimiser, batch = torch.optim.AdamW(made.parameters(), lr=1e-2), whole_batch(data, static, sees)
    made.train()
    for _ in range(steps):
        optimiser.zero_grad()
        made.training_step(batch, 0).backward()
        optimiser.step()
    return made.eval()


@BOTH
def test_training_finds_what_a_feature_tells(objective: str, sees: str) -> None:
    """On fresh texts whose best depth follows from a feature: at least half of what could be gained, and it pays."""
    data, fresh = (timed(texts(16, 24, seed, sees)) for seed in (0, 5))
    static = best_static(data, StaticTable.of(data), data.setting)
    made = trained(objective, sees, data, static)
    policy = objective == "policy"
    mode = tuned(data, made.scores(data.texts), static, sees, policy).mode
    base = replay_mode(fresh, None, static).speed
    ratio = replay_mode(fresh, made.scores(fresh.texts), mode, sees, policy).speed / base
    truth = tuned(fresh, SPACE.efficiencies(fresh.survivals_RS), static, sees).ratio.value
    assert ratio > 1 + 0.5 * (truth - 1) > 1.1
    assert tuned(fresh, made.scores(fresh.texts), static, sees, policy).pays


def test_a_regressor_knows_what_trees_yield() -> None:
    """Predicted block efficiencies at fresh roots, where the truth is one of two."""
    data, fresh = (timed(texts(16, 24, seed)) for seed in (0, 5))
    made = trained("regressor", LIGHT, data, static_mode(data))
    rows = learned_rows(fresh.texts, 1)
    clear = (fresh.texts.scalars_RF[rows, TELLS] - 0.5).abs() > 0.1  # near the edge nobody can tell
    predicted_RA, true_RA = made.scores(fresh.texts)[rows][clear], SPACE.efficiencies(fresh.survivals_RS[rows][clear])
    assert float((predicted_RA / true_RA).log().abs().mean()) < 0.1
    assert float((true_RA.mean(0) / true_RA).log().abs().mean()) > 0.3  # what the mean would be off by


@BOTH
def test_scores_do_not_depend_on_what_is_asked_together(
    objective: str, sees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data = opinionated(objective, sees), texts(sees=sees)
    rows = torch.tensor([3, 70, 5])
    whole_RA = made.scores(data)
    assert whole_RA.shape == (240, 233)
    monkeypatch.setattr("selector.module.ROWS_AT_ONCE", 7)
    assert torch.allclose(made.scores(data), whole_RA, atol=1e-5)
    assert torch.allclose(made.scores(data, rows), whole_RA[rows], atol=1e-5)


def test_a_regressors_scores_are_block_efficiencies_and_know_no_times() -> None:
    made, data = opinionated(), texts()
    scores_RA = made.scores(data)
    log_survivals_RS = made.network(data.scalars_RF, [])
    assert torch.allclose(scores_RA, SPACE.efficiencies(log_survivals_RS.exp()))
    assert bool((scores_RA >= 1).all()) and bool((scores_RA[:, 0] == 1).all())


def batch_of(sees: str = LIGHT) -> Batch:
    data = timed(texts(4, 10, 1, sees))
    return whole_batch(data, static_mode(data), sees)


def test_each_objective_has_its_own_loss() -> None:
    batch = batch_of()
    regressor, policy = opinionated("regressor"), opinionated("policy")
    outputs = regressor.network(batch.scalars_BF, [])
    assert torch.equal(regressor.loss(batch), survival_loss(outputs, batch.survivals_BS, SPACE))
    logits_BA = policy.network(batch.scalars_BF, [])
    efficiency_BA = SPACE.efficiencies(batch.survivals_BS)
    ratio_B = policy_ratios(logits_BA, efficiency_BA, batch.seconds_BA, batch.base_speed_B)
    worst = (1 - ratio_B).clamp(min=0).square().topk(2).values.mean()  # a twentieth of 36 roots
    assert policy.loss(batch).item() == pytest.approx((worst - ratio_B.log().mean()).item(), rel=1e-5)


@BOTH
def test_training_begins_at_the_mean_of_the_training_roots(objective: str, sees: str) -> None:
    data = timed(texts(sees=sees))
    rows = (~data.texts.first_R).nonzero()[:, 0]
    made = module(objective, sees)
    body = made.network.body if objective == "regressor" else made.network
    assert torch.allclose(body.mean_F, data.texts.scalars_RF[rows].mean(0))
    assert len(body.blocks) == (3 if sees == FULL else 0)
    if objective == "regressor":
        predicted_A = made.scores(data.texts, rows).mean(0)
        mean_A = SPACE.efficiencies(data.survivals_RS[rows]).mean(0)
        assert float((predicted_A / mean_A).log().abs().max()) < 0.25
        chains = torch.tensor([action.K == 1 for action in SPACE])
        assert float((predicted_A / mean_A).log().abs()[chains].mean()) < 0.08


@pytest.mark.parametrize("stride", [1, 3, 100])
def test_learned_roots_are_every_nth_of_each_text(stride: int) -> None:
    data = texts(3, 8)
    data = replace(data, size_X=torch.tensor([8, 1, 15]))
    rows = learned_rows(data, stride)
    expected = [start + n for start, size in ((0, 8), (8, 1), (9, 15)) for n in range(1, size, stride)]
    assert rows.tolist() == expected


def loader_of(seed: int, stride: int = 2, policy: bool = False) -> RootsModule:
    splits = {"train": texts(4, 10, 1, FULL), "validation": texts(3, 10, 2, FULL)}
    seconds = {name: timed(data).seconds(FULL) for name, data in splits.items()} if policy else None
    speeds = {name: torch.arange(float(len(data.length_R))) for name, data in splits.items()} if policy else None
    return RootsModule(splits, "traversal", True, stride, 6, seed, seconds, speeds)


def rows_of(batch: Batch, data: Tensor) -> list[int]:
    """Which roots a batch holds, by their scalars."""
    return [int((data == scalars_F).all(-1).nonzero()[0]) for scalars_F in batch.scalars_BF]


def test_batches_hold_the_roots_they_say() -> None:
    made = loader_of(seed=1, policy=True)
    data = made.splits["validation"]
    wanted = [n for n in range(30) if n % 10 % 2 == 1]
    batches = list(made.val_dataloader())
    assert [len(batch.scalars_BF) for batch in batches] == [6, 6, 3]
    assert [r for batch in batches for r in rows_of(batch, data.scalars_RF)] == wanted
    batch, rows = batches[1], torch.tensor(wanted[6:12])
    assert torch.equal(batch.survivals_BS, data.survivals["traversal"][rows].float())
    assert torch.equal(batch.seconds_BA, timed(data).seconds(FULL)[rows])
    assert batch.base_speed_B.tolist() == rows.tolist()
    _, states = data.features(rows, True)
    assert all(torch.equal(mine, own) for mine, own in zip(batch.hidden, states, strict=True))
    assert next(iter(loader_of(seed=1).val_dataloader())).seconds_BA.shape == (0,)


def test_training_batches_are_shuffled_by_the_seed() -> None:
    def order(seed: int) -> list[int]:
        made = loader_of(seed)
        data = made.splits["train"].scalars_RF
        return [r for batch in made.train_dataloader() for r in rows_of(batch, data)]

    one, same, other = order(1), order(1), order(2)
    assert one == same != other
    assert len(one) == 18 == len(set(one))  # of 20 roots in batches of 6: what is left over is dropped


class Logs(pl.Callback):
    """Keeps what is logged after each validation."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_training_is_judged_by_replay_of_validation_texts() -> None:
    """Through Lightning: the logged ratio is the mean over sampling settings, of the weights as they are then."""
    settings = (1.0, 1.0), (0.5, 1.0)
    splits = {
        split: joined([texts(4, 12, seed + i, setting=setting) for i, setting in enumerate(settings)])
        for split, seed in (("train", 10), ("validation", 20))
    }
    judged = [timed(splits["validation"].setting_of(setting)) for setting in settings]
    modes = [replace(static_mode(data), decides=True, rho=0.5) for data in judged]
    made, logs = module().train(), Logs()
    made.judged = list(zip(judged, modes, strict=True))
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[logs],
    )
    trainer.fit(made, RootsModule(splits, "traversal", False, 1, 32, 0))
    made.eval()
    assert len(logs.seen) == 2
    ratios = [
        replay_mode(data, made.scores(data.texts), mode, LIGHT).speed
        / replay_mode(data, None, mode.static_only()).speed
        for data, mode in made.judged
    ]
    assert logs.seen[-1]["validation/replay"] == pytest.approx(sum(ratios) / 2, rel=1e-5)
    assert {"train/loss", "validation/loss"} <= set(trainer.callback_metrics)
    assert logs.seen[1]["validation/loss"] < logs.seen[0]["validation/loss"]


def test_a_module_survives_its_hyperparameters() -> None:
    made = opinionated("policy", FULL)
    again = SelectorModule(**made.hparams)
    again.load_state_dict(made.state_dict())
    data = texts(sees=FULL)
    assert torch.equal(again.eval().scores(data), made.scores(data))
    assert again.is_full and not again.is_regressor
