"""Greedy decoding with trees against `generate(do_sample=False)` of the target alone, token for token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from data_gen.decoding import Decoder, Fixed
from data_gen.models import ModelPair
from data_gen.prompts import Prompt
from data_gen.sampling import Sampling
from data_gen.verification import get_verifier
from pipelines.common.prompts import encode
from pipelines.config import Config
from selector.actions import Action
from selector.schema import InputError

ACTIONS = (Action(1, 4, 0), Action(2, 2, 3), Action(4, 0, 6))
TIE = 1e-4  # gap of the two best logits below which their order is rounding


def greedy_check(pair: ModelPair, config: Config, prompts: list[Prompt]) -> dict[str, Any]:
    """Compare on every prompt with three actions, verifiers in turn; the draft samples, so that trees do branch.

    At every other prompt the target drafts for itself, so that deep branches are accepted however weak the draft is.

    Returns:
        how many continuations were compared, and the prompts, actions and positions of those that part: `ties` where
        the target's two best logits lie within `TIE` of each other, `differing` elsewhere.
    """
    result: dict[str, Any] = {"prompts": len(prompts), "continuations": 0, "tokens": 0, "ties": [], "differing": []}
    for number, prompt in enumerate(prompts):
        tokens = encode(config, pair, prompt)
        expected = _generate(pair, tokens, config.evaluate.tokens)
        verifier = get_verifier(config.verifiers[number % len(config.verifiers)])
        drafting = pair if number % 2 else replace(pair, draft=pair.target)
        for action in ACTIONS:
            decoder = Decoder(drafting, Sampling(0), verifier, Fixed(action), draft_sampling=Sampling(1))
            generator = torch.Generator(device=pair.device).manual_seed(0)
            found = decoder.decode(tokens, config.evaluate.tokens, generator).tokens
            result["continuations"] += 1
            result["tokens"] += len(expected)
            if found != expected:
                pairs = zip(found, expected, strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
                gap = _gap(pair, tokens + expected[:at])
                where = {"prompt": prompt.id, "action": str(action), "verifier": verifier.name, "at": at, "gap": gap}
                result["ties" if gap < TIE else "differing"].append(where)
    return result


def _generate(pair: ModelPair, tokens: list[int], count: int) -> list[int]:
    inputs = torch.tensor([tokens], device=pair.device)
    generate: Any = pair.target.generate
    output = generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=pair.tokenizer.eos_token_id or 0,
    )
    return output[0, len(tokens) :].tolist()


@torch.inference_mode()
def _gap(pair: ModelPair, context: list[int]) -> float:
    """Difference of the target's two best logits after a context."""
    best = pair.target(torch.tensor([context], device=pair.device)).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def require_equal(greedy: dict[str, Any]) -> None:
    """InputError where a continuation differs and no tie explains it: nothing that was measured would mean anything."""
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
        f"{greedy['prompts']} prompts, {len(greedy['differing'])} differ, {len(greedy['ties'])} part at a tie"
    )
