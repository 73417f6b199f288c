"""The texts on which a draft is trained: sequences sampled from the target, with what its
next-token distributions are computed from; and its answers to held-out prompts. Each file is a
safetensors file.

The texts begin as those that the run decodes. In a chat template a sequence is a conversation. The
target samples the user's first turn, from nothing or from the first few tokens of a training
prompt, then an answer, the user's next turn, and so on to the end (Magpie, arXiv 2406.08464).
Without a template it writes texts one after the other. Whole prompts are not used: a draft that has
learned their answers drafts better there than elsewhere, and a selector trained on them would draft
too much.

Legend: B, X sequences, T tokens of a sequence, V vocabulary, R tokens that the draft scores, D
    hidden width.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.utils.data import Dataset
from transformers import PreTrainedModel, StaticCache

from data_gen.models.checkpoints import eos_ids
from data_gen.models.distilled import output_bias
from data_gen.texts.generated import seed_of
from data_gen.texts.prompts import LONG, Prompt, Turns
from pipelines.config import Config
from pipelines.pair.stage import form_of, kept_prompts
from pipelines.run import Parts
from pipelines.terminal import ticking
from selector.schema import InputError

HELD_OUT = "held_out.safetensors"
# of answers, by sequence in turn; a user's turn is sampled at 1
TEMPERATURES = (1.0, 0.6, 1.0, 0.3, 0.8)
BEGUN = 0.75  # share of conversations that begin with tokens of a prompt
FEW = 4  # how many of these at most
LONGEST_TURN = 96  # tokens of a user's turn that the target samples
# the largest distance of logits from a linear map, as a share of their standard deviation
LINEAR = 0.05


class Start(NamedTuple):
    tokens: list[int]
    answers: bool  # whether the target then answers, or continues the user's turn
    temperature: float


class Sampled(NamedTuple):
    """Sequences that are sampled together; without the axis B, one sequence."""

    tokens_BT: Tensor  # int32
    drawn_BT: Tensor  # whether the target sampled the token, bool
    hidden_BTD: Tensor  # the input of the output layer at each token, bfloat16
    log_total_BT: Tensor  # the logsumexp of the logits there, float32

    @property
    def counted_BT(self) -> Tensor:
        """The positions whose next token was sampled, and not given by a prompt or the template,
        bool."""
        return pad(self.drawn_BT[..., 1:], (0, 1))


def starts(turns: Turns, prompts: Sequence[list[int]], chance: random.Random) -> Iterator[Start]:
    """Beginnings of texts, without end. `prompts` are token ids without those of `turns`."""
    temperatures = cycle(TEMPERATURES)
    answers = not turns.to_answer
    while True:
        for prompt in chance.sample(prompts, len(prompts)):
            few = 0
            if answers or chance.random() < BEGUN:
                most = max(1, min(len(prompt) // 2, FEW))
                few = chance.randint(1, most)
            yield Start([*turns.opening, *prompt[:few]], answers, next(temperatures))


@torch.inference_mode()
def write(
    target: PreTrainedModel,
    turns: Turns,
    begun: Sequence[Start],
    further: Iterator[Start],
    length: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Sampled:
    """Sample sequences of `length` tokens, all at once; `tick` is called after each of them. Where
    the target ends a turn that no other follows, the sequence continues with the next of the
    `further` beginnings. InputError where the target's logits are not a linear map of its last
    hidden state, or not finite."""
    table = target.get_output_embeddings()
    width = target.config.get_text_config().hidden_size
    # another kind would be copied at every token
    cache = StaticCache(target.config, max_cache_len=length)
    generator = torch.Generator(device=target.device).manual_seed(seed)
    ends = eos_ids(target)
    rows = [
        _GrowingSequence(
            turns, further, ends, deque(start.tokens), start.answers, start.temperature
        )
        for start in begun
    ]
    shape = (len(rows), length)
    tokens_BT = torch.zeros(shape, dtype=torch.int32)
    drawn_BT = torch.zeros(shape, dtype=torch.bool)
    hidden_BTD = torch.empty(*shape, width, dtype=torch.bfloat16)
    log_total_BT = torch.empty(shape)
    captured: list[Tensor] = []
    with table.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0])):
        drawn_B = torch.zeros(len(rows), dtype=torch.int64)
        for t in range(length):
            taken = [row.take(drawn) for row, drawn in zip(rows, drawn_B.tolist(), strict=True)]
            tokens_BT[:, t], drawn_BT[:, t] = torch.tensor(taken).unbind(-1)
            ids_B1 = tokens_BT[:, t : t + 1].long().to(target.device)
            positions_B1 = torch.full((len(rows), 1), t).to(target.device)
            output = target(
                ids_B1, past_key_values=cache, use_cache=True, position_ids=positions_B1
            )
            logits_BV = output.logits[:, -1].float()
            hidden_BD = captured.pop()[:, -1]
            if t == 0:
                _check_linear(target, logits_BV, hidden_BD)
            hidden_BTD[:, t] = hidden_BD.cpu()
            log_total_BT[:, t] = logits_BV.logsumexp(-1).cpu()
            temperatures = [[row.temperature] for row in rows]
            temperatures_B1 = torch.tensor(temperatures, device=target.device)
            probabilities_BV = logits_BV.div_(temperatures_B1).softmax(-1)
            drawn_B = probabilities_BV.multinomial(1, generator=generator)[:, 0].cpu()
            tick()
    if not log_total_BT.isfinite().all():
        raise InputError(
            f"{target.name_or_path}: the model gives numbers that are not finite (NaN or infinity)"
        )
    return Sampled(tokens_BT, drawn_BT, hidden_BTD, log_total_BT)


def _check_linear(target: PreTrainedModel, logits_BV: Tensor, hidden_BD: Tensor) -> None:
    table = target.get_output_embeddings()
    mapped_BV = linear(hidden_BD, table.weight, output_bias(table)).float()
    distance = (mapped_BV - logits_BV).abs().amax()
    if distance > LINEAR * logits_BV.std():
        raise InputError(
            f"{target.name_or_path}: its logits are no linear map of the last hidden state: no "
            "draft"
        )


@dataclass
class _GrowingSequence:
    turns: Turns
    further: Iterator[Start]
    ends: frozenset[int]
    pending: deque[int]  # tokens that are not sampled
    answers: bool
    answer_temperature: float
    turn_length: int = 0  # sampled tokens

    @property
    def temperature(self) -> float:
        return self.answer_temperature if self.answers else 1.0

    def take(self, drawn: int) -> tuple[int, bool]:
        """The next token, and whether it is the sampled one `drawn`; where a token is given, it is
        not."""
        if self.pending:
            return self.pending.popleft(), False
        self.turn_length += 1
        between = self.turns.to_user if self.answers else self.turns.to_answer
        is_too_long = not self.answers and self.turn_length > LONGEST_TURN
        if not (drawn in self.ends or drawn in between[:1] or is_too_long):
            return drawn, True
        self.turn_length = 0
        if not between:
            start = next(self.further)
            self.answers = start.answers
            self.pending.extend(start.tokens)
            return drawn, True
        self.answers = not self.answers
        end, *rest = between
        self.pending.extend(rest)
        return end, drawn == end


def sequence_count(config: Config) -> int:
    return max(1, round(config.distil.tokens / config.distil.context))


def write_texts(config: Config, texts: Parts, target: PreTrainedModel, tokenizer: Any) -> None:
    """Sample and store the texts that are missing, and answers to the validation prompts at
    temperature 1."""
    settings = config.distil
    turns = form_of(config).turns(tokenizer)
    beginnings = _beginnings(config, tokenizer)
    answers = [Start(ids, True, 1.0) for ids in _held_out_prompts(config, tokenizer).values()]

    def write_part(part: object, turns: Turns, first: list[Start], count: int, path: Path) -> None:
        seed = seed_of(config.seed, "distil", part)
        further = chain(first, starts(turns, beginnings, random.Random(seed)))
        begun = list(islice(further, count))
        save(write(target, turns, begun, further, settings.context, seed, tick), path)

    writers: dict[str, Callable[[Path], None]] = {}
    sequences = range(sequence_count(config))
    for number, begin in enumerate(sequences[:: settings.batch]):
        count = len(sequences[begin : begin + settings.batch])
        writers[f"{number:05}.safetensors"] = partial(write_part, number, turns, [], count)
    # as where a run decodes, only the target's own end of a text ends an answer
    alone = turns._replace(to_user=[])
    writers[HELD_OUT] = partial(write_part, "held out", alone, answers, len(answers))
    done = sum((texts.folder / name).exists() for name in writers)
    passes = settings.context * len(writers)
    with ticking("sampling texts", passes, settings.context * done) as tick:
        for name, write_file in writers.items():
            texts.file(name, write_file)


def held_out(
    config: Config, folder: Path, tokenizer: Any, ends: frozenset[int]
) -> tuple[Sequences, Tensor, list[str]]:
    """The sequences with held-out answers; which of their tokens belong to the answer, bool [X, T],
    up to the first one in `ends`; and the kinds of the prompts."""
    data = Sequences([folder / HELD_OUT])
    answers_XT = torch.zeros_like(data.drawn_BT)
    prompts = _held_out_prompts(config, tokenizer)
    for number, ids in enumerate(prompts.values()):
        tokens = data.tokens_BT[number, len(ids) :].tolist()
        up_to_ends = (length for length, token in enumerate(tokens, 1) if token in ends)
        length = min(up_to_ends, default=len(tokens))
        answers_XT[number, len(ids) : len(ids) + length] = True
    return data, answers_XT, [prompt.kind for prompt in prompts]


def _beginnings(config: Config, tokenizer: Any) -> list[list[int]]:
    """The first tokens of the training prompts' own texts."""
    prompts = kept_prompts(config, tokenizer, "train")
    texts = [prompt.text[: LONG * FEW] for prompt in prompts]
    return [ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] if ids]


