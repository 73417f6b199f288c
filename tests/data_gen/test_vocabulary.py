"""Two models with one vocabulary whose tables differ in padding: decoding, labels and generation stay lossless."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from data_gen.generate import speculative_generate
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.models.vocabulary import scored, shared_tokenizer
from data_gen.texts.written import rows_along, written_by_target
from pipelines.evaluate.assisted import Assistant
from selector.actions import Action
from selector.schema import InputError
from tests.data_gen.decodes import decode, generated
from tests.data_gen.families import random_llama
from tests.tiny import VOCABULARY

PADDED = VOCABULARY + 20


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory, pair_folders: tuple[str, str]) -> tuple[str, str]:
    """The tests' pair, its target with more rows than there are tokens, of which the last are as likely as any."""
    folder = tmp_path_factory.mktemp("padded")
    target = LlamaForCausalLM.from_pretrained(pair_folders[0])
    target.resize_token_embeddings(PADDED)
    target.save_pretrained(folder)
    AutoTokenizer.from_pretrained(pair_folders[0]).save_pretrained(folder)
    return str(folder), pair_folders[1]


@pytest.mark.parametrize("swapped", [False, True], ids=["draft padded", "target padded"])
def test_a_pair_with_padded_tables_does_all_that_others_do(padded: tuple[str, str], swapped: bool) -> None:
    names = (padded[1], padded[0]) if swapped else padded
    pair = ModelPair.load(*names, device="cpu")
    assert pair.vocabulary == PADDED and [scored(pair.target), scored(pair.draft)] != [PADDED] * 2
    (text,) = written_by_target(pair, [[5, 9]], 30, Sampling(), seed=1)
    text.tokens[10] = PADDED - 1 if not swapped else 7  # a token that the draft's table has no row for
    (block,) = rows_along(pair, text, Sampling())
    assert block.target.probs_NV.shape == block.draft.probs_NV.shape == (len(text.tokens) - 1, PADDED)
    assert not (block.target if swapped else block.draft).probs_NV[:, VOCABULARY:].any()
    assert Assistant(3).decode(pair, Sampling(), [5, 9], 12, seed=1).tokens == 12
    assert decode(pair, Action(3, 1, 3), [5, 9], 24).tokens == generated(pair.target, [5, 9], 24)


def test_generate_takes_models_whose_tables_differ_in_padding() -> None:
    target, draft, prompt = random_llama(1010, 1, 0), random_llama(1005, 1, 1), [1, 0, 2]
    options = {"custom_generate": speculative_generate, "draft_model": draft, "selector": (2, 1, 2)}
    assert generated(target, prompt, 8, **options) == generated(target, prompt, 8)
    assert draft(torch.tensor([prompt])).logits.shape[-1] == 1005


def test_the_first_token_that_differs_is_named(pair_folders: tuple[str, str], tmp_path: Path) -> None:
    file = Path(pair_folders[0]) / "tokenizer.json"
    ours = AutoTokenizer.from_pretrained(pair_folders[0])
    first, second = ours.convert_ids_to_tokens([40, 41])
    ours.save_pretrained(tmp_path)
    swapped = file.read_text().replace(f'"{first}": 40', f'"{first}": -1').replace(f'"{second}": 41', f'"{second}": 40')
    (tmp_path / "tokenizer.json").write_text(swapped.replace(f'"{first}": -1', f'"{first}": 41'))
    with pytest.raises(InputError) as refused:
        shared_tokenizer(pair_folders[0], str(tmp_path))
    assert str(refused.value).endswith(f"the first that differs is token 40: {first!r} and {second!r}")
