"""The files that a reader walks through: for a trace row, a decision, and the writing of an artefact."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_gen.features.root import Accepted, RootKnowledge
from data_gen.models.pair import ModelPair, ModelRows
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt
from data_gen.traces import TraceStore, read_texts
from pipelines.pair.stage import recipe
from tests.pipelines.runs import ROOT, demo_config
from tests.selector.exported import export

WORDS = ("selector/actions.py", "selector/sampling.py", "selector/schema.py")  # that every file speaks
STEPS = re.compile(r"The life of a trace row\n\n(.*?)\n\n", flags=re.DOTALL)


def files_of(work: Callable[[], Any]) -> set[str]:
    seen = set[str]()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    own = (Path(name).relative_to(ROOT).as_posix() for name in seen if name.startswith(str(ROOT)))
    return {name for name in own if name.startswith(("selector/", "data_gen/", "pipelines/"))} - {*WORDS}


def test_a_trace_row_walks_through_ten_files(pair: ModelPair, tmp_path: Path) -> None:
    """Those that the page names; they all run, but for the stage and training."""
    (steps,) = STEPS.findall((ROOT / "docs" / "structures.md").read_text())
    named = {Path(each).name for each in re.findall(r"`([\w/]+)\.py`", steps)}
    own = recipe(demo_config("data.tokens=16", "prompts.chat=false"))
    work = Work("train", Sampling(0.8), ((Prompt("one", " ".join(["word"] * 40), "prose", "one"), 0),))

    def life() -> None:
        TraceStore(tmp_path, {}).write("train/part-00000.parquet", make_shard(pair, own, work).table)
        read_texts(tmp_path, "train", ["traversal"])

    assert len(named) <= 10 and named - {Path(each).stem for each in files_of(life)} == {"stage", "module", "replay"}


def test_a_decision_walks_through_five_files(pair: ModelPair, tmp_path: Path) -> None:
    tuned, prompt = export(tmp_path / "selector").at(0.8), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    known = RootKnowledge(prompt, Sampling(0.8), tuned.feature_levels)
    logits_NV = pair.target(torch.tensor([prompt])).logits[0, -1:]
    step = Accepted(ModelRows(logits_NV.softmax(-1), logits_NV, torch.zeros(1, 8)), [0])

    def life() -> bool:
        known.committed(step, [8])
        return tuned.select(known.features("early")) is not None

    assert life() and tuned.mode.decider == "network"  # the first one reads the artefact's tables
    assert len(files_of(life)) <= 5


def test_the_writing_of_an_artefact_walks_through_eight_files(tmp_path: Path) -> None:
    export(tmp_path / "first")  # its module is made and its texts are drawn
    assert len(files_of(lambda: export(tmp_path / "selector"))) <= 8
