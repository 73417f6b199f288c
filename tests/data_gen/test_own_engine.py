"""An engine without any cache, made from what docs/engines.md says alone: it decides and decodes as
ours does."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from data_gen.decoding.decoder import Decoder
from data_gen.drafting.lookup import LookupIndex
from data_gen.features.root import Accepted, RootKnowledge
from data_gen.models.pair import ModelPair
from data_gen.models.rows import ModelRow, ModelRows
from data_gen.models.sampling import Sampling, probabilities
from data_gen.trees import DraftTree
from data_gen.verification import get_verifier, styled
from selector.actions import Action
from selector.runtime.selector import Selector, Tuned
from tests.selector.exported import export

STEPS = 30


class Engine:
    """With `top_k=1`, so that both models choose their most likely tokens and nothing is left to
    chance."""

    def __init__(self, pair: ModelPair, tuned: Tuned, sampling: Sampling) -> None:
        self.pair = pair
        self.tuned = tuned
        self.sampling = sampling

    def rows(self, model: Any, tokens: list[int]) -> list[ModelRow]:
        output = model(torch.tensor([tokens]), output_hidden_states=True)
        logits_TV = output.logits[0]
        probs_TV = probabilities(logits_TV, self.sampling)
        return list(ModelRows(probs_TV, logits_TV, output.hidden_states[-1][0]).each())

    def after(self, model: Any, text: list[int], paths: list[list[int]]) -> ModelRows:
        ends = [self.rows(model, text + path)[-1] for path in paths]
        return ModelRows(*map(torch.stack, zip(*ends, strict=True)))

    def continued(self, text: list[int], count: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(count):
            logits_V = self.rows(self.pair.draft, text + drafted)[-1].logits_V
            drafted.append(int(logits_V.argmax()))
        return drafted

    def tree(self, text: list[int], action: Action) -> DraftTree:
        if action.copies:
            return DraftTree.from_paths(LookupIndex(text).proposal(action.L1), [[]])
        trunk = self.continued(text, action.L1)
        branches: list[list[int]] = [[]]
        if action.L2 > 0:
            logits_V = self.rows(self.pair.draft, text + trunk)[-1].logits_V
            firsts = logits_V.topk(action.K if action.distinct else 1).indices.tolist()
            branches = [
                [token, *self.continued([*text, *trunk, token], action.L2 - 1)] for token in firsts
            ]
        return DraftTree.from_paths(trunk, branches)

    def steps(self, prompt: list[int]) -> list[tuple[Action, list[int]]]:
        knowledge = RootKnowledge(prompt, self.sampling, self.tuned.feature_levels)
        text = list(prompt)
        passed = len(prompt) - 1
        steps: list[tuple[Action, list[int]]] = []
        while len(steps) < STEPS:
            action = None
            for level in self.tuned.feature_levels if steps else ():
                if level in ("light", "full"):
                    knowledge.passed(self.rows(self.pair.draft, text)[passed:])
                    passed = len(text)
                action = self.tuned.select(knowledge.features(level))
                if action is not None:
                    break
            action = action or self.tuned.select(None)
            assert action is not None
            tree = self.tree(text, action)
            paths = [[tree.token(n) for n in tree.path_to(node)] for node in range(len(tree))]
            rows = self.after(self.pair.target, text, paths)
            if action.copies:
                q_NV = one_hot(tree.tokens_N[1:], self.pair.vocabulary).double()
                q_NV = torch.cat([q_NV, q_NV[:1]])  # a leaf's row is not read
            else:
                q_NV = self.after(self.pair.draft, text, paths).probs_NV
            verifier = styled(get_verifier("traversal"), "greedy" if action.distinct else "iid")
            verdict = verifier.verify(tree, rows.probs_NV, q_NV, torch.Generator())
            tokens = [*paths[verdict.node], verdict.token]
            knowledge.committed(Accepted(rows, [0, *tree.path_to(verdict.node)]), tokens)
            text += tokens
            steps.append((action, tokens))
        return steps


@pytest.fixture(scope="module")
def selector(tmp_path_factory: pytest.TempPathFactory) -> Selector:
    return export(tmp_path_factory.mktemp("own") / "selector")


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.4])
@torch.inference_mode()
def test_the_page_is_enough_for_an_engine(
    pair: ModelPair, selector: Selector, temperature: float
) -> None:
    """With early features, light ones, and both: every decision is the network's, and the same as
    our decoder's."""
    sampling, tuned = Sampling(temperature, top_k=1), selector.at(temperature)
    prompt = [5, 9, 11, 5, 9, 12, 5, 9]
    mine = Engine(pair, tuned, sampling).steps(prompt)
    decoder = Decoder(pair, sampling, get_verifier("traversal"), tuned)
    with closing(decoder.steps(prompt, torch.Generator())) as theirs:
        assert mine == [(step.action, tokens) for step, tokens in islice(theirs, STEPS)]
    assert tuned.mode.decider == "network" and len({action for action, _ in mine[1:]}) > 1
