"""An engine of one's own, the example of docs/engines.md: it decides, drafts and verifies as our
decoder does."""

from __future__ import annotations

import runpy
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from selector.actions import Action
from tests.checks import ROOT
from tests.selector.exported import export

PROMPT = [5, 9, 11, 5, 9, 12, 5, 9]
ENGINE = runpy.run_path(str(ROOT / "docs" / "examples" / "tree_engine.py"))["Engine"]
RANKED = Action.ranked([(0,), (1,), (0, 0), (0, 1), (1, 0)], copied=3)


@pytest.mark.parametrize(
    "how", [0.4, 0.8, 1.0, 1.4, 1.8, Action(3, 1, 2, "greedy"), RANKED], ids=str
)
def test_the_example_is_a_whole_engine(pair: ModelPair, tmp_path: Path, how: Any) -> None:
    """With the lookup rule, early features, light ones, both, on texts that become longer than the
    training's; and with trees of other styles."""
    policy: Any = FixedTree(how)
    sampling = Sampling(0.7)
    if isinstance(how, float):
        policy = export(tmp_path / "selector").at(how)
        sampling = Sampling(how)
    decoder = Decoder(pair, sampling, get_verifier("traversal"), policy)
    with closing(decoder.steps(PROMPT, torch.Generator().manual_seed(0))) as endless:
        steps = list(islice(endless, 30))
    engine = ENGINE(pair, policy, sampling, PROMPT, torch.Generator().manual_seed(0))
    taken = [engine.step() for _ in steps]
    assert taken == [(step.action, tokens) for step, tokens in steps]
    if how in (0.8, 1.0, 1.4):
        assert policy.setting.decider == "network"
    if how == 0.8:
        assert len({action for action, _ in taken[1:]}) > 1
    if how == 1.8:
        assert len(engine.text) > policy.longest > len(PROMPT)
