"""An engine without any cache, made from what docs/engines.md says alone: it decides and decodes as
ours does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data_gen.decoding.decoder import Decoder
from data_gen.drafting.lookup import LookupIndex
from data_gen.features.root import Accepted, RootKnowledge
from data_gen.models.pair import ModelPair
from data_gen.models.rows import ModelRows
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
        self.pair, self.tuned, self.sampling, self.verifier = (
            pair,
            tuned,
            sampling,
            get_verifier("traversal"),
        )

    def rows(self, model: Any, tokens: list[int]) -> ModelRows:
        output = model(torch.tensor([tokens]), output_hidden_states=True)
        return ModelRows(
            probabilities(output.logits[0], self.sampling),
            output.logits[0],
            output.hidden_states[-1][0],
        )

    def drafted(
        self, text: list[int], action: Action, index: LookupIndex
    ) -> tuple[DraftTree, torch.Tensor]:
        if action.copies:
            trunk, branches = index.proposal(action.L1), [[]]
        else:
            trunk = self.continued(text, action.L1 + action.L2 * (action.K == 1))
            first_V = self.rows(self.pair.draft, text + trunk).logits_NV[-1]
            firsts = (
                first_V.topk(action.K).indices.tolist()
                if action.distinct
                else [int(first_V.argmax())] * action.K
            )
            more = action.L2 - 1
            branches = [
                [each, *self.continued([*text, *trunk, each], more)]
                for each in firsts
                if action.K > 1
            ]
        tree = DraftTree.from_paths(trunk, branches or [[]])
        q_NV = torch.zeros(len(tree), self.pair.vocabulary)
        for node in range(len(tree)):
            path = [tree.token(n) for n in tree.path_to(node)]
            if action.copies and len(path) < len(trunk):
                q_NV[node, trunk[len(path)]] = 1
            elif not action.copies:
                q_NV[node] = self.rows(self.pair.draft, text + path).probs_NV[-1]
        return tree, q_NV

    def continued(self, text: list[int], count: int) -> list[int]:
        for _ in range(count):
            text = [*text, int(self.rows(self.pair.draft, text).logits_NV[-1].argmax())]
        return text[len(text) - count :] if count > 0 else []

    def steps(self, prompt: list[int]) -> list[tuple[Action, list[int]]]:
        knowledge = RootKnowledge(prompt, self.sampling, self.tuned.feature_levels)
        text, index, passed, found = [*prompt], LookupIndex(prompt), len(prompt) - 1, []
        for _ in range(STEPS):
            action = None
            for level in self.tuned.feature_levels if found else ():
                if level in ("light", "full"):
                    knowledge.passed(list(self.rows(self.pair.draft, text).each())[passed:])
                    passed = len(text)
                action = action or self.tuned.select(knowledge.features(level))
                if action is not None:
                    break
            action = action or self.tuned.select(None)
            tree, q_NV = self.drafted(text, action, index)
            paths = [[tree.token(n) for n in tree.path_to(node)] for node in range(len(tree))]
            rows = ModelRows(
                *(
                    torch.stack(
                        [
                            getattr(self.rows(self.pair.target, text + path), name)[-1]
                            for path in paths
                        ]
                    )
                    for name in ModelRows._fields
                )
            )
            verifier = styled(self.verifier, "greedy") if action.distinct else self.verifier
            verdict = verifier.verify(tree, rows.probs_NV, q_NV, torch.Generator())
            tokens = [*paths[verdict.node], verdict.token]
            knowledge.committed(Accepted(rows, [0, *tree.path_to(verdict.node)]), tokens)
            index.extend(tokens)
            text += tokens
            found.append((action, tokens))
        return found


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
    theirs = decoder.steps(prompt, torch.Generator())
    expected = [(step.action, tokens) for step, tokens in (next(theirs) for _ in range(STEPS))]
    theirs.close()
    assert mine == expected
    assert tuned.mode.decider == "network" and len({action for action, _ in mine[1:]}) > 1
