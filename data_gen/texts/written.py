"""Texts that follow the target's law, and both models' rows along them.

A text may be written by speculative decoding (`decoding.Decoder`), by the target alone, many at a time, or by somebody
else's engine, whose log is read here. Labels along a text (`text_labels`) need nothing else.

Legend: B rows taken at once, V vocabulary, D hidden width.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from data_gen.decoding.decoder import Step
from data_gen.features.root import ModelRows
from data_gen.models.pair import CachedModel, ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import block_rows
from data_gen.texts.halving import fewer, halving
from data_gen.texts.prompts import Prompt
from selector.schema import InputError

UNLIKELY = 1e-3  # tokens of less probability are counted: a log of another model or setting has too many of them


@dataclass
class Text:
    """A prompt and its continuation, token ids. Only the continuation follows the target's law.

    Attributes:
        start: position of the last prompt token, the first root.
        ended: whether the last token is an end-of-sequence token.
        steps: the decoding steps that wrote it, where speculative decoding did.
    """

    tokens: list[int]
    start: int
    ended: bool = False
    steps: list[Step] = field(default_factory=list)


class RowBlock(NamedTuple):
    """Both models after some consecutive tokens of a text."""

    target: ModelRows
    draft: ModelRows

    @property
    def target_probs_BV(self) -> Tensor:
        return self.target.probs_NV

    @property
    def draft_probs_BV(self) -> Tensor:
        return self.draft.probs_NV


def seed_of(*parts: object) -> int:
    """A seed that follows from the parts alone: not from the worker, nor from the order of work."""
    digest = hashlib.sha256("|".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@torch.inference_mode()
def written_by_target(
    pair: ModelPair, prompts: Sequence[list[int]], new_tokens: int, sampling: Sampling, seed: int
) -> list[Text]:
    """Continue prompts with the target alone, all in one batch: the same law as speculative decoding, and faster.

    Where memory runs out, in several batches one after another.

    Args:
        seed: of the first batch; what a prompt is continued with depends on its batch.

    Raises:
        InputError: the target gives something else than finite numbers, or there is no memory for one text.
    """

    def attempt() -> list[Text]:
        together = fewer(len(prompts))
        parts = [prompts[begin : begin + together] for begin in range(0, len(prompts), together)]
        batches = [_written(pair, part, new_tokens, sampling, seed + number) for number, part in enumerate(parts)]
        return [text for batch in batches for text in batch]

    return halving(attempt)


def _written(
    pair: ModelPair, prompts: Sequence[list[int]], new_tokens: int, sampling: Sampling, seed: int
) -> list[Text]:
    """One batch."""
    width = max(map(len, prompts))
    pad = next(iter(pair.eos_ids), 0)
    input_ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=pair.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=pair.device)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        eos_token_id=sorted(pair.eos_ids) or None,
        pad_token_id=pad,
        **sampling.generation,
    )
    finite = _Finite()
    devices = [pair.device] if pair.device.type == "cuda" else []
    with without_own_settings(pair.target), torch.random.fork_rng(devices):
        torch.manual_seed(seed % 2**63)
        generate: Any = pair.target.generate
        output = generate(
            input_ids, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList([finite])
        )
    if not bool(finite.so_far):
        name = pair.target.name_or_path
        raise InputError(f"{name}: the model gives numbers that are not finite (NaN or infinity)")
    return [finished(pair, prompt, row) for prompt, row in zip(prompts, output[:, width:].tolist(), strict=True)]


class _Finite(LogitsProcessor):
    """Notes whether all logits are finite, without waiting for a GPU: to sample from NaN would be a crash."""

    def __init__(self) -> None:
        self.so_far: Tensor | bool = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.so_far = self.so_far & scores.amax(-1).isfinite().all()
        return scores.nan_to_num(nan=0.0, neginf=-torch.inf)


def finished(pair: ModelPair, prompt: Sequence[int], new: Sequence[int], steps: Sequence[Step] = ()) -> Text:
    """A text of a prompt and its continuation, which nothing belongs to after an end-of-sequence token."""
    end = next((n for n, token in enumerate(new, 1) if token in pair.eos_ids), None)
    return Text([*prompt, *new[:end]], len(prompt) - 1, end is not None, list(steps))


@torch.inference_mode()
def rows_along(pair: ModelPair, text: Text, sampling: Sampling) -> Iterator[RowBlock]:
    """One teacher-forced pass of each model, in blocks: the rows after the text's tokens from `start` on.

    Raises:
        InputError: a model gives something else than finite numbers.
    """
    models = CachedModel(pair.target), CachedModel(pair.draft)
    size = fewer(block_rows(pair.vocabulary))
    for model in models:
        if text.start > 0:
            model.fill(text.tokens[: text.start])
    for begin in range(text.start, len(text.tokens), size):
        target, draft = (model.extend(text.tokens[begin : begin + size]) for model in models)
        yield RowBlock(
            *(
                ModelRows(own.probabilities(each.logits_BWV[0]), each.logits_BWV[0], each.hidden_BWD[0])
                for each, own in ((target, sampling), (draft, sampling.draft))
            )
        )
    for model in models:
        model.check()


@dataclass(frozen=True)
class LoggedText:
    """One line of an engine's log: where it stands, its source and kind, and the sampling setting it was made under."""

    line: int
    prompt: Prompt
    prompt_tokens: list[int]
    completion: list[int]
    sampling: Sampling


