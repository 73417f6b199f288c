"""Transformers' assisted generation with the run's pair, as its users call it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling


@dataclass(frozen=True)
class Assistant:
    """What drafts, and how many tokens.

    Attributes:
        constant: always so many; None for the library's default, which stops where the draft is unsure.
        lookup: whether they are copied from the text (`prompt_lookup_num_tokens`); else the draft model's.
    """

    constant: int | None = None
    lookup: bool = False

    def generate(
        self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int
    ) -> tuple[int, int, float]:
        """New tokens, target passes, and seconds on the wall."""
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        generation = GenerationConfig(
            max_new_tokens=limit,
            eos_token_id=sorted(pair.eos_ids) or None,
            pad_token_id=next(iter(pair.eos_ids), 0),
            **sampling.generation,
        )
        input_ids = torch.tensor([prompt], device=pair.device)
        generate: Any = pair.target.generate
        handle = pair.target.register_forward_hook(count)
        torch.manual_seed(seed)
        try:
            with quiet(), without_own_settings(pair.target, pair.draft):
                self._configure(pair.draft.generation_config)
                start = time.perf_counter()
                output = generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    generation_config=generation,
                    **({"prompt_lookup_num_tokens": self.constant} if self.lookup else {"assistant_model": pair.draft}),
                )
                new = output.shape[1] - len(prompt)
                if output.is_cuda:
                    torch.cuda.synchronize(output.device)
                seconds = time.perf_counter() - start
        finally:
            handle.remove()
        return new, passes, seconds

    def _configure(self, config: GenerationConfig) -> None:
        """The assistant's own generation config says how much it drafts."""
        if self.constant is not None:
            config.num_assistant_tokens = self.constant
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's remarks on how it calls itself."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


CONSTANTS = tuple(Assistant(constant) for constant in (2, 3, 4, 6, 8))
LOOKUPS = tuple(Assistant(constant, lookup=True) for constant in (3, 6, 10, 16))


def best_of(
    assistants: Sequence[Assistant],
    pair: ModelPair,
    sampling: Sampling,
    prompts: list[list[int]],
    limit: int,
    seed: int,
) -> Assistant:
    """The one with the most tokens per second on some training prompts, taken in turn."""
    totals = {assistant: [0, 0.0] for assistant in assistants}
    assistants[0].generate(pair, sampling, prompts[0], limit, seed)  # the first call is slow
    for number, prompt in enumerate(prompts):
        shift = number % len(assistants)
        for assistant in (*assistants[shift:], *assistants[:shift]):
            new, _, seconds = assistant.generate(pair, sampling, prompt, limit, seed + number)
            totals[assistant][0] += new
            totals[assistant][1] += seconds
    return max(totals, key=lambda assistant: totals[assistant][0] / totals[assistant][1])
