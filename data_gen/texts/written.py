"""The texts of a shard: the target or speculative decoding writes them, or they are a log's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Random
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.generated import GeneratedText, finished, generated_by_target, seed_of
from data_gen.texts.logs import LoggedText
from data_gen.texts.prompts import Form, Prompt
from data_gen.verification import get_verifier
from selector.actions import GREEDY, Action, ActionSpace
from selector.schema import InputError
from selector.train.ranked import balanced

DEPTH = ActionSpace.recorded().depth  # how far every root looks ahead, whatever its trees
BEYOND = DEPTH - 1  # tokens after the labelled ones; the last prompt token is a root, too
CERTAIN_BEHAVIOUR = (balanced(8, 3), Action.ranked(balanced(16, 4).ranks, 8))
BEHAVIOUR: tuple[Action, ...] = (
    Action(1, 4, 0),
    Action(1, 8, 0),
    Action(1, 12, 0),
    Action(2, 2, 4),
    Action(3, 1, 5),
    Action(4, 4, 4),
    Action(2, 0, 6, GREEDY),
    Action(2, 4, 4, GREEDY),
    Action(3, 2, 4, GREEDY),
    Action(4, 0, 4, GREEDY),
    *CERTAIN_BEHAVIOUR,
)
WIDE_BEHAVIOUR: tuple[Action, ...] = (
    Action(4, 0, 3),
    Action(8, 0, 3),
    Action(16, 0, 3),
    Action(8, 0, 3, GREEDY),
    Action(16, 0, 2, GREEDY),
    *CERTAIN_BEHAVIOUR,
)


@dataclass(frozen=True)
class Recipe:
    verifiers: tuple[str, ...]  # their labels are recorded; they verify the steps of decoded texts
    form: Form
    tokens: int  # labelled tokens of each text
    siblings: int  # draws of the siblings over which labels are averaged
    stride: int  # hidden states are recorded at every `stride`-th root of a training text
    hidden: bool  # whether hidden states are recorded
    seed: int
    # the labelled trees, no deeper than `DEPTH`, and the behaviour's shapes by rank
    space: ActionSpace
    # of decoded texts; one of these is drawn at every step
    behaviour: tuple[Action, ...]


@dataclass(frozen=True)
class Work:
    """A shard to make: texts of one split under one sampling setting."""

    split: str
    sampling: Sampling
    # with the texts' numbers, because a prompt may be continued several times
    prompts: tuple[tuple[Prompt, int], ...]
    decoded: bool = False  # whether speculative decoding makes the texts
    logged: tuple[LoggedText, ...] = ()  # the texts if an engine made them


class WrittenText(NamedTuple):
    """Error messages about a text begin with `origin`."""

    prompt: Prompt
    text: GeneratedText
    origin: str

    @property
    def roots(self) -> int:
        return max(0, len(self.text.tokens) - self.text.start - DEPTH)


def written(pair: ModelPair, recipe: Recipe, work: Work) -> list[WrittenText]:
    """The texts of a shard; InputError, which names the prompt, where a model or the tokenizer
    fails."""
    if work.logged:
        return [_of_log(pair, text) for text in work.logged]
    prompts = [prompt for prompt, _ in work.prompts]
    encoded = [recipe.form.encode(pair.tokenizer, prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise InputError(f"prompt {prompt.id}: the tokenizer gives no tokens")
    names = [f"{prompt.id}#{number}" for prompt, number in work.prompts]
    seed = seed_of(recipe.seed, work.split, work.sampling, *names)
    if work.decoded:
        texts = _decoded(pair, recipe, work.sampling, prompts, encoded, seed)
    else:
        batch_name = f"prompt {prompts[0].id}"
        if len(prompts) > 1:
            batch_name += f" and {len(prompts) - 1} more"
        with naming(batch_name):
            texts = generated_by_target(pair, encoded, recipe.tokens + BEYOND, work.sampling, seed)
    return [
        WrittenText(prompt, text, f"prompt {prompt.id}")
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _of_log(pair: ModelPair, logged: LoggedText) -> WrittenText:
    text = finished(pair, logged.tokens[: logged.start], logged.tokens[logged.start :])
    prompt = Prompt(logged.name, "", logged.kind, logged.source)
    return WrittenText(prompt, text, logged.origin)


def _decoded(
    pair: ModelPair,
    recipe: Recipe,
    sampling: Sampling,
    prompts: list[Prompt],
    encoded: list[list[int]],
    seed: int,
) -> list[GeneratedText]:
    """Texts of speculative decoding with random trees; the verifiers take turns."""
    texts = []
    for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        verifier = recipe.verifiers[number % len(recipe.verifiers)]
        text_seed = seed_of(seed, number)
        chooser = Random(recipe.behaviour, torch.Generator().manual_seed(text_seed))
        decoder = Decoder(pair, sampling, get_verifier(verifier), chooser)
        generator = torch.Generator(device=pair.device).manual_seed(text_seed + 1)
        with naming(f"prompt {prompt.id}"):
            decoded = decoder.decode(tokens, recipe.tokens + BEYOND, generator)
        texts.append(finished(pair, tokens, decoded.tokens, decoded.steps, verifier))
    return texts


@contextmanager
def naming(origin: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{origin}: {error}") from error
