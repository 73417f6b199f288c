"""Pairs whose models score different tokens: tables that differ in padding, and a draft that says a
part of the tokens.

They are pairs like any other: decoding, labels and generation stay lossless.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from data_gen.features.root import entropies
from data_gen.generate import speculative_generate
from data_gen.models.distilled import LAYERS, is_distilled, load_draft, new_draft, save_draft
from data_gen.models.pair import ModelPair, scored, shared_tokenizer
from data_gen.models.sampling import Sampling
from data_gen.models.self_check import check_model
from data_gen.texts.generated import GeneratedText, RowBlock, generated_by_target, rows_along
from pipelines.evaluate.methods import Assistant
from selector.actions import Action
from selector.schema import InputError
from tests.checks import one_line
from tests.data_gen.decodes import decode, generated
from tests.data_gen.families import LONGEST, V, model_of, random_llama
from tests.tiny import VOCABULARY

PADDED = VOCABULARY + 3  # at most 1% more


@pytest.fixture(scope="module")
def padded(
    tmp_path_factory: pytest.TempPathFactory, pair_folders: tuple[str, str]
) -> tuple[str, str]:
    """The tests' pair, its target with more rows than there are tokens, of which the last are as
    likely as any."""
    folder = tmp_path_factory.mktemp("padded")
    target = LlamaForCausalLM.from_pretrained(pair_folders[0])
    target.resize_token_embeddings(PADDED)
    target.save_pretrained(folder)
    AutoTokenizer.from_pretrained(pair_folders[0]).save_pretrained(folder)
    return str(folder), pair_folders[1]


def does_all_that_others_do(pair: ModelPair) -> RowBlock:
    """Every way to decode, and the rows of a text."""
    expected = generated(pair.target, [5, 9], 24)
    assert decode(pair, Action(3, 1, 3), [5, 9], 24).tokens == expected
    assert Assistant(3).decode(pair, Sampling(0), [5, 9], 24, seed=1).text == expected
    ours = {"custom_generate": speculative_generate, "draft_model": pair.draft}
    assert generated(pair.target, [5, 9], 24, selector=(2, 1, 2), **ours) == expected
    (text,) = generated_by_target(pair, [[5, 9]], 30, Sampling(), seed=1)
    (block,) = rows_along(pair, text, Sampling())
    shape = (len(text.tokens) - 1, pair.vocabulary)
    assert block.target.probs_NV.shape == block.draft.probs_NV.shape == shape
    return block


@pytest.mark.parametrize("swapped", [False, True], ids=["target padded", "draft padded"])
def test_a_pair_with_padded_tables_does_all_that_others_do(
    padded: tuple[str, str], swapped: bool
) -> None:
    pair = ModelPair.load(*(padded[::-1] if swapped else padded), device="cpu")
    assert pair.vocabulary == PADDED and [scored(pair.target), scored(pair.draft)] != [PADDED] * 2
    block = does_all_that_others_do(pair)
    assert not (block.target if swapped else block.draft).probs_NV[:, VOCABULARY:].any()
    # a token that one table has no row for
    (block,) = rows_along(pair, GeneratedText([5, 9, PADDED - 1, 7], 1), Sampling())
    assert torch.isfinite(block.draft.probs_NV + block.target.probs_NV).all()


def test_generate_takes_models_whose_tables_differ_in_padding() -> None:
    target, draft, prompt = random_llama(1010, 1, 0), random_llama(1005, 1, 1), [1, 0, 2]
    options = {"custom_generate": speculative_generate, "draft_model": draft, "selector": (2, 1, 2)}
    assert generated(target, prompt, 8, **options) == generated(target, prompt, 8)
    assert draft(torch.tensor([prompt])).logits.shape[-1] == 1005


def test_the_first_token_that_differs_is_named(
    pair_folders: tuple[str, str], tmp_path: Path
) -> None:
    ours = AutoTokenizer.from_pretrained(pair_folders[0])
    first, second = ours.convert_ids_to_tokens([40, 41])
    ours.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    swapped = json.loads(file.read_text())
    swapped["model"]["vocab"] |= {first: 41, second: 40}
    file.write_text(json.dumps(swapped))
    with one_line("", f"the first that differs is token 40: {first!r} and {second!r}"):
        shared_tokenizer(pair_folders[0], str(tmp_path))


SCORED = torch.tensor([0, 2])


@pytest.mark.parametrize("family", ["Llama", "Phi 1 and 2"])
def test_it_begins_as_the_targets_own_layers(family: str) -> None:
    """With all layers and all tokens it is the target."""
    target = model_of(family)
    if target.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(target.get_output_embeddings().bias)
    draft, ids = new_draft(target, [0, 1], torch.arange(V)), torch.tensor([[3, 4, 5, 6]])
    # products of other shapes are rounded otherwise
    torch.testing.assert_close(draft(ids).logits, target(ids).logits)
    fewer = new_draft(target, [0, 1], torch.arange(7))(ids).logits
    torch.testing.assert_close(fewer[..., :7], target(ids).logits[..., :7])
    assert (fewer[..., 7:] == -torch.inf).all()
    assert draft.get_input_embeddings() is target.get_input_embeddings()


def test_layers_of_another_kind_stay_what_they_are() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    target = model_of("Gemma 3, text", num_hidden_layers=3, layer_types=kinds)
    draft = new_draft(target, [1, 2], torch.arange(0, V, 2))
    assert draft.config.layer_types == kinds[1:]
    assert check_model(draft, "draft", LONGEST) < 1e-3


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory, pair_folders: tuple[str, str]
) -> tuple[str, str]:
    """A target, and a draft of its first layer that says every third token."""
    target = AutoModelForCausalLM.from_pretrained(pair_folders[0])
    folder = tmp_path_factory.mktemp("distilled") / "draft"
    save_draft(new_draft(target, [0], torch.arange(0, VOCABULARY, 3)), folder)
    return pair_folders[0], str(folder)


def test_a_pair_with_it_does_all_that_others_do(saved: tuple[str, str]) -> None:
    pair = ModelPair.load(*saved, device="cpu")
    assert pair.vocabulary == VOCABULARY and check_model(pair.draft, "draft", 60) < 1e-3
    draft = does_all_that_others_do(pair).draft
    assert (draft.probs_NV[:, 1::3] == 0).all() and (draft.probs_NV[:, ::3] > 0).all()
    expected = torch.special.entr(draft.probs_NV.double()).sum(-1)
    assert torch.tensor(entropies(draft.logits_NV)) == pytest.approx(expected, abs=1e-5)


def test_it_is_stored_without_the_targets_tables(saved: tuple[str, str]) -> None:
    target = AutoModelForCausalLM.from_pretrained(saved[0])
    assert is_distilled(saved[1]) and not is_distilled(saved[0]) and not is_distilled("org/model")
    made, loaded = (
        new_draft(target, [0], torch.arange(0, VOCABULARY, 3)),
        load_draft(saved[1], target),
    )
    assert list(getattr(loaded.config, LAYERS)) == [0]
    ids = torch.tensor([[5, 9, 7]])
    assert torch.equal(loaded(ids).logits.isfinite(), made(ids).logits.isfinite())
    for name, weights in made.model.layers.named_parameters():
        assert torch.equal(loaded.model.layers.get_parameter(name), weights.bfloat16().float())
    assert sum(path.stat().st_size for path in Path(saved[1]).iterdir()) < 30_000


def test_a_wrong_draft_is_refused(saved: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"pair\.draft: .* was distilled for a target of width 32 with 300 tokens; .* 16 and "
        r"20",
    ):
        load_draft(saved[1], random_llama(20, 3, 0))
    target = AutoModelForCausalLM.from_pretrained(saved[0])
    for layers in ([], [2], [-1]):
        with pytest.raises(InputError, match=r"distil\.layers.*the numbers 0 to 1"):
            new_draft(target, layers, SCORED)
    save_draft(new_draft(target, [0], SCORED), tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"pair\.draft: cannot load"):
        load_draft(str(tmp_path / "draft"), target)
