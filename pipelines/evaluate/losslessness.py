"""Greedy decoding with trees against `generate(do_sample=False)` of the target alone, token for token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from data_gen.decoding import decoder_for
from data_gen.decoding.loop import FixedTree
from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from data_gen.texts.prompts import Prompt
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.evaluate.assisted import generation
from pipelines.pair.loading import encode
from pipelines.run import watched
from selector.actions import Action
from selector.schema import InputError

ACTIONS = (Action(1, 4, 0), Action(2, 2, 3), Action(4, 0, 6))
SUMS = 1e-4  # the logits of two passes that add the same numbers in another order may differ by so much, in float32
SPACINGS = 4  # of neighbouring numbers at the best logit: rounding may move each of two logits by two of them


def greedy_check(pair: ModelPair, config: Config, prompts: list[Prompt]) -> dict[str, Any]:
    """Compare every combination of action, verifier and drafting model, and every prompt, at least once. The draft
    samples, so that trees have branches; or the target drafts for itself, so that deep branches are accepted even if
    the draft is weak.

    Returns:
        the numbers of prompts, continuations and tokens, and where continuations differ: `ties` where the logits of
        both tokens lie within `tie` of each other, `differing` elsewhere.
    """
    result: dict[str, Any] = {"prompts": len(prompts), "continuations": 0, "tokens": 0, "ties": [], "differing": []}
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
            pairs = zip(found, text, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(text)))
            gap, allowed = _gap(pair, tokens + text[:at], found[at : at + 1], text[at : at + 1])
            where = {"prompt": prompt.id, "action": str(action), "verifier": name, "at": at, "gap": gap}
            result["ties" if gap <= allowed else "differing"].append(where)
    return result


@torch.inference_mode()
def _gap(pair: ModelPair, context: list[int], found: list[int], expected: list[int]) -> tuple[float, float]:
    """The distance between the target's logits of two tokens after a context, and the largest one that is a tie; each
    list of tokens has one, or none where that text has ended."""
    if not (found and expected):
        return math.inf, 0.0
    logits_V = pair.target(torch.tensor([context], device=pair.device)).logits[0, -1].float()
    return abs(float(logits_V[found[0]] - logits_V[expected[0]])), tie(float(logits_V.max()), pair.target.dtype)


def tie(best: float, dtype: torch.dtype) -> float:
    """The largest difference of two logits that rounding explains, given the best logit and the dtype of the passes.

    Numbers between 16 and 32 lie 0.125 apart in bfloat16, so a difference of 0.5 is a tie there.
    """
    spacing = torch.finfo(dtype).eps * 2.0 ** (math.frexp(best)[1] - 1)
    return max(SUMS, SPACINGS * spacing)


def require_equal(greedy: dict[str, Any]) -> None:
    """InputError where a continuation differs and no tie explains it: the other figures would mean nothing."""
    if greedy["differing"]:
        first = greedy["differing"][0]
        raise InputError(
            f"greedy decoding with trees is not generate()'s: prompt {first['prompt']}, token {first['at']} with "
            f"{first['verifier']} on {first['action']}; {len(greedy['differing'])} of {greedy['continuations']} differ"
        )


def summary(greedy: dict[str, Any]) -> str:
    """One line."""
    return (
        f"greedy decoding with trees against generate(): {greedy['continuations']} continuations of "
        f"{greedy['prompts']} prompts, {len(greedy['differing'])} differ, {len(greedy['ties'])} diverge at a tie"
    )
