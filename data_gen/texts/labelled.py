"""Trace rows: texts are sampled, or read from an engine's log; both models run over them;
entropies, probabilities and labels at every root are recorded.

The rows of a shard depend only on the pair, the recipe and the shard's work, so the order of shards
does not matter.

Whether a text may be the target's own is judged by its impossible and its unlikely tokens.

Legend: N consecutive tokens, D hidden width, B consecutive positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from data_gen import traces
from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Random
from data_gen.features.root import ROW_NUMBERS, row_numbers
from data_gen.models.distilled import said_by
from data_gen.models.pair import ModelPair, ModelRows
from data_gen.models.sampling import Sampling
from data_gen.text_labels.copies import lookup_lengths
from data_gen.text_labels.labels import TextLabeller, block_rows
from data_gen.texts.generated import (
    GeneratedText,
    fewer,
    finished,
    generated_by_target,
    halving,
    rows_along,
    seed_of,
)
from data_gen.texts.prompts import Form, Prompt, Record, check_ids, joined, read_lines
from data_gen.verification import get_verifier
from selector.actions import GREEDY, Action, ActionSpace
from selector.schema import HIDDEN_STATES, LOOKUP_COLUMN, InputError, survival_column

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
Given = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
)
# less probable tokens are counted: a text of another model or sampling setting has too many
UNLIKELY = 1e-3
# in float32 the logits of two forward passes that sum in different orders may differ by this much
SUMS = 1e-4
# of floating-point numbers at the best logit: rounding may move each of two logits by two
SPACINGS = 4
GPU_BLOCKS = 8  # of `block_rows` are labelled together on a GPU
PASSES = 4  # ties by which two forward passes may differ, where one is over a batch
FALSE_ALARMS = 1e-6  # the share of the target's own logs that are taken for foreign ones, at most


class ImpossibleToken(Exception):
    """A token of a text has probability 0 under the target. `at_a_tie` says whether rounding
    explains it: forward passes over one token, many tokens and many texts differ in their last
    digits."""

    def __init__(self, position: int, token: int, at_a_tie: bool) -> None:
        super().__init__(
            f"token {position} of the text ({token}) has probability 0 under the target"
        )
        self.position = position
        self.at_a_tie = at_a_tie


@dataclass
class Plausibility:
    """How many tokens of some texts were unlikely, and how many are expected to be.

    Under the target's own law, a token is unlikely with a probability m that its distribution
    gives. Let u be 1 for unlikely tokens and 0 for others. The products over all tokens of exp(u) /
    (1 + (exp(1) - 1) m) and of exp(-u) / (1 + (exp(-1) - 1) m) are martingales that begin with 1,
    however the texts depend on each other. By Ville's inequality each of them ever exceeds 2 /
    `FALSE_ALARMS` with a probability of `FALSE_ALARMS` / 2 at most. In the long run, the first one
    grows with 1.7 times as many unlikely tokens as expected, and the second one with 0.6 times as
    many.
    """

    tokens: int = 0
    unlikely: int = 0
    expected: float = 0.0
    log_many: float = 0.0  # logarithms of the products
    log_few: float = 0.0

    def add(
        self, target: ModelRows, begin: int, following: Sequence[int], sampling: Sampling
    ) -> None:
        """Add the tokens that follow `target`, from position `begin` of the text on;
        ImpossibleToken if one is."""
        rows_BV = target.probs_NV[: len(following)]
        next_B1 = torch.tensor(following, dtype=torch.int64, device=rows_BV.device).unsqueeze(-1)
        probs_B = rows_BV.gather(-1, next_B1)[:, 0]
        if bool((probs_B <= 0).any()):
            at = int((probs_B <= 0).nonzero()[0])
            edge = _at_the_edge(target.logits_NV[at], following[at], sampling)
            raise ImpossibleToken(begin + at, following[at], edge)
        mass_B = (rows_BV * (rows_BV < UNLIKELY)).sum(-1, dtype=torch.float64)
        unlikely = int((probs_B < UNLIKELY).sum())
        many = float((math.expm1(1) * mass_B).log1p().sum())
        few = float((math.expm1(-1) * mass_B).log1p().sum())
        self.join(
            Plausibility(
                tokens=len(following),
                unlikely=unlikely,
                expected=float(mass_B.sum()),
                log_many=unlikely - many,
                log_few=-unlikely - few,
            )
        )

    def join(self, other: Plausibility) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def is_foreign(self) -> bool:
        """Whether the target did not sample the texts; wrong for `FALSE_ALARMS` of its own logs at
        most."""
        return max(self.log_many, self.log_few) > math.log(2 / FALSE_ALARMS)

    def __str__(self) -> str:
        share = self.unlikely / max(1, self.tokens)
        expected = self.expected / max(1, self.tokens)
        return (
            f"{share:.2%} of the tokens had a probability below {UNLIKELY:g}; {expected:.2%} are "
            "to be expected"
        )


def tie(best: float, dtype: torch.dtype) -> float:
    """The largest difference of two logits that rounding explains, given the best logit and the
    dtype: 0.5 between 16 and 32 in bfloat16, whose numbers lie 0.125 apart there."""
    spacing = torch.finfo(dtype).eps * 2.0 ** (math.frexp(best)[1] - 1)
    return max(SUMS, SPACINGS * spacing)


def _at_the_edge(logits_V: Tensor, token: int, sampling: Sampling) -> bool:
    if logits_V.dtype == torch.float32:
        edge = 1e-3
    else:
        edge = 32 * float(torch.finfo(logits_V.dtype).eps)
    # a batch and a text alone differ at large logits; a GPU adds up bfloat16 in parts, which are
    # rounded, too
    edge = max(edge, PASSES * tie(float(logits_V.max()), logits_V.dtype))
    logits_V = logits_V.double()
    if sampling.temperature == 0:
        return float(logits_V.max() - logits_V[token]) <= edge
    if sampling.cuts_nothing:
        # no token is cut off, so the probability is below the smallest floating-point number
        return False
    if sampling.top_k > 0:
        least = float(logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1])
        if logits_V[token] < least - edge:
            return False
        logits_V = logits_V.masked_fill(logits_V < least - edge, -torch.inf)
    probs_V = (logits_V / sampling.temperature).softmax(-1)
    before = float(probs_V[logits_V > logits_V[token]].sum())
    probability = float(probs_V[token])
    most_probable = probability * math.exp(edge / sampling.temperature)
    likely = most_probable >= sampling.min_p * float(probs_V.max())
    return before <= sampling.top_p + edge and likely and probability > 0


class GivenRecord(Record):
    prompt: Given
    completion: Given
    temperature: float = Field(ge=0, lt=1e9)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)


@dataclass(frozen=True)
class GivenText:
    """A text and the setting that it was sampled under. Error messages about it begin with
    `place`."""

    prompt: Prompt
    prompt_tokens: list[int]
    completion: list[int]
    sampling: Sampling
    place: str


def read_log(path: Path, pair: ModelPair) -> list[GivenText]:
    """An engine's texts: JSON lines with `prompt` and `completion`, each a text or a list of token
    ids, `temperature`, and optionally `top_p`, `top_k`, `min_p`, `kind`, `source` and `id`;
    InputError as `read_lines`.

    Token ids are safer than text: a tokenizer need not give back the tokens that were sampled.
    """

    def token_ids(text_or_ids: str | list[int], begins: bool) -> list[int]:
        ids: Any = text_or_ids
        if isinstance(text_or_ids, str):
            ids = pair.tokenizer(text_or_ids, add_special_tokens=begins)["input_ids"]
        if not ids or max(ids) >= pair.vocabulary:
            raise ValueError(f"no tokens, or one beyond the vocabulary of {pair.vocabulary}")
        return list(ids)

    def parse(place: str, value: Any) -> GivenText:
        record = GivenRecord.model_validate(value)
        prompt_tokens = token_ids(record.prompt, begins=True)
        completion = token_ids(record.completion, begins=False)
        if isinstance(record.prompt, str):
            prompt_text = record.prompt
        else:
            prompt_text = str(pair.tokenizer.decode(prompt_tokens))
        sampling = Sampling(record.temperature, record.top_p, record.top_k, record.min_p)
        prompt = Prompt.of(record, prompt_text, place)
        return GivenText(prompt, prompt_tokens, completion, sampling, place)

    texts = read_lines(path, parse)
    check_ids(path, [text.prompt.id for text in texts])
    return texts


def apart(texts: list[GivenText]) -> tuple[list[GivenText], str]:
    """Texts that can be split by source, and a sentence on what was done for that, which may be
    empty.

    Sources with equal prompts become one. At temperature 0 a repeated text is left out; otherwise
    it is a second draw.
    """
    sources = joined((text.prompt.source, tuple(text.prompt_tokens)) for text in texts)
    kept: dict[Any, GivenText] = {}
    for text in texts:
        prompt = replace(text.prompt, source=sources[text.prompt.source])
        identity: Any = (tuple(text.prompt_tokens), tuple(text.completion), text.sampling)
        if text.sampling.temperature > 0:
            identity = text.place
        kept.setdefault(identity, replace(text, prompt=prompt))
    remarks = []
    repeated = len(texts) - len(kept)
    if repeated:
        remarks.append(f"greedy texts that are left out, because they are repeated: {repeated}")
    shared = len(sources) - len(set(sources.values()))
    if shared:
        remarks.append(
            f"sources that are joined to others, because they have prompts in common: {shared}"
        )
    return list(kept.values()), "; ".join(remarks)


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
    # the texts if an engine made them: `GivenText`, or `LoggedText` without a pair
    given: tuple[Any, ...] = ()


class _Sampled(NamedTuple):
    """`verifier` is None unless the text was decoded; error messages begin with `place`."""

    prompt: Prompt
    text: GeneratedText
    verifier: str | None
    place: str

    @property
    def roots(self) -> int:
        return max(0, len(self.text.tokens) - self.text.start - DEPTH)


@dataclass
class Shard:
    """The rows of a shard, and how plausible the texts are."""

    table: pa.Table
    plausibility: Plausibility


def make_shard(pair: ModelPair, recipe: Recipe, work: Work) -> Shard:
    """Make a shard. A text is cut before a token of target probability 0 if rounding explains that.
    InputError, which names the prompt or the log's line, for numbers that are not finite and a text
    that cannot be the target's."""
    plausibility = Plausibility()
    stride = recipe.stride if work.split == "train" else 1
    texts = list(_written(pair, recipe, work))
    columns: list[dict[str, Any]] = []
    while len(columns) < len(texts):
        with suppress(ImpossibleToken):  # texts were cut
            columns, plausibility = halving(
                lambda: _label(pair, recipe, texts, work.sampling, stride)
            )
    rows: list[dict[str, Any]] = []
    for sampled, labels in zip(texts, columns, strict=True):
        rows.append(_row(sampled, work, stride) | labels)
    schema = traces.text_schema(recipe.verifiers, recipe.hidden, SPACE)
    return Shard(traces.to_table(rows, schema), plausibility)


