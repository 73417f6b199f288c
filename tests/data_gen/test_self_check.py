"""Which families a pass over a token tree is right for, and which are refused; tiny models of their real classes."""

from __future__ import annotations

import pytest
import torch

from data_gen.models.self_check import check_model, lengths
from selector.schema import InputError
from tests.data_gen.families import LONGEST, REFUSED, RIGHT, config_of, model_of


@pytest.mark.parametrize("family", RIGHT)
def test_these_families_are_right(family: str) -> None:
    """A wrong mask or position shows as 1e-3 and more, rounding in float32 as 1e-6."""
    assert check_model(model_of(family), family, LONGEST) < 1e-5


@pytest.mark.parametrize("family", REFUSED)
def test_these_are_refused_in_one_line(family: str) -> None:
    with pytest.raises(InputError, match=f"^{family}: .*{REFUSED[family][2]}") as refused:
        check_model(model_of(family), family, LONGEST)
    assert "\n" not in str(refused.value)


def test_an_attention_that_takes_no_such_masks_is_refused() -> None:
    model = model_of("Llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match=r"^Llama: attn_implementation flash_attention_2 does not honour the masks"):
        check_model(model, "Llama", LONGEST)


def test_a_change_beyond_what_is_used_does_not_matter() -> None:
    assert check_model(model_of("GPT-Neo"), "GPT-Neo", 26) < 1e-5


def test_bfloat16_is_judged_by_its_own_rounding() -> None:
    assert check_model(model_of("Gemma 3, text").to(torch.bfloat16), "Gemma", LONGEST) < 0.1


def test_contexts_end_around_every_change_that_the_config_names() -> None:
    config = config_of("Phi-3, longrope")
    assert lengths(config, LONGEST) == [6, 61, 67]
    assert lengths(config, 70) == [6]  # too short for the tree that would follow
