"""For every family: what passes over token trees give is what plain passes over single texts give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree
from data_gen.models.pair import CachedModel, without_own_settings
from data_gen.models.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification import get_verifier
from selector.actions import Action
from tests.data_gen.families import LONGEST, RIGHT, WINDOW, V, model_of, nameless

TREES = {
    "chain": DraftTree.from_paths([11, 12, 13, 14], [[]]),
    "branching": DraftTree.from_paths([], [[21, 22], [31, 32], [21, 42]]),
    "delayed": DraftTree.from_paths([11, 12], [[21, 22, 23], [31, 32, 33], [21, 42, 43]]),
}
ACCEPTED = {"chain": [11, 12], "branching": [21, 42], "delayed": [11, 12, 31, 32]}


@torch.inference_mode()
def plain(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """Logits after each text, in one batch: what follows a token changes nothing for it."""
    width = max(map(len, texts))
    logits = model(torch.tensor([text + [0] * (width - len(text)) for text in texts]), use_cache=False).logits
    return torch.stack([row[len(text) - 1] for row, text in zip(logits, texts, strict=True)])


@pytest.mark.parametrize("family", RIGHT)
def test_laws_before_and_after_commits(family: str) -> None:
    """Three trees of different shapes, a part of each committed, and a tail, which reach over a window's length: laws
    differ by rounding alone."""
    model = model_of(family, tie_word_embeddings=False)  # tied, a tiny model repeats what it reads
    text = torch.randint(V, (WINDOW - 2,), generator=torch.Generator().manual_seed(1)).tolist()
    cached = CachedModel(model)
    cached.fill(text[:-1])
    for shape, tree in TREES.items():
        tokens = tree.tokens_N.clone()
        tokens[0] = text[-1]
        passed = cached.forward(tokens, tree.depths_N, tree.ancestors_NN())
        paths = [[tree.token(n) for n in tree.path_to(node)] for node in range(len(tree))]
        assert apart(passed.logits_WV, plain(model, [text + path for path in paths])) < 1e-6, shape
        cached.keep([0, *tree.path_to(tree.node_of(ACCEPTED[shape]))])
        text += [*ACCEPTED[shape], 5]
    follow = cached.extend([5, 7]).logits_WV
    assert apart(follow, plain(model, [text, [*text, 7]])) < 1e-6


def apart(found_NV: torch.Tensor, expected_NV: torch.Tensor) -> float:
    """The largest total variation between the laws of two sets of logits."""
    return float((found_NV.softmax(-1) - expected_NV.softmax(-1)).abs().sum(-1).max()) / 2


@pytest.mark.parametrize("family", ["Llama", "Mistral, sliding window", "Qwen 3, sliding window", "GPT-OSS", "GPT-2"])
def test_greedy_text_is_that_of_generate(family: str) -> None:
    """The target drafts for itself, at a temperature: deep branches are accepted, and others are not."""
    model = model_of(family, max_position_embeddings=256, tie_word_embeddings=False)  # tied, they repeat what they read
    with without_own_settings(model):
        expected = model.generate(torch.tensor([[5, 9, 7]]), max_new_tokens=100, do_sample=False)[0, 3:].tolist()
        pair = nameless(model, model)
        sampling = Sampling(0, draft_temperature=0.08)
        decoder = Decoder(pair, sampling, get_verifier("traversal"), FixedTree(Action(3, 2, 4)))
        decoded = decoder.decode([5, 9, 7], 100, torch.Generator().manual_seed(0))
    assert decoded.tokens == expected
    assert len(set(expected)) > 2 and max(step.accepted for step in decoded.steps) > 2


def test_long_runs_are_committed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fill` gives the cache of one pass."""
    model = model_of("Gemma 2")
    text = torch.randint(V, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    monkeypatch.setattr("data_gen.models.pair.FILL", 7)
    cached = CachedModel(model)
    cached.fill(text)
    assert cached.committed == 50 < LONGEST
    assert torch.allclose(cached.extend([3]).logits_WV, plain(model, [[*text, 3]]), atol=1e-4)
