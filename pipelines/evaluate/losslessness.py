"""Greedy decoding with trees against `generate(do_sample=False)` of the target alone, token for token."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch

from data_gen.decoding import decoder_for
from data_gen.decoding.loop import FixedTree
from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from data_gen.texts.plausibility import tie
from data_gen.texts.prompts import Prompt
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.evaluate.assisted import generation
from pipelines.pair.loading import encode
from pipelines.run import watched
from selector.actions import Action
from selector.schema import InputError

ACTIONS = (Action(1, 4, 0), Action(2, 2, 3), Action(4, 0, 6))


def greedy_check(pair: ModelPair, config: Config, prompts: list[Prompt]) -> dict[str, Any]:
    """Compare every combination of action, verifier and drafting model, and every prompt, at least once, and name the
    texts that part at a tie of the target's logits. The draft samples, so that trees have branches; or the target
    drafts for itself, so that deep branches are accepted even if the draft is weak. InputError where texts part
    elsewhere: all other figures would mean nothing."""
    result: dict[str, Any] = {"prompts": len(prompts), "continuations": 0, "tokens": 0, "ties": []}
    limit = config.data.tokens
    ways = [
        (drafting, action, name)
        for drafting, action, name in product((pair, replace(pair, draft=pair.target)), ACTIONS, config.verifiers)
        if drafting.trees.max_K >= action.K
    ]
    expected: dict[str, list[int]] = {}
    for number in watched(range(max(len(prompts), len(ways))), "comparing greedy texts with generate()"):
        prompt, (drafting, action, name) = prompts[number % len(prompts)], ways[number % len(ways)]
        tokens = encode(config, pair, prompt)
        if prompt.id not in expected:
            generate = generation(pair, Sampling(0), tokens, limit)
            with without_own_settings(pair.target):  # it loses its end-of-sequence tokens, which `generate` has
                expected[prompt.id] = generate()[0, len(tokens) :].tolist()
        text, length = expected[prompt.id], len(tokens) + limit
        sampling, verifier = Sampling(0, draft_temperature=1.0), get_verifier(name)
        decoder = decoder_for(drafting, sampling, verifier, FixedTree(action), length)
        found = decoder.decode(tokens, limit, torch.Generator(device=pair.device).manual_seed(0)).tokens
        result["continuations"] += 1
        result["tokens"] += len(text)
        if found != text:
            shorter = min(len(found), len(text))
            at = next((i for i in range(shorter) if found[i] != text[i]), shorter)
            place = f"prompt {prompt.id}, token {at} with {name} on {action}"
            if at == shorter or not _tied(pair, tokens + text[:at], found[at], text[at]):
                raise InputError(f"greedy decoding with trees is not generate()'s: {place}")
            result["ties"].append(place)
    return result


@torch.inference_mode()
def _tied(pair: ModelPair, context: list[int], found: int, expected: int) -> bool:
    logits_V = pair.target(torch.tensor([context], device=pair.device)).logits[0, -1].float()
    return abs(float(logits_V[found] - logits_V[expected])) <= tie(float(logits_V.max()), pair.target.dtype)


def summary(greedy: dict[str, Any]) -> str:
    """One line."""
    same = f"all {greedy['continuations']} continuations of {greedy['prompts']} prompts are those of generate()"
    ties = f"; at a tie of the logits part {'; '.join(greedy['ties'])}" if greedy["ties"] else ""
    return f"greedy decoding with trees: {same}{ties}"
