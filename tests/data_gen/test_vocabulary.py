"""Two models with one vocabulary whose tables differ in padding: decoding, labels and generation stay lossless."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree
from data_gen.generate import speculative_generate
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from data_gen.models.vocabulary import check_same_vocabulary, scored, widened
from data_gen.texts.written import rows_along, written_by_target
from data_gen.verification import VERIFIERS, get_verifier
from pipelines.evaluate.assisted import Assistant
from selector.actions import Action
from selector.schema import InputError
from tests.data_gen.worlds import World
from tests.tiny import VOCABULARY

PROMPT = [1, 0, 2]
PADDED = VOCABULARY + 20


def tiny(vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)], ids=["draft padded", "target padded"])
def test_every_verifier_is_lossless_on_padded_tables(sizes: tuple[int, int]) -> None:
    """The rows of both models after every text, those with tokens beyond a table too; then enumeration as ever."""
    models = [tiny(size, seed) for seed, size in enumerate(sizes)]
    world = World(3, 3, "random", 0)
    with widened(*models):
        for own, model in zip((world.target, world.draft), models, strict=True):
            for context in own:
                logits_V = CachedModel(model).extend([*PROMPT, *context]).logits_BWV[0, -1].double()
                own[context] = logits_V.softmax(-1)
                assert all((own[context] == 0) == (torch.arange(3) >= scored(model)))
    world.target_CV, world.draft_CV = (torch.stack(list(rows.values())) for rows in (world.target, world.draft))
    for name, shape in itertools.product(VERIFIERS, [(1, 1, 0), (2, 1, 1), (2, 0, 2)]):
        law_CV = world.appended_law(get_verifier(name), world.delayed_trees(*shape, "iid"))
        assert world.losslessness_error(law_CV, sum(shape[1:])) < 1e-12, (name, shape)
    assert [model(torch.tensor([PROMPT[:1]])).logits.shape[-1] for model in models] == list(sizes)  # as they were


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
    for sampling in (Sampling(), Sampling(0)):
        assert len(Assistant(3).generate(pair, sampling, [5, 9], 12, seed=1)[0]) == 12
        decoder = Decoder(pair, sampling, get_verifier("traversal"), FixedTree(Action(3, 1, 3)))
        greedy = decoder.decode([5, 9], 24, torch.Generator().manual_seed(0)).tokens
    expected = pair.target.generate(torch.tensor([[5, 9]]), max_new_tokens=24, do_sample=False)
    assert greedy == expected[0, 2:].tolist()


def test_generate_takes_models_whose_tables_differ_in_padding() -> None:
    target, draft = tiny(1010, 0), tiny(1005, 1)
    prompt = torch.tensor([PROMPT])
    expected = target.generate(prompt, max_new_tokens=8, do_sample=False)
    options = {"custom_generate": speculative_generate, "draft_model": draft, "selector": (2, 1, 2)}
    assert torch.equal(target.generate(prompt, max_new_tokens=8, do_sample=False, **options), expected)
    assert draft(prompt).logits.shape[-1] == 1005


def test_the_first_token_that_differs_is_named(pair_folders: tuple[str, str], tmp_path: Path) -> None:
    file = Path(pair_folders[0]) / "tokenizer.json"
    ours = AutoTokenizer.from_pretrained(pair_folders[0])
    first, second = ours.convert_ids_to_tokens([40, 41])
    ours.save_pretrained(tmp_path)
    swapped = file.read_text().replace(f'"{first}": 40', f'"{first}": -1').replace(f'"{second}": 41', f'"{second}": 40')
    (tmp_path / "tokenizer.json").write_text(swapped.replace(f'"{first}": -1', f'"{first}": 41'))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(InputError) as refused:
        check_same_vocabulary(ours, theirs, ("large", "small"))
    assert str(refused.value).endswith(f"the first that differs is token 40: {first!r} and {second!r}")
