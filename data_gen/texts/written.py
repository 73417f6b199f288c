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

SPACE = ActionSpace.recorded()
DEPTH = SPACE.depth
BEYOND = DEPTH - 1  # tokens after the labelled ones; the last prompt token is a root, too
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
    # of decoded texts; one of these is drawn at every step
    behaviour: tuple[Action, ...] = BEHAVIOUR


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
    """`verifier` is None unless the text was decoded; error messages begin with `place`."""

    prompt: Prompt
    text: GeneratedText
    verifier: str | None
    place: str

    @property
    def roots(self) -> int:
        return max(0, len(self.text.tokens) - self.text.start - DEPTH)


def written(pair: ModelPair, recipe: Recipe, work: Work) -> Iterator[WrittenText]:
    for logged in work.logged:
        text = finished(pair, logged.tokens[: logged.start], logged.tokens[logged.start :])
        prompt = Prompt(logged.name, "", logged.kind, logged.source)
        yield WrittenText(prompt, text, None, logged.place)
    if not work.prompts:
        return
    new_tokens = recipe.tokens + BEYOND
    prompts = [prompt for prompt, _ in work.prompts]
    encoded = [recipe.form.encode(pair.tokenizer, prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise InputError(f"prompt {prompt.id}: the tokenizer gives no tokens")
    text_names = [f"{prompt.id}#{number}" for prompt, number in work.prompts]
    seed = seed_of(recipe.seed, work.split, work.sampling, *text_names)
    prompt_names = [f"prompt {prompt.id}" for prompt in prompts]
    if not work.decoded:
        batch_name = prompt_names[0]
        if len(prompts) > 1:
            batch_name += f" and {len(prompts) - 1} more"
        with naming(batch_name):
            texts = generated_by_target(pair, encoded, new_tokens, work.sampling, seed)
        for prompt, text, prompt_name in zip(prompts, texts, prompt_names, strict=True):
            yield WrittenText(prompt, text, None, prompt_name)
        return
    named_prompts = zip(prompts, encoded, prompt_names, strict=True)
    for number, (prompt, tokens, prompt_name) in enumerate(named_prompts):
        verifier = recipe.verifiers[number % len(recipe.verifiers)]
        text_seed = seed_of(seed, number)
        chooser = Random(recipe.behaviour, torch.Generator().manual_seed(text_seed))
        decoder = Decoder(pair, work.sampling, get_verifier(verifier), chooser)
        with naming(prompt_name):
            generator = torch.Generator(device=pair.device).manual_seed(text_seed + 1)
            decoded = decoder.decode(tokens, new_tokens, generator)
        text = finished(pair, tokens, decoded.tokens, decoded.steps)
        yield WrittenText(prompt, text, verifier, prompt_name)


@contextmanager
def naming(place: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
