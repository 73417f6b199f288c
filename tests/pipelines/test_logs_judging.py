"""What a log's run keeps, by replay of made-up logs: rules, networks, one length for all requests,
and how its figures are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelines.config import load_config
from pipelines.evaluate import gains
from pipelines.evaluate.gains import selector_at
from pipelines.evaluate.methods import COPYING, PLAIN
from pipelines.evaluate.table import Figure, Table
from pipelines.pair.log import DRAFTING_LEAD, RECORDED_LEAD, log_source
from pipelines.train import fitting, judging
from pipelines.train.judging import judge_jointly, keep_if_ahead
from pipelines.train.result import Case
from selector import tables
from selector.actions import EMPTY
from selector.decision import LookupRule, Setting
from selector.latency import LatencyProfile
from selector.schema import LOG, TEXT
from selector.train.data import Timed
from selector.train.mixed import MixedBatches
from selector.train.module import learned_rows
from selector.train.replay import Ratio
from selector.train.tuning import (
    Judged,
    StaticTable,
    best_static,
    decide,
    judge_setting,
    tune_lookup_rule,
    tune_setting,
)
from tests.pipelines import small_logs
from tests.selector import logged

PROFILE = logged.profile()


def led_rules(
    train: Timed,
    validation: Timed,
    fixed: Setting,
    profile: LatencyProfile = PROFILE,
) -> list[Judged]:
    rules, copies = (
        judging.judge_rules([train], [validation], [fixed], profile, drafts)
        for drafts in (True, False)
    )
    return judging.drafting_where_ahead(rules, copies, DRAFTING_LEAD)


@pytest.mark.parametrize(("batch", "right_there"), [(1, 6), (4, 0)])
def test_a_rule_copies_more_after_longer_matches_where_others_texts_do_too(
    batch: int, right_there: int
) -> None:
    """Where what is copied is right the longer, the longer the match is; not where only the
    training texts are so."""
    data = []
    for seed, right in enumerate((1, 1, right_there)):  # after short matches
        made = logged.timed(batch, seed=seed, count=24)
        made.texts.lookup_R.copy_(torch.where(made.texts.scalar("match") >= 4, 6, right))
        data.append(replace(made))  # with the labels that follow
    train, validation, others = data
    fixed = replace(best_static(train, StaticTable.of(train)), action=EMPTY)

    def lengths(judged: Timed) -> tuple[LookupRule | None, LookupRule | None]:
        simple = judging.judge_rules([train], [judged], [fixed], PROFILE, drafts=False)
        finer = judging.by_match(simple, [train], [judged], [fixed], PROFILE)
        return simple[0].setting.rule, finer[0].setting.rule

    simple, finer = lengths(others)
    assert finer == simple and simple is not None and not simple.longer
    assert lengths(validation)[1] == LookupRule(1, 1, longer=((4, 6),))


@pytest.mark.parametrize(("batch", "steps"), [(4096, 20), (10, 58)])
def test_an_epoch_over_few_texts_has_enough_steps(batch: int, steps: int) -> None:
    data = logged.texts(count=24)
    roots = len(learned_rows(data, 1))
    config = load_config(None, [f"train.batch={batch}"], logs=True)
    assert roots // fitting.batch_of(config, data) == steps, roots


@pytest.mark.parametrize("batch", [1, 4])
def test_a_rule_is_kept_where_it_is_surely_ahead_of_a_server_without_a_drafter(batch: int) -> None:
    """The drafter itself takes no time, or much, or it is not known how much a step takes."""
    train, validation = (logged.timed(batch, seed=seed, count=24) for seed in range(2))
    fixed = best_static(train, StaticTable.of(train))
    certain = logged.profile()
    assert certain.batches is not None
    (rule,) = led_rules(train, validation, fixed)

    def kept(profile: LatencyProfile) -> Setting:
        paying = judging.that_pay([rule.setting, fixed], [train, validation], fixed, profile)
        return judging.unless_plain(rule, paying, validation, fixed, profile).setting

    assert kept(certain) == rule.setting and rule.setting.rule is not None
    without = [certain.at_batch(size).target.at(100, 1) - 4e-3 for size in (1, 4)]
    costly = tables.Table([100], [1, 4], [without])
    assert kept(replace(certain, plain=costly)) == replace(fixed, action=EMPTY)
    draws = []
    for token in (0.0, 5e-3):
        target = [
            replace(table, seconds=[[row[0], row[0] + 63 * token] for row in table.seconds])
            for table in certain.batches.target
        ]
        draws.append(replace(certain.batches, target=target))
    assert kept(replace(certain, draws=[draws[0]] * 4)) == rule.setting
    assert kept(replace(certain, draws=draws)) == replace(fixed, action=EMPTY)


def test_a_network_that_knows_what_comes_decides_alone_and_jointly() -> None:
    """Unless its decisions take as long as a step."""
    train, validation, test = (logged.timed(4, seed=seed, count=24) for seed in range(3))
    predictions_of = [
        dict.fromkeys(LOG.levels, timed_texts.space.efficiencies(timed_texts.survivals_RS))
        for timed_texts in (validation, test)
    ]
    fixed = best_static(train, StaticTable.of(train))
    (rule,) = led_rules(train, validation, fixed)
    batches = MixedBatches(train, logged.profile(), 4)
    tuned, alike = (
        batches.replay(decide(train, {}, setting).action_R)
        for setting in (rule.setting, tune_lookup_rule(train, fixed))
    )
    assert tuned.speed >= alike.speed  # as if all requests had the same text
    cases = {}
    for level, efficiency_RA in predictions_of[0].items():
        slow = validation.on(logged.profile(5e-3).at_batch(4), 4)
        alone = tune_setting(slow, {level: efficiency_RA}, fixed)
        network, _ = judge_jointly(slow, efficiency_RA, alone, rule, fixed, logged.profile())
        assert keep_if_ahead(network, rule, fixed).setting.decider == "rule"
        alone = tune_setting(validation, {level: efficiency_RA}, fixed)
        network, common = judge_jointly(
            validation, efficiency_RA, alone, rule, fixed, logged.profile()
        )
        setting = replace(keep_if_ahead(network, rule, fixed).setting, level=level)
        cases[level] = Case(setting, fixed, rule.setting, network.ratio, rule.ratio, common)
        assert setting.decider == "network" and setting.level == level and setting.joint > 0
    table = Table(gains.measured(cases, test, predictions_of[1], logged.profile()))
    gain_entries = list(gains.entries(table, cases))
    assert [(entry["level"], entry["mixed"]) for entry in gain_entries] == [
        (level, m) for m in (False, True) for level in LOG.levels
    ]
    for gain in (part for entry in gain_entries for part in (entry, *entry["by_kind"].values())):
        assert gain["selector"] > max(gain["rule"], gain["fixed"])


def test_one_length_for_all_is_charged_for_its_network_where_a_rule_is_exported() -> None:
    """Decisions take longer than a step."""
    data = logged.timed(4, count=24)
    fixed = best_static(data, StaticTable.of(data))
    rule = tune_lookup_rule(data, fixed)
    even = Ratio(1.0, 0.0)
    cases = {TEXT: Case(replace(rule, level=TEXT), fixed, rule, even, even, common=400.0)}
    predicted = {TEXT: data.space.efficiencies(data.survivals_RS)}
    speeds: dict[str, list[float]] = {gains.ONE_LENGTH: [], gains.CHARGED: []}
    for seconds in (0.0, 5e-3):
        slow = data.on(logged.profile(seconds).at_batch(4), 4)
        table = Table(gains.measured(cases, slow, predicted, logged.profile()))
        for name, values in speeds.items():
            columns = {"setting": "T=0", "batch": 4, "is_mixed": True, "kind": "all"}
            figure = table.of(method=selector_at(TEXT) + name, rival=PLAIN, **columns)
            values.append(figure.value)
    fast, charged = speeds[gains.ONE_LENGTH]
    assert charged < 0.5 * fast and len(set(speeds[gains.CHARGED])) == 1


def test_errors_are_larger_by_what_other_labels_make_of_a_figure() -> None:
    figures = [Figure(method="a", value=1.1, low=1.0, high=1.2), Figure(method="b", value=2.0)]
    others = [[replace(f, value=f.value + by) for f in figures] for by in (0.05, -0.2)]
    wide, open_figure = gains.widened(figures, others)
    assert (wide.value, wide.low, wide.high) == pytest.approx((1.1, 0.8, 1.4))
    assert open_figure == figures[1] and gains.widened(figures, []) == figures


def test_of_many_kinds_of_work_the_commonest_are_told_apart() -> None:
    data = logged.timed(count=60)
    kinds = [f"kind {number}" for number in range(30)]
    data.texts.kind_X = [*kinds, *kinds[:15], *kinds[:10], *kinds[:5]]
    fixed = replace(best_static(data, StaticTable.of(data)), level=TEXT)
    case = Case(fixed, fixed, fixed, Ratio(1.0, 0.0), Ratio(1.0, 0.0))
    figures = gains.measured({TEXT: case}, data, {}, logged.profile())
    told = Table(figures).kinds(method=COPYING)
    assert told[0] == "all" and len(told) == 1 + gains.MOST_KINDS == 21
    assert set(kinds[:15]) < set(told)


@pytest.mark.parametrize(("drafting", "drafts"), [(0.0, True), (1.3e-3, False)])
def test_a_model_drafts_in_a_log_only_where_it_is_clearly_ahead_of_copies_alone(
    drafting: float, drafts: bool
) -> None:
    """As step times lack some of what drafting costs: where it is ahead, but by less, it does
    not."""
    train, validation = (logged.timed(seed=seed, count=20) for seed in (1, 2))
    for data in (train, validation):
        data.texts.lookup_R.floor_divide_(4)
    train, validation = (
        replace(data, profile=replace(data.profile, drafting=tables.Table.constant(drafting)))
        for data in (train, validation)
    )
    (fixed,) = judging.statics([train])
    (rule,) = led_rules(train, validation, fixed, replace(train.profile, batches=None))
    drafted, alone = (
        judge_setting(validation, {}, tune_lookup_rule(train, fixed, drafts=drafts), fixed.action)
        for drafts in (True, False)
    )
    assert drafted.is_ahead_of(alone) and not alone.setting.action.drafts
    assert rule.setting == (drafted if drafts else alone).setting
    assert fixed.action.drafts
    if not drafts:
        # one that drafts as that rule does
        network = replace(drafted, setting=replace(fixed, feature_levels=(TEXT,)))
        assert (
            judging.keep_if_ahead(network, rule, fixed, times=DRAFTING_LEAD).setting == rule.setting
        )


@pytest.mark.parametrize(
    ("words", "lead"),
    [
        (["latency.timings=times.csv"], DRAFTING_LEAD),
        (["latency.timings=steps.jsonl"], RECORDED_LEAD),
        (["latency.timings=times.csv", "logs.drafter=none"], 1.0),
    ],
)
def test_a_model_needs_less_of_a_lead_where_traffic_was_timed(
    words: list[str], lead: float, tmp_path: Path
) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(json.dumps(small_logs.record(number)) for number in range(20)))
    config = load_config(None, [f"logs.files=[{file}]", *words], logs=True)
    assert log_source(config).drafting_lead == lead
