"""Checks that two models share a vocabulary, and equalises the padding of their embedding tables.

The padding may differ within a family of models: Qwen2.5 has 151,936 rows in its small models and 152,064 in its large
ones. The shorter table is filled up with tokens of probability 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedTokenizerBase

from data_gen.models.checkpoints import load_tokenizer
from data_gen.models.distilled import ReducedHead, is_distilled
from selector.schema import InputError


def scored(model: Any) -> int:
    """The number of tokens that a model scores: the rows of its output table, unless it can say some tokens alone."""
    table = model.get_output_embeddings()
    return table.out_features if isinstance(table, ReducedHead) else int(table.weight.shape[0])


def shared_tokenizer(target: str, draft: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a pair, by its names; a distilled draft has none of its own. InputError where one cannot be
    read, or maps other strings to the same ids: it names the first id that differs."""
    found = load_tokenizer(target, "target")
    vocabulary = found.get_vocab()
    other = vocabulary if is_distilled(draft) else load_tokenizer(draft, "draft").get_vocab()
    if other != vocabulary:
        token_of = [{number: token for token, number in each.items()} for each in (vocabulary, other)]
        first = min(number for _, number in vocabulary.items() ^ other.items())
        ours, theirs = (repr(tokens[first]) if first in tokens else "none" for tokens in token_of)
        raise InputError(
            f"vocabularies differ: {target} has {len(vocabulary)} tokens, {draft} {len(other)}; "
            f"the first that differs is token {first}: {ours} and {theirs}"
        )
    return found


@contextmanager
def widened(*models: Any) -> Iterator[None]:
    """Inside the context, all models score as many tokens as the one with the largest table."""
    size = max(map(scored, models))
    undo = [handle for model in models for handle in widen(model, size)]
    try:
        yield
    finally:
        for handle in undo:
            handle.remove()


def widen(model: Any, size: int) -> list[RemovableHandle]:
    """Let a model score `size` tokens, minus infinity for those beyond its table. As an input, such a token is read as
    the table's last one. `remove()` of the returned hooks undoes it."""
    missing, rows = size - scored(model), int(model.get_input_embeddings().weight.shape[0])
    if missing <= 0:
        return []

    def within(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].clamp(max=rows - 1), *inputs[1:])

    def fill_up(_: Any, inputs: Any, output: Any) -> Any:
        output.logits = pad(output.logits, (0, missing), value=float("-inf"))
        return output

    return [model.get_input_embeddings().register_forward_pre_hook(within), model.register_forward_hook(fill_up)]