def read_log(path: Path, pair: ModelPair, draft_temperature: float | None = None) -> list[LoggedText]:
    """An engine's texts: JSON lines with `prompt` and `completion`, each a text or a list of token ids, `temperature`,
    and optionally `top_p`, `top_k`, `min_p`, `kind`, `source` and `id`.

    Token ids are safer than text: a tokenizer need not give back the tokens that were sampled.

    Args:
        draft_temperature: of the draft, which the log says nothing of; the target's if None.

    Raises:
        InputError: the file is missing or empty, or a line does not fit; names the file and the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    texts = [
        _logged(path, number, line, pair, draft_temperature) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not texts:
        raise InputError(f"{path}: holds no texts")
    if len({text.prompt.id for text in texts}) < len(texts):
        raise InputError(f"{path}: two texts have the same id")
    return texts


def _logged(path: Path, number: int, line: bytes, pair: ModelPair, draft_temperature: float | None) -> LoggedText:
    where = f"{path}:{number}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not JSON") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object with `prompt` and `completion`")
    prompt, completion = (_token_ids(where, record, key, pair) for key in ("prompt", "completion"))
    sampling = _sampling(where, record, draft_temperature)
    identity = str(record.get("id", f"line-{number}"))
    kind, source = str(record.get("kind", "text")), str(record.get("source", identity))
    shown = record["prompt"] if isinstance(record["prompt"], str) else str(pair.tokenizer.decode(prompt))
    return LoggedText(
        number,
        Prompt(identity, shown, kind, source),
        prompt,
        completion,
        sampling,
    )


def _sampling(where: str, record: dict[str, Any], draft_temperature: float | None) -> Sampling:
    temperature, top_p = _number(where, record, "temperature", None), _number(where, record, "top_p", 1.0)
    top_k, min_p = _number(where, record, "top_k", 0), _number(where, record, "min_p", 0.0)
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0 or top_k % 1 or not 0 <= min_p <= 1:
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        shown = ", ".join(f"{key} {value:g}" for key, value in given.items())
        raise InputError(f"{where}: {shown} is no sampling setting")
    return Sampling(temperature, top_p, draft_temperature, int(top_k), min_p)


def _token_ids(where: str, record: dict[str, Any], key: str, pair: ModelPair) -> list[int]:
    value = record.get(key)
    if isinstance(value, str):
        value = pair.tokenizer(value, add_special_tokens=key == "prompt")["input_ids"]
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise InputError(f"{where}: `{key}` is neither a text nor a list of token ids, or is empty")
    if not all(0 <= token < pair.vocabulary for token in value):
        raise InputError(f"{where}: `{key}` holds a token id beyond the vocabulary of {pair.vocabulary}")
    return value


def _number(where: str, record: dict[str, Any], key: str, default: float | None) -> float:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise InputError(f"{where}: `{key}` is missing or no number")
    return float(value)


class ImpossibleToken(Exception):
    """A token of a text has probability 0 under the target.

    Attributes:
        position: in the text.
        at_a_tie: whether rounding explains it: the token's logit, or the mass before it, lies at the very edge of what
            may be sampled. Passes over one token, many tokens and many texts differ in their last digits.
    """

    def __init__(self, position: int, token: int, at_a_tie: bool) -> None:
        super().__init__(f"token {position} of the text ({token}) has probability 0 under the target")
        self.position, self.at_a_tie = position, at_a_tie


def next_tokens(text: Text, seen: int, count: int) -> tuple[int, list[int]]:
    """Of `count` rows after `seen` earlier ones from `start` on: the position of the first token that follows one, and
    these tokens; one fewer at the text's end."""
    begin = text.start + seen + 1
    return begin, text.tokens[begin : begin + count]


