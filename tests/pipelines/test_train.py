"""What training keeps: which selector, and under which sampling settings it decides; and training
with Lightning: all epochs, the best one by replay, curves in MLflow."""

from __future__ import annotations

import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from scipy import stats

from pipelines.config import Config
from pipelines.pair.source import source_of
from pipelines.train.fitting import MONITOR, fitted
from pipelines.train.fitting import module_of as new_module
from pipelines.train.judging import (
    judge,
    judge_rules,
    keep_if_ahead,
    statics,
    step_times,
    too_few,
)
from pipelines.train.result import TrainedSelector, count_differing
from pipelines.train.stage import choose, decided, trained
from selector.decision import NETWORK, LookupRule, Setting
from selector.export.torchscript import load_script
from selector.runtime.selector import Policy
from selector.sampling import Sampling
from selector.schema import EARLY, FULL, LIGHT, PAIR
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, Replayed, jackknifed
from selector.train.tuning import Judged, StaticTable, best_static, replay_setting, tune_lookup_rule
from tests.selector.exported import SOME, export, module_of, roots_of
from tests.selector.synthetic import (
    SPACE,
    WIDTHS,
    joined,
    opinionated,
    profile,
    static_setting,
    texts,
    timed,
)

TRAIN = {"verifier": "traversal", "epochs": 8, "batch": 32, "hidden": [24, 12]}
VERIFIERS = {"verifiers": ["traversal"]}
HOT, COLD = Sampling(1.0, top_k=7), Sampling(0.2, min_p=0.1, draft_temperature=0.0)
SAMPLING = [asdict(HOT), asdict(COLD)]
CONFIG = Config.model_validate({"name": "train", "train": TRAIN, "sampling": SAMPLING, **VERIFIERS})
EPOCHS = 4
SHORT = Config.model_validate(
    {"name": "fit", "train": {"epochs": EPOCHS, "batch": 8, "hidden": [16, 8]}}
)


def splits(is_informative: tuple[bool, bool] = (True, True)) -> dict[str, Texts]:
    """Texts of two sampling settings; in each, a scalar tells which roots are easy, or nothing
    does."""
    by_split = {}
    for seed, split in ((0, "train"), (10, "validation")):
        hot = texts(16, 60, seed=seed, sampling=HOT, is_informative=is_informative[0])
        cold = texts(16, 60, seed=seed + 1, sampling=COLD, is_informative=is_informative[1])
        by_split[split] = joined([hot, cold])
    return by_split


def timed_cases(data: Texts) -> list[Timed]:
    return [timed(data.of_sampling(sampling)) for sampling in (HOT, COLD)]


@pytest.fixture
def client(store: str) -> Any:
    """Of a store of its own."""
    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("fit")  # another test's would not be in this store
    return mlflow.MlflowClient()


def test_decisions_are_kept_where_they_pay(tmp_path: Path, client: Any) -> None:
    """A scalar tells easy roots under one of two settings; under the other, nothing does."""
    data = splits(is_informative=(True, False))
    bases = statics(timed_cases(data["train"]))
    validation = timed_cases(data["validation"])
    new = new_module(CONFIG, "regressor", LIGHT, data["train"])
    with mlflow.start_run() as run:
        run_id = run.info.run_id
        module = trained(CONFIG, new, data, validation, bases, tmp_path / "fitted", run_id)
    judged = []
    for texts_of_case, base in zip(validation, bases, strict=True):
        judged += judge(module, texts_of_case, base)
    assert [case.pays for case in judged] == [True, False]
    assert judged[0].ratio.value > 1.2
    rules = []
    for case in judged:  # rules for lookups that do not pay, and take half as much time again
        setting = replace(case.setting.static_only(), rule=LookupRule(4, 8))
        replayed = replace(case.replayed, seconds_X=1.5 * case.replayed.seconds_X)
        rules.append(replace(case, setting=setting, ratio=Ratio(0.9, 0.01), replayed=replayed))
    (hot, cold), kept = decided(
        module, validation, rules, bases, profile(), source_of(CONFIG), [[], []]
    )
    assert hot.setting.longest == module.longest == int(data["train"].length_R.max())
    assert hot.setting.decider == "network" and hot.setting.rule == LookupRule(4, 8)
    assert cold.setting.decider == "static" and cold.setting.action == bases[1].action
    # the static tree is kept under the other setting
    assert kept.value == pytest.approx((judged[0].ratio.value + 1) / 2)
    assert kept.error == pytest.approx(judged[0].ratio.error / 2)
    # what was found is said, all the same
    assert cold.network_ratio == judged[1].ratio and cold.rule_ratio.value == 0.9
    few = [case.on(case.profile, case.batch) for case in validation]
    for case in few:
        case.texts = case.texts.take(torch.arange(14))  # seven sources
    (hot, _), _ = decided(module, few, rules, bases, profile(), source_of(CONFIG), [[], []])
    assert hot.setting.decider != "network"
    assert [bool(too_few(cases[0].texts)) for cases in (few, validation)] == [True, False]


