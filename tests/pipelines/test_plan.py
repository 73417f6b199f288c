"""`--plan`: what is reused, what is made anew, and how long that took."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from pipelines.cli import STAGES, run
from pipelines.pair.stage import PROMPTS
from pipelines.plans import outdated, planned
from tests.pipelines.runs import (
    DEMO,
    DRAFT,
    SMALL,
    TARGET,
    contents,
    demo_config,
    espalier,
    failure,
)

REUSED = STAGES[1:]  # the pair is loaded and checked every time


def plan(*overrides: str) -> dict[str, list[str]]:
    """The lines of the plan of all stages, by stage."""
    before, lines_by_stage = contents(), {}
    modules = {name: importlib.import_module(f"pipelines.{name}.stage") for name in STAGES}
    for line in planned(demo_config(*SMALL, *overrides), modules):
        name, _, words = line.partition(": ")
        lines_by_stage.setdefault(name, []).append(words)
    assert contents() == before
    return lines_by_stage


def reused(lines_by_stage: dict[str, list[str]]) -> set[str]:
    return {name for name, lines in lines_by_stage.items() if "is reused" in lines[0]}


def test_a_finished_run_is_reused_but_for_a_changed_file(copy: Path) -> None:
    lines_by_stage = plan()
    assert reused(lines_by_stage) == set(REUSED)
    assert lines_by_stage["pair"][0] == f"load {TARGET} and {DRAFT} and compare their vocabularies"
    assert lines_by_stage["data"] == [
        "runs/demo/traces is reused: nothing it depends on has changed"
    ]
    (copy / "runs/demo/training/result.json").write_text("{}")
    assert "none.jsonl: No such file" in failure("pair", "prompts.file=none.jsonl", "--plan")
    assert (
        reused(lines_by_stage := plan()) == {"latency", "data"}
        and lines_by_stage["pair"][1] == f"240 prompts of {PROMPTS}"
    )


@pytest.mark.parametrize(
    ("override", "anew"),
    [
        ("train.epochs=3", {"train", "evaluate", "export", "report"}),
        ("data.texts=48", {"data", "train", "evaluate", "export", "report"}),
        ("evaluate.prompts=4", {"evaluate", "export", "report"}),
    ],
)
def test_what_a_change_makes_anew_is_what_depends_on_it(
    copy: Path, override: str, anew: set[str]
) -> None:
    lines_by_stage = plan(override)
    assert reused(lines_by_stage) == set(REUSED) - anew


def test_what_is_replaced_is_named_with_the_reason(copy: Path) -> None:
    """And what a stage by itself leaves outdated."""
    lines_by_stage = plan("train.epochs=3")
    assert lines_by_stage["train"][0] == "replaces runs/demo/training: train.epochs: 2 -> 3"
    assert lines_by_stage["export"][0] == (
        "replaces runs/demo/selector: made from the output of an earlier stage"
    )
    assert plan("data.texts=48")["data"][0] == (
        "ends, because runs/demo/traces is of other inputs (data.texts: 40 -> 48): choose another "
        "name= or remove it"
    )
    config = demo_config(*SMALL)
    assert outdated(config, {"train"}, {"train", "evaluate"}) == (
        "runs/demo/selector, runs/demo/report.html: made before that, and no longer of this run's "
        "output; to make them again: espalier export, then report"
    )
    assert outdated(config, {"train"}, STAGES) == outdated(config, {}, {"train"}) == ""
    assert outdated(demo_config("name=new"), {"train"}, {"train"}) == ""


def test_another_temperature_does_not_time_the_machine_again(copy: Path) -> None:
    override = "sampling=[{temperature: 0.0}, {temperature: 0.7}]"
    (line, *_) = plan(override)["latency"][1:]
    assert (
        line == "the times stay, and distinct nodes are counted again, under each sampling setting"
    )
    path = copy / "runs/demo/latency.json"
    before = json.loads(path.read_text())
    run("latency", DEMO, [*SMALL, override], plan=False)
    after = json.loads(path.read_text())
    counted_before, counted = before.pop("distinct"), after.pop("distinct")
    assert before == after and counted["T=0"] == counted_before["T=0"]
    assert set(counted) == {"T=0", "T=0.7"}
    assert plan(override)["latency"][0].startswith("runs/demo/latency.json is reused")


def test_the_time_is_that_of_the_last_run(copy: Path) -> None:
    record = copy / "runs/demo/stages/train.json"
    values = json.loads(record.read_text())
    assert values["seconds"] > 0
    record.write_text(json.dumps(values | {"seconds": 600}))
    assert plan("train.epochs=3")["train"][-1] == "about 10.0 minutes, as last time"


def test_every_stage_has_a_plan_that_does_nothing(tmp_path: Path) -> None:
    """Where nothing is there yet."""
    output = espalier(tmp_path, "demo", "--plan")
    config = demo_config()
    assert (
        f"evaluate: {config.evaluate.prompts} prompts x {len(config.sampling)} sampling settings"
        in output
    )
    assert {line.partition(": ")[0] for line in output.splitlines()} >= set(STAGES)
    assert list(tmp_path.iterdir()) == []