def _written(pair: ModelPair, recipe: Recipe, work: Work) -> Iterator[_Sampled]:
    for given_text in work.given:
        text = finished(pair, given_text.prompt_tokens, given_text.completion)
        yield _Sampled(given_text.prompt, text, None, given_text.place)
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
        with _naming(batch_name):
            texts = generated_by_target(pair, encoded, new_tokens, work.sampling, seed)
        for prompt, text, prompt_name in zip(prompts, texts, prompt_names, strict=True):
            yield _Sampled(prompt, text, None, prompt_name)
        return
    named_prompts = zip(prompts, encoded, prompt_names, strict=True)
    for number, (prompt, tokens, prompt_name) in enumerate(named_prompts):
        verifier = recipe.verifiers[number % len(recipe.verifiers)]
        text_seed = seed_of(seed, number)
        chooser = Random(recipe.behaviour, torch.Generator().manual_seed(text_seed))
        decoder = Decoder(pair, work.sampling, get_verifier(verifier), chooser)
        with _naming(prompt_name):
            generator = torch.Generator(device=pair.device).manual_seed(text_seed + 1)
            decoded = decoder.decode(tokens, new_tokens, generator)
        text = finished(pair, tokens, decoded.tokens, decoded.steps)
        yield _Sampled(prompt, text, verifier, prompt_name)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _row(sampled: _Sampled, work: Work, stride: int) -> dict[str, Any]:
    prompt = sampled.prompt
    text = sampled.text
    roots = sampled.roots
    steps = [step for step in text.steps if step.length - 1 - text.start < roots]
    return {
        "prompt": prompt.id,
        "kind": prompt.kind,
        "source": prompt.source,
        **asdict(work.sampling),
        "tokens": text.tokens,
        "start": text.start,
        "roots": roots,
        "hidden_stride": stride,
        "step_root": [step.length - 1 - text.start for step in steps],
        "step_action": [SPACE.index(step.action) for step in steps],
        "step_accepted": [step.accepted for step in steps],
        "step_verifier": sampled.verifier,
    }


