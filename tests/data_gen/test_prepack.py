"""Prepacked linear layers: the logits of plain ones within rounding, their weights, and what a
failure leaves."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from data_gen.models import matrices as timed
from data_gen.models import prepack as module
from data_gen.models.checkpoints import weights_of
from data_gen.models.distilled import ReducedHead, new_draft
from data_gen.models.matrices import MATRIX_ROWS, matrix_seconds
from data_gen.models.pair import scored
from data_gen.models.prepack import PrepackedLinear, can_be_prepacked, named_weights, prepack
from data_gen.models.self_check import check_model
from tests.data_gen.families import LONGEST, RIGHT, V, model_of

pytestmark = pytest.mark.skipif(
    not can_be_prepacked(torch.ones(1, 1)), reason="torch has no oneDNN here"
)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # of logits, as a share of the largest one
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not can_be_prepacked(torch.ones(1, 1, dtype=torch.bfloat16)),
            reason="this processor has no bfloat16",
        ),
    ),
]


def plain_layers(model: Any) -> list[torch.nn.Module]:
    return [layer for layer in model.modules() if type(layer) is torch.nn.Linear]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", RIGHT)
def test_every_family_computes_what_it_did(family: str, dtype: torch.dtype) -> None:
    """For one row and for many, in one text and in several; and no linear layer is left out."""
    model = model_of(family).to(dtype)
    prepacked, plain = model_of(family).to(dtype), weights_of(model)
    prepack(prepacked)
    for shape in ((1, 1), (1, 7), (3, 20)):
        tokens = torch.randint(3, V, shape, generator=torch.Generator().manual_seed(sum(shape)))
        expected, logits = (
            one(tokens, use_cache=False).logits.float() for one in (model, prepacked)
        )
        assert (logits - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()
    assert not plain_layers(prepacked) and plain_layers(model)
    assert weights_of(prepacked) == plain
    if dtype == torch.float32:
        assert check_model(prepacked, family, LONGEST) < 1e-5


def test_weights_are_given_up_except_those_of_a_lookup() -> None:
    model = model_of("Llama", tie_word_embeddings=True)
    before = {name: weights.clone() for name, weights in named_weights(model)}
    prepack(model)
    left = {name for name, _ in model.named_parameters()}
    assert model.get_output_embeddings().is_tied and "model.embed_tokens.weight" in left
    assert not any("proj" in name for name in left)
    after = dict(named_weights(model))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_layer_that_two_modules_share_stays() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    prepack(model)
    assert [type(layer) for layer in model] == [torch.nn.Linear, torch.nn.Linear, PrepackedLinear]


def test_a_reduced_output_layer_and_its_tables() -> None:
    target = model_of("Qwen 3", tie_word_embeddings=True)
    draft = new_draft(target, [1], torch.arange(0, V, 3))
    tokens, plain = torch.tensor([[5, 9, 7]]), weights_of(draft)
    expected = draft(tokens, use_cache=False).logits
    prepack(target)
    prepack(draft)
    logits, head = draft(tokens, use_cache=False).logits, draft.get_output_embeddings()
    assert (
        isinstance(head, ReducedHead)
        and isinstance(head.rows, PrepackedLinear)
        and scored(draft) == V
    )
    assert torch.equal(logits.isinf(), expected.isinf())
    assert torch.allclose(logits[logits.isfinite()], expected[expected.isfinite()], atol=1e-5)
    assert weights_of(draft) == plain and check_model(draft, "draft", LONGEST) < 1e-5
    assert weights_of(new_draft(target, [1], torch.arange(0, V, 3))) == plain


def test_a_copy_is_plain_and_can_be_changed() -> None:
    layer = torch.nn.Linear(6, 5)
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    expected = layer(values)
    holder = torch.nn.Sequential(layer)
    prepack(holder)
    copied = deepcopy(holder)
    assert isinstance(holder[0], PrepackedLinear) and type(copied[0]) is torch.nn.Linear
    assert torch.equal(copied(values), expected) and torch.allclose(
        holder(values), expected, atol=1e-6
    )


@pytest.mark.parametrize("fault", ["wrong", "missing", "raises"])
def test_layers_stay_where_the_operator_fails(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and the model computes what it did."""

    def forward(self: PrepackedLinear, values: torch.Tensor) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("could not create a primitive\nat some place")
        return 1.01 * linear(values, self.weight, self.bias)

    monkeypatch.setattr(PrepackedLinear, "forward", forward)
    monkeypatch.setattr(module, "_has_operators", lambda: fault != "missing")
    model = model_of("Llama")
    prepack(model)
    assert not any(isinstance(layer, PrepackedLinear) for layer in model.modules())
    lines = capsys.readouterr().err.splitlines()
    reasons = {"wrong": "something else", "raises": "could not create a primitive"}
    assert len(lines) == (fault != "missing") and all(reasons[fault] in line for line in lines)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_matrices_are_timed_plain_and_prepacked(
    has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows; in bfloat16, too, where the processor has it. The weights stay as they are."""
    monkeypatch.setattr(timed, "computes_in_bfloat16", lambda: has_bfloat16)
    model = model_of("Llama")
    prepack(model)
    before = weights_of(model)
    kinds = {"linear", "prepacked"} | ({"prepacked, bfloat16"} if has_bfloat16 else set())
    measurements = matrix_seconds(model)
    assert [times["rows"] for times in measurements] == list(MATRIX_ROWS)
    for times in measurements:
        assert times.keys() == {"rows"} | kinds
        assert min(times[kind] for kind in kinds) > 0
    assert weights_of(model) == before
    assert matrix_seconds(deepcopy(model)) == []