@pytest.mark.parametrize(
    ("network", "rule", "what"),
    [
        (1.3, 1.1, "network"),
        (1.2, 1.3, "rule"),  # never slower than the rule
        (1.2, 1.1, "rule"),  # 1.09 of it ±0.06: by less than two standard errors
        (1.0, 1.02, "rule"),  # two standard errors are for networks
        (1.01, 1.01, "static"),
        (1.2, 0.9, "network"),
    ],
)
def test_the_rule_for_lookups_is_kept_where_the_network_is_slower(
    network: float, rule: float, what: str
) -> None:
    static = Setting(HOT, SPACE.chain(3))
    tokens_X = torch.full((4,), 10.0)

    def judged(setting: Setting, speed: float, times: list[float]) -> Judged:
        seconds_X = tokens_X / speed * torch.tensor(times)
        replayed = Replayed(tokens_X, seconds_X, tokens_X / 2, torch.zeros(0))
        return Judged(setting, Ratio(speed, 0.01), replayed, torch.arange(4))

    by_network = judged(replace(static, feature_levels=(EARLY,)), network, [1.1, 0.9, 1.0, 1.0])
    by_rule = judged(replace(static, rule=LookupRule(4, 8)), rule, [1.0, 1.0, 1.1, 0.9])
    # beyond 200 tokens the rule decides
    both = replace(by_network.setting, rule=by_rule.setting.rule, longest=200)
    kept = keep_if_ahead(by_network, by_rule, static, 200).setting
    assert kept == {"network": both, "rule": by_rule.setting, "static": static}[what]
    # few long texts decide how far both are ahead of the tree
    by_network = replace(by_network, ratio=Ratio(1.33, 0.18))
    kept = keep_if_ahead(by_network, replace(by_rule, ratio=Ratio(1.28, 0.17)), static).setting
    assert kept.decider == (NETWORK if what == "network" else "rule")


def test_trees_and_rules_are_tuned_on_training_texts_and_rules_judged_on_all() -> None:
    """The speed is of all texts, and its error is over the sources of both splits. A network is
    compared with the replay of the validation texts alone."""
    train, validation = (timed_cases(data) for data in splits().values())
    bases = statics(train)
    rules = judge_rules(train, validation, bases, train[0].profile)
    for rule, tuned_on, others, base in zip(rules, train, validation, bases, strict=True):
        assert base == best_static(tuned_on, StaticTable.of(tuned_on))
        assert rule.setting == tune_lookup_rule(tuned_on, base)
        sums_of = {}
        for setting in (rule.setting, base):
            parts = [replay_setting(case, {}, setting) for case in (tuned_on, others)]
            tokens, seconds = (
                torch.cat([getattr(part, name) for part in parts])
                for name in ("tokens_X", "seconds_X")
            )
            sums_of[setting] = torch.stack([tokens, seconds], dim=-1)
        names = [
            f"{split} {name}"
            for split, case in (("train", tuned_on), ("validation", others))
            for name in case.texts.source_X
        ]
        source_X = torch.tensor([sorted(set(names)).index(name) for name in names])
        expected = jackknifed(torch.cat([sums_of[rule.setting], sums_of[base]], dim=-1), source_X)
        assert rule.ratio.value == pytest.approx(expected.value, rel=1e-12)
        assert rule.ratio.error == pytest.approx(expected.error, rel=1e-9)
        assert rule.replayed is not None
        assert rule.replayed.speed == replay_setting(others, {}, rule.setting).speed