def _held_out_prompts(config: Config, tokenizer: Any) -> dict[Prompt, list[int]]:
    """The validation prompts that leave room for an answer, and their tokens as a run decodes
    them."""
    form = form_of(config)
    longest = config.distil.context - config.distil.context // 4
    ids_by_prompt = {}
    for prompt in kept_prompts(config, tokenizer, "validation"):
        ids = form.encode(tokenizer, prompt)
        if len(ids) <= longest:
            ids_by_prompt[prompt] = ids
    if not ids_by_prompt:
        raise InputError(
            f"distil.context={config.distil.context}: no validation prompt leaves room for an "
            "answer"
        )
    return ids_by_prompt


def save(written: Sampled, path: Path) -> None:
    save_file(written._asdict(), path)


class Sequences(Dataset[Sampled]):
    """The sequences of some files. Hidden states are read on demand, the rest is kept in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        tokens: list[Tensor] = []
        drawn: list[Tensor] = []
        log_totals: list[Tensor] = []
        self._places: list[tuple[Any, int]] = []  # file and row of each sequence
        for path in paths:
            file: Any = safe_open(path, "pt")
            tokens.append(file.get_tensor("tokens_BT"))
            drawn.append(file.get_tensor("drawn_BT"))
            log_totals.append(file.get_tensor("log_total_BT"))
            self._places += [(file, row) for row in range(len(tokens[-1]))]
        self.tokens_BT = torch.cat(tokens)
        self.drawn_BT = torch.cat(drawn)
        self._log_total_BT = torch.cat(log_totals)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Sampled:
        file, row = self._places[index]
        hidden_TD = file.get_slice("hidden_BTD")[row]
        return Sampled(
            self.tokens_BT[index], self.drawn_BT[index], hidden_TD, self._log_total_BT[index]
        )

    def most_frequent(self, count: int, vocabulary: int, always: Sequence[int]) -> Tensor:
        """The `count` tokens that the target sampled most often, int64 [R], ascending; all if 0.
        Those in `always` are among them, and ties go to the smaller ids."""
        if not 0 < count < vocabulary:
            return torch.arange(vocabulary)
        counts_V = torch.bincount(self.tokens_BT[self.drawn_BT].long(), minlength=vocabulary)
        counts_V[list(always)] = counts_V.sum() + 1
        return counts_V.argsort(descending=True, stable=True)[:count].sort().values
