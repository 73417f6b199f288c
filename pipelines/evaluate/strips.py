"""One held-out prompt as the selector decodes it, step by step: what each drafted, and which tokens came of it."""

from __future__ import annotations

from typing import Any

import torch

from data_gen.decoding.decoder import Decoder
from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.evaluate.methods import SELECTOR, Method, Selecting
from pipelines.pair.loading import encode
from selector.actions import EMPTY, Choice, Lookup
from selector.train.data import Setting


def strips(
    config: Config, pair: ModelPair, prompt: Prompt, contenders: dict[Setting, list[Method]]
) -> list[dict[str, Any]]:
    """For each sampling setting the steps: `source` (lookup, draft or nothing), `drafted`, the
    `accepted` text, and the text of the `extra` token that verification adds."""
    found = []
    tokens = encode(config, pair, prompt)
    for setting in config.sampling:
        methods = contenders[setting.temperature, setting.top_p]
        selecting = next(method for method in methods if method.name == SELECTOR)
        assert isinstance(selecting, Selecting) and selecting.tuned is not None
        decoder = Decoder(pair, setting.build(), get_verifier(selecting.verifier), selecting.tuned)
        generator = torch.Generator(device=pair.device).manual_seed(config.seed)
        decoded = decoder.decode(tokens, config.evaluate.tokens, generator)
        steps, left = [], decoded.tokens
        for step in decoded.steps:
            own, left = left[: step.accepted + 1], left[step.accepted + 1 :]
            steps.append(
                {
                    "source": source_of(step.action),
                    "drafted": str(step.action),
                    "accepted": pair.tokenizer.decode(own[: step.accepted]),
                    "extra": pair.tokenizer.decode(own[step.accepted :]),
                }
            )
        found.append({"temperature": setting.temperature, "top_p": setting.top_p, "prompt": prompt.id, "steps": steps})
    return found


def source_of(action: Choice) -> str:
    """Where drafted tokens come from."""
    if isinstance(action, Lookup):
        return "lookup"
    return "nothing" if action == EMPTY else "draft"