def test_a_policy_is_trained_with_the_times_of_its_setting() -> None:
    data = splits()["train"]
    bases = statics(timed_cases(data))
    seconds_RA, speed_R = step_times(opinionated("policy"), data, bases, "traversal", profile())
    for base in bases:
        in_sampling_R = data.sampling_X[data.text_R] == data.samplings.index(base.sampling)
        case = timed(data.of_sampling(base.sampling))
        assert torch.equal(seconds_RA[in_sampling_R], case.seconds((LIGHT,)))
        static = SPACE.index(base.action)
        labels_RS = case.texts.labels("traversal", slice(None), SPACE)
        # without the time of a decision
        tokens_R = speed_R[in_sampling_R] * case.seconds()[:, static]
        assert torch.allclose(tokens_R, SPACE.efficiencies(labels_RS)[:, static])
        # what the tree yields at each root, not one speed for all
        assert len(speed_R[in_sampling_R].unique()) > 10


def test_an_artefact_decides_as_its_module_does_under_a_setting_that_truncates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(SOME, sampling=Sampling(1.0, top_k=7, min_p=0.1))
    monkeypatch.setattr("tests.selector.exported.SETTINGS", (setting,))
    artefact = Policy(setting, export(tmp_path / "a")), load_script(tmp_path / "a")
    data = roots_of(setting, LIGHT, count=2)[0]
    assert count_differing(module_of("regressor"), *artefact, data) == 0
    assert count_differing(opinionated(seed=9), *artefact, data) > 0


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({"regressor-light": 1.05, "policy-light": 1.02}, "regressor-light"),
        # ahead, but not by a standard error
        ({"regressor-light": 1.05, "policy-light": 1.055}, "regressor-light"),
        ({"regressor-light": 1.05, "policy-light": 1.07}, "policy-light"),
        ({"regressor-light": 1.05, "regressor-full": 1.07, "policy-light": 1.06}, "regressor-full"),
        ({"policy-light": 1.02}, "policy-light"),
    ],
)
def test_a_dearer_selector_must_be_ahead_by_a_standard_error(
    speeds: dict[str, float], chosen: str
) -> None:
    selectors = {}
    for name, speed in reversed(speeds.items()):
        selectors[name] = TrainedSelector("", "", "", "", [], Ratio(speed, 0.01))
    assert choose(selectors) == chosen


def fit(folder: Path, objective: str, level: str) -> tuple[SelectorModule, str]:
    """What training gives back, and the run with its curves."""
    splits = {"train": texts(12, seed=1, level=level), "validation": texts(8, seed=2, level=level)}
    module = new_module(SHORT, objective, level, splits["train"])
    times = None
    if objective == "policy":
        times = {}
        for name, data in splits.items():
            speed_R = torch.full((len(data.length_R),), 300.0)
            times[name] = timed(data).seconds((LIGHT,)), speed_R
    validation = timed(splits["validation"])
    judged = [
        (validation, replace(static_setting(validation), feature_levels=module.asked, rho=1.0))
    ]
    with mlflow.start_run() as run:
        run_id = run.info.run_id
        kept = fitted(SHORT, module, splits, "traversal", judged, folder, run_id, times)
    return kept, run_id


def curve(client: Any, run_id: str, name: str) -> list[float]:
    history = client.get_metric_history(run_id, name)
    return [point.value for point in sorted(history, key=lambda point: point.step)]