@torch.inference_mode()
def _label(
    pair: ModelPair, recipe: Recipe, texts: Sequence[_Sampled], sampling: Sampling, stride: int
) -> tuple[list[dict[str, Any]], Plausibility]:
    """Trace columns of some texts, and how plausible the texts are; ImpossibleToken where one was
    cut. They are labelled as one text, because a GPU takes as long for few roots as for many. No
    root looks ahead beyond its own text, so the distributions after last tokens are left out."""
    plausibility = Plausibility()
    names = [survival_column(name) for name in recipe.verifiers]
    empty = (*ROW_NUMBERS, LOOKUP_COLUMN, *names, *HIDDEN_STATES)
    columns: list[dict[str, Any]] = [dict.fromkeys(empty, ()) for _ in texts]
    rooted: list[tuple[_Sampled, dict[str, Any]]] = []
    for sampled, text_columns in zip(texts, columns, strict=True):
        if sampled.roots > 0:
            rooted.append((sampled, text_columns))
    if not rooted:
        return columns, plausibility
    labeller = _labeller(pair, recipe, [sampled for sampled, _ in rooted])
    rows_at_once = fewer(block_rows(pair.vocabulary))
    if pair.device.type == "cuda":
        rows_at_once *= GPU_BLOCKS
    waiting = _Waiting(labeller, rows_at_once)
    cut: ImpossibleToken | None = None
    for sampled, text_columns in rooted:
        blocks = _blocks(pair, sampled, sampling, plausibility)
        try:
            if cut is None:
                text_columns |= _recorded(blocks, sampled, recipe, stride, waiting)
            else:  # the other texts are only searched for such tokens
                for _ in blocks:
                    pass
        except ImpossibleToken as impossible:
            cut = impossible
    if cut is not None:
        raise cut
    waiting.flush()
    survivals_vRS = labeller.survivals().cpu()
    first = 0
    for sampled, text_columns in rooted:
        text_survivals = survivals_vRS[:, first : first + sampled.roots]
        text_columns |= dict(zip(names, text_survivals, strict=True))
        first += sampled.roots + DEPTH - 1
    return columns, plausibility


