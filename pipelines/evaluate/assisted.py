"""Transformers' assisted generation with the run's pair, as its users call it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PreTrainedModel

from data_gen.models.checkpoints import quiet
from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from pipelines.evaluate.methods import Decoding

ASSISTED, ASSISTED_TUNED, PROMPT_LOOKUP = "assisted generation", "assisted generation, tuned", "prompt lookup"
ROUND = 4  # prompts that are decoded before the slower half of the ways to draft is dropped


@dataclass(frozen=True)
class Assistant:
    """One way to draft in transformers' own `generate()`, which cannot be replayed."""

    tokens: int | None = None  # of every step; None for the library's default, which stops where the draft is unsure
    match: int | None = None  # the longest one of the text's end where tokens are copied; None where the draft drafts
    verifier: ClassVar[str] = "transformers"

    @property
    def name(self) -> str:
        if self.match is not None:
            return PROMPT_LOOKUP
        return ASSISTED if self.tokens is None else ASSISTED_TUNED

    @property
    def drafts(self) -> str:
        matched = "" if self.match is None else f" after a match of at most {self.match}"
        return "" if self.tokens is None else f"drafts of {self.tokens}{matched}"

    @property
    def identity(self) -> str:
        return self.name

    def decode(self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int) -> Decoding:
        """As `Method.decode`; the steps cannot be observed, but are as many as the target's passes. The first pass of a
        model, over the prompt, counts as its median pass."""
        drafts: dict[str, Any] = {"assistant_model": pair.draft}
        if self.match is not None:
            drafts = {"prompt_lookup_num_tokens": self.tokens, "max_matching_ngram_size": self.match}
        generate = generation(pair, sampling, prompt, limit, **drafts)
        torch.manual_seed(seed)
        assistants = [] if pair.has_head else [pair.draft]
        hooked = _passes(pair.target), _passes(*assistants)
        with hooked[0] as passes, hooked[1] as drafted, quiet(), without_own_settings(pair.target, *assistants):
            if self.tokens is not None and assistants:
                own = pair.draft.generation_config
                own.num_assistant_tokens, own.num_assistant_tokens_schedule = self.tokens, "constant"
                own.assistant_confidence_threshold = 0.0
            start = time.perf_counter()
            text = generate()[0, len(prompt) :].tolist()  # which waits for a GPU
            seconds = time.perf_counter() - start
        seconds -= sum(each[0] - statistics.median(each) for each in (passes, drafted) if each)
        return Decoding(len(text), seconds, len(passes), len(text), text=text)


@contextmanager
def _passes(*models: PreTrainedModel) -> Iterator[list[float]]:
    """The seconds of each pass of some models, at its end."""
    began, taken = [0.0], list[float]()
    with ExitStack() as stack:
        for model in models:
            before = model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
            after = model.register_forward_hook(lambda *_: taken.append(time.perf_counter() - began[-1]))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield taken


def generation(
    pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, **drafts: Any
) -> Callable[[], torch.Tensor]:
    """The call of the target's `generate()` that continues a prompt."""
    inputs = torch.tensor([prompt], device=pair.device)
    config = GenerationConfig(
        max_new_tokens=limit,
        eos_token_id=sorted(pair.eos_ids) or None,
        pad_token_id=next(iter(pair.eos_ids), 0),
        **sampling.generation,
    )
    generate: Any = pair.target.generate
    return partial(generate, inputs, attention_mask=torch.ones_like(inputs), generation_config=config, **drafts)


CONSTANTS = tuple(map(Assistant, (1, 2, 3, 4, 6, 8, 12, 16)))
LOOKUPS = tuple(Assistant(tokens, match) for tokens in (3, 6, 10, 20) for match in (1, 2, 3, 5))


def best_of(
    ways: Sequence[Assistant], pair: ModelPair, sampling: Sampling, prompts: list[list[int]], limit: int, seed: int
) -> Assistant:
    """The way to draft with the most tokens per second on some prompts, by successive halving: after each `ROUND` of
    prompts the slower half is dropped. The order of the ways changes from prompt to prompt."""
    left = list(ways)
    totals = {way: [0, 0.0] for way in left}
    left[0].decode(pair, sampling, prompts[0], limit, seed)  # the first call is slower
    for number, prompt in enumerate(prompts):
        shift = number % len(left)
        for way in (*left[shift:], *left[:shift]):
            found = way.decode(pair, sampling, prompt, limit, seed + number)
            totals[way][0] += found.tokens
            totals[way][1] += found.seconds
        if number % ROUND == ROUND - 1 or number == len(prompts) - 1:
            left.sort(key=lambda way: totals[way][1] / totals[way][0])
            left = left[: (len(left) + 1) // 2]
        if len(left) == 1:
            break
    return left[0]