@pytest.mark.parametrize(
    ("objective", "level"), [("regressor", LIGHT), ("regressor", FULL), ("policy", LIGHT)]
)
def test_all_epochs_are_trained_and_the_best_one_by_replay_is_kept(
    tmp_path: Path, client: Any, objective: str, level: str
) -> None:
    before = signal.getsignal(signal.SIGINT)
    kept, run_id = fit(tmp_path / "fitted", objective, level)
    assert signal.getsignal(signal.SIGINT) is before
    speeds = curve(client, run_id, MONITOR)
    assert speeds == curve(client, run_id, f"{MONITOR}/T 1 top-p 1")
    losses = curve(client, run_id, "train/loss")
    assert losses[-1] < losses[0]
    rates = curve(client, run_id, "learning rate")
    for points in (speeds, losses, rates, curve(client, run_id, "validation/loss")):
        assert len(points) == EPOCHS
    assert len(set(rates)) == EPOCHS
    assert [file.name for file in (tmp_path / "fitted").iterdir()] == ["best.ckpt"]
    data = timed(texts(8, seed=2, level=level))
    static = static_setting(data)
    setting = replace(static, feature_levels=kept.asked, rho=1.0)
    predictions = kept.predictions(data.texts, setting)
    replayed = replay_setting(data, predictions, setting, are_logits=objective != "regressor")
    ratio = replayed.speed / replay_setting(data, {}, static).speed
    assert ratio == pytest.approx(max(speeds), rel=1e-5)
    assert not kept.training and kept.hparams["level"] == level


def test_the_metrics_of_every_epoch_are_those_of_numpy_and_scipy(
    tmp_path: Path, client: Any
) -> None:
    """Their values at the best epoch, by other code; as curves in MLflow."""
    kept, run_id = fit(tmp_path, "regressor", LIGHT)
    data = texts(8, seed=2)
    labels = timed(data).survivals_RS[~data.unknown_R].double()
    with torch.no_grad():
        log_survivals = kept.network(data.scalars_RF, [], torch.ones(len(data.length_R), 1))
    survivals = log_survivals.exp()[~data.unknown_R].double()
    predicted = SPACE.efficiencies(survivals).numpy()
    labelled = SPACE.efficiencies(labels).numpy()
    bins = np.digitize(survivals.flatten().numpy(), np.linspace(0, 1, 16)[1:-1])
    differences = (survivals - labels).flatten().numpy()
    distances = [abs(differences[bins == number].sum()) for number in range(15)]
    expected = {
        "explained_variance": 1 - (labelled - predicted).var(0).sum() / labelled.var(0).sum(),
        "rank_correlation": stats.spearmanr(predicted.mean(-1), labelled.mean(-1)).statistic,
        "calibration_error": sum(distances) / len(differences),
    }
    speeds = curve(client, run_id, MONITOR)
    for name, value in expected.items():
        points = curve(client, run_id, f"validation/{name}/T 1 top-p 1")
        assert len(points) == EPOCHS and len(set(points)) > 1
        assert points[speeds.index(max(speeds))] == pytest.approx(value, rel=2e-3), name


def test_a_policys_network_is_that_of_the_paper() -> None:
    """DDTE, app. E: hidden states to 128 numbers each, layers of 512 and 32 with GELU; it sees the
    context length."""
    data = texts(level=FULL)
    policy = new_module(SHORT, "policy", FULL, data).eval()
    widths = [(layer.in_features, layer.out_features) for layer, _ in policy.network.blocks]
    assert widths == [(width, 128) for width in WIDTHS]
    assert [layer.out_features for layer in policy.network.mlp[::3]] == [512, 32, len(SPACE)]
    assert isinstance(policy.network.mlp[1], torch.nn.GELU)
    is_length_F = torch.tensor([name == "context_length" for name in PAIR.names])
    longer = replace(data, scalars_RF=data.scalars_RF + 50.0 * is_length_F)
    assert not torch.allclose(policy.scores(longer), policy.scores(data), atol=1e-3)
    regressor = new_module(SHORT, "regressor", FULL, data).eval()
    assert torch.equal(regressor.scores(longer), regressor.scores(data))
