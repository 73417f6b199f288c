"""Texts that the target samples, and both models' outputs along any text.

Where memory runs out, this work and all later work of the process take half as many rows at once.

Legend: B rows taken at once, W positions, V vocabulary, D hidden width.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from data_gen.decoding.loop import Step
from data_gen.models.pair import CachedModel, ModelPair, without_own_settings
from data_gen.models.rows import ModelRows
from data_gen.models.sampling import Sampling, generation_arguments, probabilities
from data_gen.text_labels.labels import block_rows
from selector.schema import InputError

T = TypeVar("T")
MOST_HALVINGS = 12  # a block has no more than 4,096 rows
_halvings = 0  # so far, in this process


@dataclass
class GeneratedText:
    """A prompt and its continuation, token ids. Only the continuation follows the target's law."""

    tokens: list[int]
    start: int  # position of the last prompt token, the first root
    # and their verifier, if speculative decoding made the text
    steps: list[Step] = field(default_factory=list)
    verifier: str | None = None


class RowBlock(NamedTuple):
    """Both models' outputs after some consecutive tokens of a text."""

    target: ModelRows
    draft: ModelRows


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^56) that depends on the parts alone, not on the worker or the order of
    work."""
    digest = hashlib.sha256("|".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@torch.inference_mode()
def generated_by_target(
    pair: ModelPair, prompts: Sequence[list[int]], new_tokens: int, sampling: Sampling, seed: int
) -> list[GeneratedText]:
    """Continue prompts with the target alone, all at once, or in groups where memory runs out; a
    continuation depends on its group, and `seed` is the first one's. InputError for logits that are
    not finite or for lack of memory."""

    def attempt() -> list[GeneratedText]:
        prompts_at_once = fewer(len(prompts))
        texts: list[GeneratedText] = []
        for number, begin in enumerate(range(0, len(prompts), prompts_at_once)):
            some_prompts = prompts[begin : begin + prompts_at_once]
            texts += _written(pair, some_prompts, new_tokens, sampling, seed + number)
        return texts

    return halving(attempt)


def _written(
    pair: ModelPair, prompts: Sequence[list[int]], new_tokens: int, sampling: Sampling, seed: int
) -> list[GeneratedText]:
    rows = [torch.tensor(prompt) for prompt in prompts]
    masks = [torch.ones_like(row) for row in rows]
    pad = next(iter(pair.eos_ids), 0)
    eos = sorted(pair.eos_ids) or None
    input_ids = pad_sequence(rows, True, pad, "left").to(pair.device)
    mask = pad_sequence(masks, True, 0, "left").to(pair.device)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        eos_token_id=eos,
        pad_token_id=pad,
        **generation_arguments(sampling),
    )
    finite = _Finite()
    processors = LogitsProcessorList([finite])
    generate = cast(Any, pair.target.generate)
    gpus = [pair.device] if pair.device.type == "cuda" else []
    with without_own_settings(pair.target), torch.random.fork_rng(gpus):
        torch.manual_seed(seed % 2**63)
        output = generate(
            input_ids, attention_mask=mask, generation_config=config, logits_processor=processors
        )
    if not bool(finite.so_far):
        raise InputError(
            f"{pair.target.name_or_path}: the model gives numbers that are not finite (NaN or "
            "infinity)"
        )
    continuations = output[:, input_ids.shape[1] :].tolist()
    texts: list[GeneratedText] = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        texts.append(finished(pair, prompt, continuation))
    return texts


class _Finite(LogitsProcessor):
    """Records whether all logits are finite, without host synchronisation. It replaces NaN, which
    cannot be sampled."""

    def __init__(self) -> None:
        self.so_far: Tensor | bool = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.so_far = self.so_far & scores.amax(-1).isfinite().all()
        return scores.nan_to_num(nan=0.0, neginf=-torch.inf)


def finished(
    pair: ModelPair,
    prompt: Sequence[int],
    new: Sequence[int],
    steps: Sequence[Step] = (),
    verifier: str | None = None,
) -> GeneratedText:
    """The text of a prompt and its continuation, which ends with the first end-of-sequence
    token."""
    end = next((n for n, token in enumerate(new, 1) if token in pair.eos_ids), None)
    return GeneratedText([*prompt, *new[:end]], len(prompt) - 1, list(steps), verifier)


@torch.inference_mode()
def rows_along(pair: ModelPair, text: GeneratedText, sampling: Sampling) -> Iterator[RowBlock]:
    """Both models' outputs after the text's tokens from `start` on, in blocks, by teacher forcing;
    InputError where a model gives numbers that are not finite."""
    models = CachedModel(pair.target), CachedModel(pair.draft)
    size = fewer(block_rows(pair.vocabulary))
    for model in models:
        model.fill(text.tokens[: text.start])
    for begin in range(text.start, len(text.tokens), size):
        tokens = text.tokens[begin : begin + size]
        target, draft = (model.extend(tokens) for model in models)
        yield RowBlock(
            ModelRows(probabilities(target.logits_WV, sampling), *target),
            ModelRows(probabilities(draft.logits_WV, sampling.draft), *draft),
        )
    for model in models:
        model.check()


def fewer(rows: int) -> int:
    """How many rows are taken at once, where `rows` would be fastest."""
    return max(1, rows >> _halvings)


def halving(work: Callable[[], T]) -> T:
    """The result of `work`, which asks `fewer` how many rows it may take at once. It is called
    again where memory runs out, the first time with a warning; InputError where it runs out with
    one row at once, too."""
    global _halvings
    while True:
        try:
            return work()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in reason):
                raise
        if _halvings == 0:
            warnings.warn(
                f"blocks of rows are halved from here on: {reason}", RuntimeWarning, stacklevel=2
            )
        _halvings += 1  # not inside `except`, whose traceback keeps the failed attempt's tensors
        if _halvings > MOST_HALVINGS:
            raise InputError(
                f"the models leave no room for one row of a text, or for one text: {reason}"
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
