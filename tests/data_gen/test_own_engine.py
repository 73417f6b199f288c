"""An engine of one's own, made from what docs/engines.md says: it decides as our decoder does."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.decoding.decoder import Decoder
from data_gen.features.root import RootKnowledge
from data_gen.models.pair import ModelPair
from data_gen.models.rows import ModelRows
from data_gen.models.sampling import Sampling, probabilities
from data_gen.verification import get_verifier
from selector.actions import Action
from selector.runtime.selector import Policy
from tests.selector.exported import export

PROMPT = [5, 9, 11, 5, 9, 12, 5, 9]


def rows_after(model: Any, text: list[int], sampling: Sampling) -> ModelRows:
    """By one plain pass over the whole text."""
    output = model(torch.tensor([text]), output_hidden_states=True)
    logits_TV = output.logits[0]
    return ModelRows(probabilities(logits_TV, sampling), logits_TV, output.hidden_states[-1][0])


class Engine:
    """Has no cache; at every root it knows the text so far."""

    def __init__(self, pair: ModelPair, policy: Policy, sampling: Sampling) -> None:
        self.pair = pair
        self.sampling = sampling
        self.policy = policy
        self.knowledge = RootKnowledge(PROMPT, sampling, policy.feature_levels)
        self.passed = len(PROMPT) - 1  # tokens after which the knowledge has the draft's rows

    def action(self, text: list[int]) -> Action | None:
        for level in self.policy.feature_levels if len(text) > len(PROMPT) else ():
            if level in ("light", "full"):
                rows = list(rows_after(self.pair.draft, text, self.sampling).each())
                self.knowledge.passed(rows[self.passed :])
                self.passed = len(text)
            action = self.policy.select(self.knowledge.features(level))
            if action is not None:
                return action
        return self.policy.select(None)

    def add(self, text: list[int], tokens: list[int]) -> None:
        nodes = range(len(text) - 1, len(text) + len(tokens) - 1)
        target = rows_after(self.pair.target, text + tokens, self.sampling)
        self.knowledge.committed(target, nodes, tokens)


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.4])
@torch.inference_mode()
def test_the_page_is_enough_for_an_engine(
    pair: ModelPair, tmp_path: Path, temperature: float
) -> None:
    """With early features, light ones, and both: every decision is the network's, and the same as
    our decoder's."""
    policy = export(tmp_path / "selector").at(temperature)
    sampling = Sampling(temperature)
    decoder = Decoder(pair, sampling, get_verifier("traversal"), policy)
    with closing(decoder.steps(PROMPT, torch.Generator().manual_seed(0))) as endless:
        steps = list(islice(endless, 30))
    engine = Engine(pair, policy, sampling)
    text = list(PROMPT)
    for step, tokens in steps:
        assert engine.action(text) == step.action
        engine.add(text, tokens)
        text += tokens
    assert policy.setting.decider == "network" and len({step.action for step, _ in steps[1:]}) > 1
