"""Transformers' assisted generation with the run's pair, as its users call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from pipelines.evaluate.methods import Decoding, Task

ASSISTED, ASSISTED_CONSTANT = "assisted generation", "assisted generation, constant"
PROMPT_LOOKUP = "prompt lookup, constant"


@dataclass(frozen=True)
class Assistant:
    """One way to draft in `generate(assistant_model=..)`, which cannot be replayed.

    Attributes:
        constant: drafted tokens of every step; None for the library's default, which stops where the draft is unsure.
        lookup: whether they are copied from the text (`prompt_lookup_num_tokens`), without the draft model.
    """

    constant: int | None = None
    lookup: bool = False
    verifier: ClassVar[str] = "transformers"
    action: ClassVar[None] = None

    @property
    def name(self) -> str:
        if self.lookup:
            return PROMPT_LOOKUP
        return ASSISTED if self.constant is None else ASSISTED_CONSTANT

    identity = name

    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        """As `Method.decode`; the steps cannot be observed."""
        new, passes, seconds = self.generate(pair, sampling, task.prompt, task.limit, task.seed)
        return Decoding(new, seconds, passes, new, seconds, 0.0)

    def generate(
        self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int
    ) -> tuple[int, int, float]:
        """New tokens, target passes, and wall-clock seconds."""
        passes: list[None] = []
        drafts = {"prompt_lookup_num_tokens": self.constant} if self.lookup else {"assistant_model": pair.draft}
        generate = generation(pair, sampling, prompt, limit, **drafts)
        handle = pair.target.register_forward_hook(lambda *_: passes.append(None))
        torch.manual_seed(seed)
        try:
            with quiet(), without_own_settings(pair.target, pair.draft):
                if self.constant is not None:  # the assistant's own generation config says how much it drafts
                    own = pair.draft.generation_config
                    own.num_assistant_tokens, own.num_assistant_tokens_schedule = self.constant, "constant"
                    own.assistant_confidence_threshold = 0.0
                start = time.perf_counter()
                output = generate()
                new = output.shape[1] - len(prompt)
                if output.is_cuda:
                    torch.cuda.synchronize(output.device)
                seconds = time.perf_counter() - start
        finally:
            handle.remove()
        return new, len(passes), seconds


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


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's warnings about its own calls."""
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
    """The way with the most tokens per second on some prompts; their order changes from prompt to prompt."""
    totals = {assistant: [0, 0.0] for assistant in assistants}
    assistants[0].generate(pair, sampling, prompts[0], limit, seed)  # the first call is slower
    for number, prompt in enumerate(prompts):
        shift = number % len(assistants)
        for assistant in (*assistants[shift:], *assistants[:shift]):
            new, _, seconds = assistant.generate(pair, sampling, prompt, limit, seed + number)
            totals[assistant][0] += new
            totals[assistant][1] += seconds
    return max(totals, key=lambda assistant: totals[assistant][0] / totals[assistant][1])
