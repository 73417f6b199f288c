"""Families of models decode what they generate; `test_self_check` compares their passes over trees with plain ones."""

from __future__ import annotations

import pytest
import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree
from data_gen.models.pair import CachedModel, without_own_settings
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from selector.actions import Action
from tests.data_gen.families import LONGEST, V, model_of, nameless


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


@torch.inference_mode()
def test_long_runs_are_committed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fill` gives the cache of one pass."""
    model = model_of("Gemma 2")
    text = torch.randint(V, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    monkeypatch.setattr("data_gen.models.pair.FILL", 7)
    cached = CachedModel(model)
    cached.fill(text)
    assert cached.committed == 50 < LONGEST
    expected_V = model(torch.tensor([[*text, 3]]), use_cache=False).logits[0, -1]
    assert torch.allclose(cached.extend([3]).logits_WV[-1], expected_V, atol=1e-4)
