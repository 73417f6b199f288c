"""Out of memory on the way: half as many rows at once, the same rows, and one warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts import generated
from data_gen.texts.generated import GeneratedText, RowBlock, generated_by_target, rows_along
from selector.schema import InputError

TEXT = GeneratedText([5, 17, 203, *range(40, 100)], 2)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "_halvings", 0)


def blocks(pair: ModelPair) -> list[RowBlock]:
    return generated.halving(lambda: list(rows_along(pair, TEXT, Sampling())))


def test_the_rows_are_the_same_in_smaller_blocks(pair: ModelPair) -> None:
    """Passes of the draft over more than 20 tokens ask the real allocator for more than there
    is."""

    def ask(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[1] > 20:
            torch.empty(2**60, dtype=torch.uint8)

    (whole,) = blocks(pair)
    with pair.draft.register_forward_pre_hook(ask):
        with pytest.warns(
            RuntimeWarning, match="halved from here on: .*can't allocate memory"
        ) as said:
            found = blocks(pair)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = blocks(pair)
    assert len(said) == 1 and max(len(block.draft.probs_NV) for block in found) <= 20
    assert len(again) == len(found) > 2
    for rows in (found, again):
        assert torch.allclose(
            torch.cat([block.draft.probs_NV for block in rows]), whole.draft.probs_NV, atol=1e-5
        )


def test_prompts_are_continued_in_smaller_batches(pair: ModelPair) -> None:
    prompts = [TEXT.tokens[:length] for length in (3, 5, 8, 9, 12)]
    whole = generated_by_target(pair, prompts, 10, Sampling(0), seed=1)

    def ask(_: object, inputs: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        if len(inputs[0] if inputs else named["input_ids"]) > 2:
            torch.empty(2**60, dtype=torch.uint8)

    with (
        pair.target.register_forward_pre_hook(ask, with_kwargs=True),
        pytest.warns(RuntimeWarning, match="can't allocate memory"),
    ):
        found = generated_by_target(pair, prompts, 10, Sampling(0), seed=1)
    assert [text.tokens for text in found] == [text.tokens for text in whole]


def test_memory_for_no_row_at_all_and_other_errors() -> None:
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(InputError, match="no room for one row of a text"),
    ):
        generated.halving(lambda: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        generated.halving(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
