"""What a chooser's trees decode, and what `generate` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Chooser, Decoded, FixedTree
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from selector.actions import Action

ZERO = Sampling(0.0)


def generated(model: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """The greedy text of `generate` after the prompt."""
    inputs = torch.tensor([prompt], device=model.device)
    return model.generate(inputs, max_new_tokens=tokens, do_sample=False, **options)[
        0, len(prompt) :
    ].tolist()


def decode(
    pair: ModelPair,
    chooser: Chooser | Action,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling = ZERO,
    verifier: str = "traversal",
) -> Decoded:
    """With a chooser, or with one tree at every step."""
    chooser = FixedTree(chooser) if isinstance(chooser, Action) else chooser
    decoder = Decoder(pair, sampling, get_verifier(verifier), chooser)
    return decoder.decode(prompt, tokens, torch.Generator(pair.device).manual_seed(0))
