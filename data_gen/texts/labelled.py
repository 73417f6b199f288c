"""Trace rows: both models run over texts; entropies, probabilities and labels at every root are
recorded.

The rows of a shard depend only on the pair, the recipe and the shard's work, so the order of shards
does not matter.

Legend: N consecutive tokens, D hidden width, B consecutive positions, V vocabulary, v verifiers,
    R roots, S survivals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from data_gen import traces
from data_gen.drafting.ranked import ranks_of
from data_gen.features.root import ROW_NUMBERS, row_numbers
from data_gen.models.distilled import draft_vocabulary
from data_gen.models.pair import ModelPair
from data_gen.models.rows import ModelRows
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import TextLabeller, block_rows
from data_gen.texts.generated import RowBlock, fewer, halving, rows_along, seed_of
from data_gen.texts.possible import ImpossibleToken, check_possible
from data_gen.texts.written import DEPTH, Recipe, Work, WrittenText, naming, written
from selector.actions import MOST_DEPTH
from selector.schema import HIDDEN_STATES, RANK_COLUMN, InputError, survival_column

GPU_BLOCKS = 8  # of `block_rows` are labelled together on a GPU


def make_shard(pair: ModelPair, recipe: Recipe, work: Work) -> pa.Table:
    """The rows of a shard. A text is cut before a token of target probability 0 if rounding
    explains that. InputError, which names the prompt or the log's line, for numbers that are not
    finite and a text that cannot be the target's."""
    texts = written(pair, recipe, work)
    stride = recipe.stride if work.split == "train" else 1
    columns: list[dict[str, Any]] = []
    while len(columns) < len(texts):
        with suppress(ImpossibleToken):  # texts were cut
            columns = halving(lambda: _label(pair, recipe, texts, work.sampling, stride))
    rows = []
    for text, labels in zip(texts, columns, strict=True):
        rows.append(_row(text, recipe, work.sampling, stride) | labels)
    return traces.to_table(rows, traces.text_schema(recipe.verifiers, recipe.hidden, recipe.space))


def _row(
    written_text: WrittenText, recipe: Recipe, sampling: Sampling, stride: int
) -> dict[str, Any]:
    """What a row holds without the models' numbers."""
    prompt = written_text.prompt
    text = written_text.text
    roots = written_text.roots
    row = traces.text_row(
        prompt.id, prompt.source, prompt.kind, sampling, text.tokens, text.start, roots, DEPTH
    )
    row["hidden_stride"] = stride
    steps = [step for step in text.steps if step.length - 1 - text.start < roots]
    row["step_root"] = [step.length - 1 - text.start for step in steps]
    row["step_action"] = [recipe.space.index(step.action) for step in steps]
    row["step_accepted"] = [step.accepted for step in steps]
    row["step_verifier"] = text.verifier
    return row


@torch.inference_mode()
def _label(
    pair: ModelPair, recipe: Recipe, texts: Sequence[WrittenText], sampling: Sampling, stride: int
) -> list[dict[str, Any]]:
    """The models' columns of some texts; ImpossibleToken where one was cut. They are labelled as
    one text, because a GPU takes as long for few roots as for many. No root looks ahead beyond its
    own text, so the distributions after last tokens are left out."""
    names = [survival_column(name) for name in recipe.verifiers]
    columns: list[dict[str, Any]] = []
    for _ in texts:
        columns.append(dict.fromkeys((*ROW_NUMBERS, *names, *HIDDEN_STATES), ()))
    rooted = [number for number, text in enumerate(texts) if text.roots > 0]
    if not rooted:
        return columns
    labeller = _labeller(pair, recipe, [texts[number] for number in rooted])
    rows_at_once = fewer(block_rows(pair.vocabulary))
    if pair.device.type == "cuda":
        rows_at_once *= GPU_BLOCKS
    waiting = _Waiting(labeller, rows_at_once)
    cut: ImpossibleToken | None = None
    for number in rooted:
        blocks = _blocks(pair, texts[number], sampling)
        try:
            if cut is None:
                columns[number] |= _recorded(blocks, texts[number], recipe, stride, waiting)
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
    for number in rooted:
        roots = texts[number].roots
        text_survivals_vRS = survivals_vRS[:, first : first + roots]
        columns[number] |= dict(zip(names, text_survivals_vRS, strict=True))
        first += roots + DEPTH - 1
    return columns


def _labeller(pair: ModelPair, recipe: Recipe, texts: Sequence[WrittenText]) -> TextLabeller:
    """The labeller of some texts as one."""
    following: list[int] = []
    for written_text in texts:
        following += written_text.text.tokens[written_text.text.start + 1 :]
    generator = torch.Generator().manual_seed(seed_of(recipe.seed, "siblings", *following))
    # the labeller does not read the first one
    tokens_T = torch.tensor([0, *following], device=pair.device)
    vocabulary_S = draft_vocabulary(pair.draft)
    return TextLabeller(
        tokens_T, recipe.verifiers, recipe.siblings, generator, recipe.space, vocabulary_S
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
    blocks: Iterator[tuple[RowBlock, list[int]]],
    written_text: WrittenText,
    recipe: Recipe,
    stride: int,
    waiting: _Waiting,
) -> dict[str, Any]:
    """The models' columns of a text but for its survivals, for which its distributions wait."""
    numbers: dict[str, list[float]] = {name: [] for name in ROW_NUMBERS}
    ranks: list[int] = []
    hidden: list[tuple[Tensor, Tensor]] = []
    for (target, draft), following in blocks:
        for name, values in row_numbers(target, draft, following).items():
            numbers[name] += values
        ranks += ranks_of(draft.logits_NV, following)
        waiting.add(target, draft, len(following))
        if recipe.hidden:
            hidden.append((target.hidden_ND.half().cpu(), draft.hidden_ND.half().cpu()))
    roots = written_text.roots
    columns: dict[str, Any] = {name: values[:roots] for name, values in numbers.items()}
    columns[RANK_COLUMN] = ranks[: roots + MOST_DEPTH - 1]
    if recipe.hidden:
        target_ND = torch.cat([target_BD for target_BD, _ in hidden])
        draft_ND = torch.cat([draft_BD for _, draft_BD in hidden])
        at = torch.arange(1, roots, stride)
        states = (target_ND[at - 1], draft_ND[at - 1], draft_ND[at])
        columns |= dict(zip(HIDDEN_STATES, states, strict=True))
    return columns


def _blocks(
    pair: ModelPair, written_text: WrittenText, sampling: Sampling
) -> Iterator[tuple[RowBlock, list[int]]]:
    """Both models' outputs along a text, with the tokens that follow. Before a token of probability
    0, the text is cut, and ImpossibleToken raised, if rounding explains that; InputError if
    not."""
    text = written_text.text
    begin = text.start + 1
    with naming(written_text.origin):
        for block in rows_along(pair, text, sampling):
            following = text.tokens[begin : begin + len(block.target.probs_NV)]
            try:
                check_possible(block.target, begin, following, sampling)
            except ImpossibleToken as impossible:
                if not impossible.at_a_tie:
                    raise InputError(
                        f"{impossible}: the text is not the target's own under {sampling}"
                    ) from impossible
                text.tokens = text.tokens[: impossible.position]
                raise
            yield block, following
            begin += len(following)