def _labeller(pair: ModelPair, recipe: Recipe, texts: Sequence[_Sampled]) -> TextLabeller:
    """The labeller of some texts as one."""
    following: list[int] = []
    for sampled in texts:
        following += sampled.text.tokens[sampled.text.start + 1 :]
    generator = torch.Generator().manual_seed(seed_of(recipe.seed, "siblings", *following))
    # the labeller does not read the first one
    tokens_T = torch.tensor([0, *following], device=pair.device)
    return TextLabeller(
        tokens_T, recipe.verifiers, recipe.siblings, generator, SPACE, said_by(pair.draft)
    )


class _Waiting:
    """Distributions that wait until a labeller can take many of them at once."""

    def __init__(self, labeller: TextLabeller, rows_at_once: int) -> None:
        self._labeller = labeller
        self._rows_at_once = rows_at_once
        self._blocks: list[list[Tensor]] = []  # probabilities and logits

    def add(self, target: ModelRows, draft: ModelRows, count: int) -> None:
        """Add the first `count` rows."""
        rows_waiting = sum(len(rows[0]) for rows in self._blocks)
        if self._blocks and rows_waiting + count > self._rows_at_once:
            self.flush()
        rows = (target.probs_NV, draft.probs_NV, draft.logits_NV)
        self._blocks.append([rows_NV[:count] for rows_NV in rows])

    def flush(self) -> None:
        self._labeller.add(*map(torch.cat, zip(*self._blocks, strict=True)))
        self._blocks = []


def _recorded(
    blocks: Iterator[tuple[tuple[ModelRows, ModelRows], list[int]]],
    sampled: _Sampled,
    recipe: Recipe,
    stride: int,
    waiting: _Waiting,
) -> dict[str, Any]:
    """The columns of a text but for its survivals, for which its distributions wait."""
    numbers: dict[str, list[float]] = {name: [] for name in ROW_NUMBERS}
    hidden: list[tuple[Tensor, Tensor]] = []
    for (target, draft), following in blocks:
        for name, values in row_numbers(target, draft, following).items():
            numbers[name] += values
        waiting.add(target, draft, len(following))
        if recipe.hidden:
            hidden.append((target.hidden_ND.half().cpu(), draft.hidden_ND.half().cpu()))
    text = sampled.text
    roots = sampled.roots
    columns: dict[str, Any] = {name: values[:roots] for name, values in numbers.items()}
    columns[LOOKUP_COLUMN] = lookup_lengths(text.tokens, text.start, roots, DEPTH)
    if recipe.hidden:
        target_ND = torch.cat([target_BD for target_BD, _ in hidden])
        draft_ND = torch.cat([draft_BD for _, draft_BD in hidden])
        at = torch.arange(1, roots, stride)
        states = (target_ND[at - 1], draft_ND[at - 1], draft_ND[at])
        columns |= dict(zip(HIDDEN_STATES, states, strict=True))
    return columns


def _blocks(
    pair: ModelPair, sampled: _Sampled, sampling: Sampling, seen: Plausibility
) -> Iterator[tuple[tuple[ModelRows, ModelRows], list[int]]]:
    """Both models' outputs along a text, with the tokens that follow, which are added to `seen`.
    Before a token of probability 0, the text is cut, and ImpossibleToken raised, if rounding
    explains that; InputError if not."""
    text = sampled.text
    begin = text.start + 1
    with _naming(sampled.place):
        for block in rows_along(pair, text, sampling):
            following = text.tokens[begin : begin + len(block.target.probs_NV)]
            try:
                seen.add(block.target, begin, following, sampling)
            except ImpossibleToken as impossible:
                if not impossible.at_a_tie:
                    raise InputError(
                        f"{impossible}: the text is not the target's own under {sampling}"
                    ) from impossible
                text.tokens = text.tokens[: impossible.position]
                raise
            yield block, following
            begin += len(following)