@dataclass
class Plausibility:
    """Whether texts may be the target's own: how many of their tokens were unlikely, and how many should have been."""

    tokens: int = 0
    unlikely: int = 0
    expected: float = 0.0

    def add(self, target: ModelRows, begin: int, following: Sequence[int], sampling: Sampling) -> None:
        """Some rows, and the tokens that follow them, the first at position `begin` of its text.

        Raises:
            ImpossibleToken: one has probability 0.
        """
        rows_BV = target.probs_NV[: len(following)]
        next_B1 = torch.tensor(following, dtype=torch.int64, device=rows_BV.device).unsqueeze(-1)
        own_B = rows_BV.gather(-1, next_B1)[:, 0]
        if bool((own_B <= 0).any()):
            at = int((own_B <= 0).nonzero()[0])
            token = following[at]
            raise ImpossibleToken(begin + at, token, _at_the_edge(target.logits_NV[at], token, sampling))
        self.tokens += len(following)
        self.unlikely += int((own_B < UNLIKELY).sum())
        self.expected += float((rows_BV * (rows_BV < UNLIKELY)).sum())

    def join(self, other: Plausibility) -> None:
        """Count another's texts, too."""
        self.tokens += other.tokens
        self.unlikely += other.unlikely
        self.expected += other.expected

    def __str__(self) -> str:
        share, expected = self.unlikely / max(1, self.tokens), self.expected / max(1, self.tokens)
        return f"{share:.2%} of the tokens had a probability below {UNLIKELY:g}; {expected:.2%} are to be expected"


def _at_the_edge(logits_V: Tensor, token: int, sampling: Sampling) -> bool:
    """Whether a token of probability 0 would be possible with logits that differ by rounding."""
    edge = 1e-3 if logits_V.dtype == torch.float32 else 32 * float(torch.finfo(logits_V.dtype).eps)
    logits_V = logits_V.double()
    if sampling.temperature == 0:
        return float(logits_V.max() - logits_V[token]) <= edge
    if sampling.cuts_nothing:
        return False  # nothing is cut off: the probability is too small for a number
    if sampling.top_k > 0:
        least = float(logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1])
        if logits_V[token] < least - edge:
            return False
        logits_V = logits_V.masked_fill(logits_V < least - edge, -torch.inf)
    probs_V = (logits_V / sampling.temperature).softmax(-1)
    before, own = float(probs_V[logits_V > logits_V[token]].sum()), float(probs_V[token])
    likely = own * math.exp(edge / sampling.temperature) >= sampling.min_p * float(probs_V.max())
    return before <= sampling.top_p + edge and likely and own > 0
