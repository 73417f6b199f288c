"""Out of memory on the way: half as many rows at once, the same rows, and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts import generated
from data_gen.texts.generated import GeneratedText, generated_by_target, rows_along
from selector.schema import InputError

TEXT = GeneratedText([5, 17, 203, *range(40, 100)], 2)
WARNING = "halved from here on: .*can't allocate memory"


def too_much(is_wide: Callable[[Tensor], bool]) -> Callable[..., None]:
    """A hook that asks the real allocator for more than there is, where a pass is wide."""

    def ask(_: object, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if is_wide(inputs[0] if inputs else named["input_ids"]):
            torch.empty(2**60, dtype=torch.uint8)

    return ask


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "_halvings", 0)


def draft_rows(pair: ModelPair) -> list[Tensor]:
    """Of each block."""
    blocks = generated.halving(lambda: list(rows_along(pair, TEXT, Sampling())))
    return [block.draft.probs_NV for block in blocks]


def test_the_rows_are_the_same_in_smaller_blocks(pair: ModelPair) -> None:
    (whole,) = draft_rows(pair)
    hook = too_much(lambda tokens: tokens.shape[1] > 20)
    with pair.draft.register_forward_pre_hook(hook, with_kwargs=True):
        with pytest.warns(RuntimeWarning, match=WARNING) as warned:
            blocks = draft_rows(pair)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = draft_rows(pair)
    assert len(warned) == 1 and max(map(len, blocks)) <= 20
    assert len(again) == len(blocks) > 2
    for rows in (blocks, again):
        assert torch.allclose(torch.cat(rows), whole, atol=1e-5)


def test_prompts_are_continued_in_smaller_batches(pair: ModelPair) -> None:
    prompts = [TEXT.tokens[:length] for length in (3, 5, 8, 9, 12)]
    whole = generated_by_target(pair, prompts, 10, Sampling(0), seed=1)
    hook = too_much(lambda tokens: len(tokens) > 2)
    with (
        pair.target.register_forward_pre_hook(hook, with_kwargs=True),
        pytest.warns(RuntimeWarning, match=WARNING),
    ):
        texts = generated_by_target(pair, prompts, 10, Sampling(0), seed=1)
    assert [text.tokens for text in texts] == [text.tokens for text in whole]


def test_memory_for_no_row_at_all_and_other_errors() -> None:
    with pytest.warns(RuntimeWarning), pytest.raises(InputError, match="no room for one row"):
        generated.halving(lambda: torch.empty(2**60, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        generated.halving(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
