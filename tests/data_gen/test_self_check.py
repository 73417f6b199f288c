"""Which families are decoded rightly, and which are refused; tiny models of their real classes."""

from __future__ import annotations

import pytest
import torch

from data_gen.decoding.loop import Random
from data_gen.models.pair import CachedModel, without_own_settings
from data_gen.models.sampling import Sampling
from data_gen.models.self_check import check_model, few_layers, lengths, table_of_positions
from selector.actions import Action
from selector.schema import InputError
from tests.checks import one_line
from tests.data_gen.decodes import decode, generated
from tests.data_gen.families import LONGEST, REFUSED, RIGHT, V, config_of, model_of, nameless


@pytest.mark.parametrize("family", RIGHT)
def test_these_families_are_right(family: str) -> None:
    """A wrong mask or position shows as 1e-3 and more, rounding as 1e-6."""
    assert check_model(model_of(family), family, LONGEST) < 1e-5


@pytest.mark.parametrize("family", ["Qwen 3, sliding window", "Gemma 2", "Gemma 3, text"])
def test_copies_and_trees_reach_over_the_window(family: str) -> None:
    """Copies of 16 tokens and trees of 8, on a text that repeats itself and is several windows
    long."""
    model, prompt = model_of(family, max_position_embeddings=256), [5, 9, 7, 11] * 3
    both = Random([Action.copy(16), Action(2, 0, 8)], torch.Generator().manual_seed(0))
    with without_own_settings(model):
        expected = generated(model, prompt, 100)
        decoded = decode(
            nameless(model, model), both, prompt, 100, Sampling(0, draft_temperature=0.08)
        )
    assert decoded.tokens == expected
    # beyond the window a drafted token was accepted that sees another one, of each kind
    window = model.config.sliding_window
    reaching = [step for step in decoded.steps if step.length > window and step.accepted > 1]
    assert {step.action.copies for step in reaching} == {True, False}


@torch.inference_mode()
def test_long_runs_are_committed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fill` gives the cache of one pass."""
    model = model_of("Gemma 2")
    text = torch.randint(V, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    monkeypatch.setattr("data_gen.models.pair.FILL", 7)
    cached = CachedModel(model)
    cached.fill(text)
    assert cached.committed == 50 < LONGEST
    expected_V = model(torch.tensor([[*text, 3]]), use_cache=False).logits[0, -1]
    assert torch.allclose(cached.extend([3]).logits_WV[-1], expected_V, atol=1e-4)


@pytest.mark.parametrize(
    "family", ["Gemma 3, text", "Qwen 2, sliding window", "Qwen 3, mixture of experts"]
)
def test_eager_attention_and_bfloat16_are_right(family: str) -> None:
    assert check_model(model_of(family, "eager").to(torch.bfloat16), family, LONGEST) < 0.1


@pytest.mark.parametrize("family", REFUSED)
def test_these_are_refused_in_one_line(family: str) -> None:
    """In bfloat16, where rounding could hide that GPT-Neo and MPT are wrong."""
    with one_line(f"{family}: ", REFUSED[family][2]):
        check_model(model_of(family).to(torch.bfloat16), family, LONGEST)


def test_an_attention_that_takes_no_such_masks_is_refused() -> None:
    model = model_of("Llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        InputError, match=r"^Llama: attn_implementation flash_attention_2 does not honour the masks"
    ):
        check_model(model, "Llama", LONGEST)


def test_contexts_end_around_every_change_that_the_config_names() -> None:
    """The deepest tree behind a context has 16 tokens and ends within the longest text; it fills 40
    rows of a cache."""
    config = config_of("Phi-3, longrope")
    assert lengths(config, LONGEST - 24) == [6, 61, 67]
    assert lengths(config, LONGEST) == [6, 61, 67, 112]
    assert lengths(config, 80) == [6, 61, 64]
    assert lengths(config, 65) == [6, 49]
    assert lengths(config, 40) == [6]


def test_a_tree_that_reaches_over_a_change_is_refused() -> None:
    """By one token: the rows of all nodes would change, and those in the cache would not."""
    model = model_of("Phi-3, longrope")
    check_model(model, "Phi-3", 64)
    with pytest.raises(
        InputError, match=r"Phi-3: .* behind 49 tokens the logits after 0 drafted tokens differ"
    ):
        check_model(model, "Phi-3", 65)


@pytest.mark.parametrize(
    ("family", "rows"), [("GPT-2", LONGEST), ("OPT", LONGEST), ("Llama", None)]
)
def test_learned_positions_end(family: str, rows: int | None) -> None:
    model = model_of(family)
    assert table_of_positions(model) == rows
    check_model(model, family, LONGEST)
    if rows is None:
        check_model(model, family, LONGEST + 1)
    else:
        with pytest.raises(
            InputError, match=f"^{family}: .* take up to 129 positions; the model has 128"
        ):
            check_model(model, family, LONGEST + 1)


def test_only_a_few_layers_are_copied() -> None:
    """The first layer of each kind among them, wherever it is; the model itself stays as it is."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    model = model_of("Gemma 3, text", num_hidden_layers=6, layer_types=kinds).to(torch.bfloat16)
    model.get_output_embeddings().weight.data[:] = 0  # the laws of the model itself say nothing
    assert check_model(model, "Gemma 3", LONGEST) == 0
    copied = few_layers(model)
    assert model.config.layer_types == kinds and model.dtype == torch.bfloat16
    assert copied.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert len(copied.model.layers) == 3 and copied.dtype == torch.float32


class Int8Linear(torch.nn.Module):
    """A linear map with int8 weights and a scale for each output, as quantisers make them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = (
            linear.in_features,
            linear.out_features,
            linear.bias,
        )
        scale = linear.weight.detach().abs().amax(-1, keepdim=True).float() / 127
        self.register_buffer(
            "weight", (linear.weight.detach().float() / scale).round().to(torch.int8)
        )
        self.register_buffer("scale", scale)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(
            values, (self.weight * self.scale).to(values.dtype), self.bias
        )


def quantised(family: str) -> torch.nn.Module:
    """In bfloat16, with quantised layers; embeddings and output layers stay as they are."""
    model = model_of(family).to(torch.bfloat16)
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child is not head:
                setattr(module, name, Int8Linear(child))
    return model


def test_a_quantised_model_is_checked_strictly() -> None:
    """By a copy with other weights; where they would only be compared loosely, MPT would pass."""
    model = quantised("Llama")
    check_model(model, "Llama", LONGEST)
    kinds = {type(module) for module in few_layers(model).modules()}
    assert Int8Linear not in kinds and torch.nn.Linear in kinds
    assert Int8Linear in {type(module) for module in model.modules()}
    for family in ("MPT", "GPT-Neo"):
        with pytest.raises(InputError, match=f"^{family}: .*{REFUSED[family][2]}"):
            check_model(quantised(family), family, LONGEST)
