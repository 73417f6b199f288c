"""Trace rows: texts are written, both models pass over them, and numbers of their rows and labels are recorded.

The rows of a shard depend only on the pair, the recipe and the shard's work, so the order of shards does not matter.

Legend: V vocabulary, N consecutive tokens, D hidden width, R roots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from data_gen import traces
from data_gen.decoding import EAGER, decoder_for
from data_gen.decoding.loop import Random
from data_gen.features.rows import ROW_NUMBERS, foretold, row_numbers
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import TextLabeller
from data_gen.texts.given import GivenText
from data_gen.texts.plausibility import ImpossibleToken, Plausibility
from data_gen.texts.prompts import Form, Prompt
from data_gen.texts.written import WrittenText, finished, halving, rows_along, seed_of, written_by_target
from data_gen.verification import get_verifier
from selector.actions import GREEDY, Action, ActionSpace
from selector.schema import HIDDEN_STATES, LOOKUP_COLUMN, InputError, survival_column

SPACE = ActionSpace.recorded()
DEPTH = SPACE.depth
BEYOND = DEPTH - 1  # tokens after the labelled ones; the last prompt token is a root, too
PARTS = ("written", "decoded", "labelled")  # of a run's time
BEHAVIOUR: tuple[Action, ...] = (
    *(Action(*shape) for shape in ((1, 4, 0), (1, 8, 0), (1, 12, 0), (2, 2, 4), (3, 1, 5), (4, 4, 4))),
    *(Action(*shape, GREEDY) for shape in ((2, 0, 6), (2, 4, 4), (3, 2, 4), (4, 0, 4))),
)


@dataclass(frozen=True)
class Recipe:
    """How texts are written and labelled."""

    verifiers: tuple[str, ...]  # their labels are recorded, and they write the decoded texts
    form: Form
    tokens: int  # labelled tokens of each text
    siblings: int  # draws of the siblings over which labels are averaged
    stride: int  # hidden states are recorded at every `stride`-th root of a training text
    hidden: bool  # whether hidden states are recorded
    seed: int
    behaviour: tuple[Action, ...] = BEHAVIOUR  # of decoded texts; one of these is drawn at every step


@dataclass(frozen=True)
class Work:
    """A shard to make: texts of one split under one sampling setting."""

    split: str
    sampling: Sampling
    prompts: tuple[tuple[Prompt, int], ...]  # with the texts' numbers, because a prompt may be continued several times
    decoded: bool = False  # whether speculative decoding writes the texts
    given: tuple[GivenText, ...] = ()  # the texts, if an engine wrote them


class _Written(NamedTuple):
    """`verifier` is None unless the text was decoded; error messages begin with `place`."""

    prompt: Prompt
    text: WrittenText
    verifier: str | None
    place: str


@dataclass
class Shard:
    """The rows of a shard, the seconds that they took by part of `PARTS`, and how plausible the texts are."""

    table: pa.Table
    seconds: dict[str, float]
    plausibility: Plausibility


def make_shard(pair: ModelPair, recipe: Recipe, work: Work) -> Shard:
    """Make a shard; InputError where a model gives numbers that are not finite, or a given text cannot be the target's,
    which names the prompt, or the log and its line."""
    start, plausibility = time.perf_counter(), Plausibility()
    texts = list(_written(pair, recipe, work))
    between = time.perf_counter()
    rows = [_row(pair, recipe, work, written, plausibility) for written in texts]
    seconds = dict.fromkeys(PARTS, 0.0) | {"labelled": time.perf_counter() - between}
    seconds["decoded" if work.decoded else "written"] = between - start
    schema = traces.text_schema(recipe.verifiers, recipe.hidden, pair.trees)
    return Shard(traces.to_table(rows, schema), seconds, plausibility)


def _written(pair: ModelPair, recipe: Recipe, work: Work) -> Iterator[_Written]:
    for given in work.given:
        yield _Written(given.prompt, finished(pair, given.prompt_tokens, given.completion), None, given.place)
    if not work.prompts:
        return
    new = recipe.tokens + BEYOND
    prompts = [prompt for prompt, _ in work.prompts]
    encoded = [recipe.form.encode(pair.tokenizer, prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise InputError(f"prompt {prompt.id}: the tokenizer gives no tokens")
    seed = seed_of(recipe.seed, work.split, work.sampling, *(f"{prompt.id}#{n}" for prompt, n in work.prompts))
    places = [f"prompt {prompt.id}" for prompt in prompts]
    if not work.decoded:
        with _naming(places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"):
            texts = written_by_target(pair, encoded, new, work.sampling, seed)
        yield from map(_Written, prompts, texts, repeat(None), places)
        return
    behaviour = [
        action
        for action in recipe.behaviour
        if pair.trees.max_K >= action.K and (pair.decoder == EAGER or not action.distinct)
    ]
    for number, (prompt, tokens, place) in enumerate(zip(prompts, encoded, places, strict=True)):
        verifier, own = recipe.verifiers[number % len(recipe.verifiers)], seed_of(seed, number)
        chooser = Random(behaviour, torch.Generator().manual_seed(own))
        decoder = decoder_for(pair, work.sampling, get_verifier(verifier), chooser, len(tokens) + new)
        with _naming(place):
            decoded = decoder.decode(tokens, new, torch.Generator(device=pair.device).manual_seed(own + 1))
        yield _Written(prompt, finished(pair, tokens, decoded.tokens, decoded.steps), verifier, place)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _row(pair: ModelPair, recipe: Recipe, work: Work, written: _Written, seen: Plausibility) -> dict[str, Any]:
    prompt, text, stride = written.prompt, written.text, recipe.stride if work.split == "train" else 1
    with _naming(written.place):
        labelled = label(pair, recipe, text, work.sampling, seen, stride)
    roots = max(0, len(text.tokens) - text.start - DEPTH)
    steps = [step for step in text.steps if step.length - 1 - text.start < roots]
    return {
        "prompt": prompt.id,
        "kind": prompt.kind,
        "source": prompt.source,
        **asdict(work.sampling),
        "tokens": text.tokens,
        "start": text.start,
        "roots": roots,
        **labelled,
        "hidden_stride": stride,
        "step_root": [step.length - 1 - text.start for step in steps],
        "step_action": [pair.trees.index(step.action) for step in steps],
        "step_accepted": [step.accepted for step in steps],
        "step_verifier": written.verifier,
    }


def label(
    pair: ModelPair, recipe: Recipe, text: WrittenText, sampling: Sampling, seen: Plausibility, stride: int = 1
) -> dict[str, Any]:
    """Trace columns of both models' rows along a text and of its labels, with hidden states at every `stride`-th root.
    The text's tokens are added to `seen`. The text is cut before a token to which the target's pass gives probability 0
    if rounding explains that; InputError if not."""
    while True:
        try:
            columns, own = halving(lambda: _label(pair, recipe, text, sampling, stride))
        except ImpossibleToken as impossible:
            if not impossible.at_a_tie:
                raise InputError(f"{impossible}: the text is not the target's own under {sampling}") from impossible
            text.tokens = text.tokens[: impossible.position]
        else:
            seen.join(own)
            return columns


@torch.inference_mode()
def _label(
    pair: ModelPair, recipe: Recipe, text: WrittenText, sampling: Sampling, stride: int
) -> tuple[dict[str, Any], Plausibility]:
    seen, roots = Plausibility(), len(text.tokens) - text.start - DEPTH
    columns = [survival_column(name) for name in recipe.verifiers]
    if roots < 1:
        return dict.fromkeys((*ROW_NUMBERS, LOOKUP_COLUMN, *columns, *HIDDEN_STATES), ()), seen
    own = text.tokens[text.start :]
    generator = torch.Generator().manual_seed(seed_of(recipe.seed, "siblings", *own))
    tokens_T = torch.tensor(own, device=pair.device)
    labeller = TextLabeller(tokens_T, recipe.verifiers, recipe.siblings, generator, pair.trees)
    numbers: dict[str, list[float]] = {name: [] for name in ROW_NUMBERS}
    hidden: list[tuple[Tensor, Tensor]] = []
    for block in rows_along(pair, text, sampling):
        begin = text.start + len(numbers["target_entropy"]) + 1
        following = text.tokens[begin : begin + len(block.target.probs_NV)]
        seen.add(block.target, begin, following, sampling)
        for name, values in row_numbers(block.target, block.draft, following).items():
            numbers[name] += values
        labeller.add(block.target.probs_NV, block.draft.probs_NV, block.draft.logits_NV, block.ahead_BD)
        if recipe.hidden:
            hidden.append((block.target.hidden_ND.half().cpu(), block.draft.hidden_ND.half().cpu()))
    result: dict[str, Any] = {name: values[:roots] for name, values in numbers.items()}
    result[LOOKUP_COLUMN] = foretold(text.tokens, text.start, roots, DEPTH)
    result |= dict(zip(columns, labeller.survivals().cpu(), strict=True))
    if recipe.hidden:
        target_ND, draft_ND = (torch.cat(parts) for parts in zip(*hidden, strict=True))
        at = torch.arange(1, roots, stride)
        result |= dict(zip(HIDDEN_STATES, (target_ND[at - 1], draft_ND[at - 1], draft_ND[at]), strict=True))
    return result, seen
