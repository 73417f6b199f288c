"""Texts that the target writes for a quick look or an audit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from data_gen.audit import RootedText
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.written import seed_of, written_by_target
from pipelines.config import Config
from pipelines.pair.loading import encode, prompts_of
from selector.actions import ActionSpace

SPLIT = "validation"
TOGETHER = 16  # texts that the target writes at once


def texts_of(config: Config, pair: ModelPair, sampling: Sampling) -> Iterator[tuple[str, RootedText, torch.Generator]]:
    """What the target makes of the prompts: source, text and a generator of the text's own.

    Texts that end before their first root are left out.
    """
    prompts = prompts_of(config, pair, SPLIT)
    new_tokens = config.data.tokens + ActionSpace.default().depth
    for begin in range(0, len(prompts), TOGETHER):
        batch = prompts[begin : begin + TOGETHER]
        encoded = [encode(config, pair, prompt) for prompt in batch]
        seed = seed_of(config.seed, sampling, "audit", begin)
        for prompt, text in zip(batch, written_by_target(pair, encoded, new_tokens, sampling, seed), strict=True):
            generator = torch.Generator(device=pair.device).manual_seed(seed_of(seed, prompt.id))
            rooted = RootedText(pair, text, sampling)
            if rooted.roots > 0:
                yield prompt.source, rooted, generator
