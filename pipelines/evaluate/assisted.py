"""Transformers' assisted generation with the run's pair, as its users call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig

from data_gen.models.checkpoints import quiet
from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from pipelines.evaluate.methods import Decoding, Task

ASSISTED, ASSISTED_TUNED, PROMPT_LOOKUP = "assisted generation", "assisted generation, tuned", "prompt lookup"
ROUND = 4  # prompts that are decoded before the slower half of the ways to draft is dropped


@dataclass(frozen=True)
class Assistant:
    """One way to draft in transformers' own `generate()`, which cannot be replayed.

    Attributes:
        tokens: drafted tokens of every step; None for the library's default, which stops where the draft is unsure.
        match: the longest match of the text's end that is looked for, if tokens are copied from where it first
            occurred; None if the draft model drafts.
    """

    tokens: int | None = None
    match: int | None = None
    verifier: ClassVar[str] = "transformers"
    action: ClassVar[None] = None

    @property
    def name(self) -> str:
        if self.match is not None:
            return PROMPT_LOOKUP
        return ASSISTED if self.tokens is None else ASSISTED_TUNED

    @property
    def drafts(self) -> str:
        """As `Method.drafts`."""
        matched = "" if self.match is None else f" after a match of at most {self.match}"
        return "" if self.tokens is None else f"drafts of {self.tokens}{matched}"

    @property
    def identity(self) -> str:
        """As `Method.identity`."""
        return self.name

    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        """As `Method.decode`; the steps cannot be observed."""
        text, passes, seconds = self.generate(pair, sampling, task.prompt, task.limit, task.seed)
        return Decoding(len(text), seconds, passes, len(text), text=text)

    def generate(
        self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int
    ) -> tuple[list[int], int, float]:
        """New tokens, the number of target passes, and wall-clock seconds."""
        passes: list[None] = []
        drafts: dict[str, Any] = {"assistant_model": pair.draft}
        if self.match is not None:
            drafts = {"prompt_lookup_num_tokens": self.tokens, "max_matching_ngram_size": self.match}
        generate = generation(pair, sampling, prompt, limit, **drafts)
        handle = pair.target.register_forward_hook(lambda *_: passes.append(None))
        torch.manual_seed(seed)
        try:
            drafts_itself = [] if pair.has_head else [pair.draft]
            with quiet(), without_own_settings(pair.target, *drafts_itself):
                # the assistant's own generation config says how much it drafts
                if self.tokens is not None and drafts_itself:
                    own = pair.draft.generation_config
                    own.num_assistant_tokens, own.num_assistant_tokens_schedule = self.tokens, "constant"
                    own.assistant_confidence_threshold = 0.0
                start = time.perf_counter()
                text = generate()[0, len(prompt) :].tolist()  # which waits for a GPU
                seconds = time.perf_counter() - start
        finally:
            handle.remove()
        return text, len(passes), seconds


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
    assistants: Sequence[Assistant],
    pair: ModelPair,
    sampling: Sampling,
    prompts: list[list[int]],
    limit: int,
    seed: int,
) -> Assistant:
    """The way to draft with the most tokens per second on some prompts, by successive halving: after each `ROUND` of
    prompts the slower half is dropped. The order of the ways changes from prompt to prompt."""
    left = list(assistants)
    totals = {assistant: [0, 0.0] for assistant in left}
    left[0].generate(pair, sampling, prompts[0], limit, seed)  # the first call is slower
    for number, prompt in enumerate(prompts):
        shift = number % len(left)
        for assistant in (*left[shift:], *left[:shift]):
            text, _, seconds = assistant.generate(pair, sampling, prompt, limit, seed + number)
            totals[assistant][0] += len(text)
            totals[assistant][1] += seconds
        if number % ROUND == ROUND - 1 or number == len(prompts) - 1:
            left.sort(key=lambda assistant: totals[assistant][1] / totals[assistant][0])
            left = left[: (len(left) + 1) // 2]
        if len(left) == 1:
            break
    return left[0]
