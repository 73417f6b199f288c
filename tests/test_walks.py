"""How many files a reader walks through: those that `docs/structures.md` names for the life of a trace row, and those
that run for a decision and for the writing of an artefact."""

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
from selector.actions import Action
from tests.pipelines.runs import ROOT, demo_config
from tests.selector.exported import export

WORDS = ("selector/actions.py", "selector/sampling.py", "selector/schema.py")  # that every file speaks
PAGE = (ROOT / "docs" / "structures.md").read_text()


def files_of(work: Callable[[], Any]) -> set[str]:
    """The product's files of which a function runs."""
    seen = set[str]()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    own = (Path(name).relative_to(ROOT).as_posix() for name in seen if name.startswith(str(ROOT)))
    return {name for name in own if name.startswith(("selector/", "data_gen/", "pipelines/"))} - {*WORDS}


def test_a_trace_row_walks_through_few_files(pair: ModelPair, tmp_path: Path) -> None:
    """All those that the page names run, except those of training."""
    (steps,) = re.findall(r"The life of a trace row\n\n(.*?)\n\n", PAGE, flags=re.DOTALL)
    named = re.findall(r"`([\w/]+)\.py`", steps)
    names, prompt = {Path(each).name for each in named}, Prompt("one", " ".join(["word"] * 40), "prose", "one")
    assert len(names) <= 10

    def life() -> None:
        shard = make_shard(
            pair,
            recipe(demo_config("data.tokens=16", "prompts.chat=false")),
            Work("train", Sampling(0.8), ((prompt, 0),)),
        )
        TraceStore(tmp_path, {}).write("train/part-00000.parquet", shard.table)
        read_texts(tmp_path, "train", ["traversal"])

    assert names - {Path(each).stem for each in files_of(life)} == {"module", "replay"}


def test_a_decision_walks_through_five_files(pair: ModelPair, tmp_path: Path) -> None:
    tuned, prompt = export(tmp_path / "selector").at(0.8), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    sampling = Sampling(0.8)
    known = RootKnowledge(prompt, sampling, tuned.feature_levels)
    logits_NV = pair.target(torch.tensor([prompt])).logits[0, -1:]
    rows = ModelRows(sampling.probabilities(logits_NV), logits_NV, torch.zeros(1, 8))

    def life() -> Action | None:
        known.committed(Accepted(rows, [0]), [8])
        return tuned.select(known.features("early"))

    assert life() is not None and tuned.mode.decider == "network"  # the first one reads the artefact's tables
    assert len(files_of(life)) <= 5


def test_the_writing_of_an_artefact_walks_through_eight_files(tmp_path: Path) -> None:
    export(tmp_path / "first")  # its module is made and its texts are drawn
    assert len(files_of(lambda: export(tmp_path / "selector"))) <= 8
