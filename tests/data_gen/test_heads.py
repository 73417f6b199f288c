"""EAGLE-3 heads: step by step against the library's own pass, labels, decoding, and what is refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("speculators", reason="the extra `heads` is not installed")

from data_gen.decoding.loop import Random
from data_gen.generate import speculative_generate
from data_gen.models import heads
from data_gen.models.heads import caches, check_head, load_head, load_pair_with_head
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.written import finished
from selector.actions import EMPTY, Action
from selector.schema import LIGHT, SCALARS_KEY, InputError
from tests.data_gen.decodes import decode, generated
from tests.data_gen.heads import save_head, save_target
from tests.data_gen.test_features import decoded, replayed

PROMPT = [5, 9, 33, 7]
SIZES = [
    (300, 32, 6, 200, {}),
    (1000, 64, 8, 777, {"norm_before_residual": True}),
    (300, 128, 4, 100, {"fc_norm": True}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("head")
    target = save_target(folder / "target")
    return target, save_head(folder / "head", target)


@pytest.fixture(scope="module")
def pair(folders: tuple[str, str]) -> ModelPair:
    return load_pair_with_head(*folders, device="cpu")


@pytest.mark.parametrize(("vocabulary", "hidden", "layers", "known", "options"), SIZES)
def test_step_by_step_is_what_the_library_gives_for_all_roots_at_once(
    tmp_path: Path, vocabulary: int, hidden: int, layers: int, known: int, options: dict[str, Any]
) -> None:
    """q within 1e-6, at every root and depth, for chains and for the rows of labels; with a reduced vocabulary."""
    target = save_target(tmp_path / "target", vocabulary, hidden, layers)
    pair = load_pair_with_head(target, save_head(tmp_path / "head", target, known, **options), device="cpu")
    assert check_head(pair, "head") < 1e-5
    depth, tokens = heads.CHECKED_DEPTH, torch.randint(vocabulary, (heads.CHECKED_TEXT,)).tolist()
    expected = [logits_TV.softmax(-1) for logits_TV in heads._one_call(pair, tokens)]
    passed, cached = caches(pair)
    passed.fill(tokens)
    cached.fill(tokens[:2])
    first = cached.extend(tokens[2:])
    found_BD = cached.ahead(first, torch.tensor(tokens), 2, depth, Sampling())
    number_of = dict(zip((pair.draft.d2t + torch.arange(known)).tolist(), range(known), strict=True))
    whole = len(tokens) - depth
    for root, d in product(range(2, whole), range(depth)):
        at = number_of.get(tokens[root + d + 1])
        q = 0.0 if at is None else float(expected[d][root - 1, at])
        assert float(found_BD[root - 2, d]) == pytest.approx(q, abs=1e-6)
    assert (found_BD[: whole - 2] > 0).any(0).all() and (found_BD[whole - 2 :] == 0).all()


def test_greedy_texts_are_those_of_generate(pair: ModelPair) -> None:
    """15 of 15 prompts, where copies are accepted in between and the head drafts at temperature 1."""
    generator = torch.Generator().manual_seed(1)
    actions = [Action(1, 4, 0), Action(1, 8, 8), EMPTY, Action.copy(8)]
    accepted = 0
    for number in range(15):
        prompt = torch.randint(1, 300, (4,), generator=generator).tolist()  # `generate` takes 0 for padding
        chooser = Random(actions, torch.Generator().manual_seed(number))
        verifier = ("specinfer", "traversal", "lifted_uniform")[number % 3]
        decoded = decode(pair, chooser, prompt, 24, Sampling(0, draft_temperature=1.0), verifier, seed=number)
        assert decoded.tokens == generated(pair.target, prompt, 24, pad_token_id=0)
        accepted += sum(step.accepted for step in decoded.steps)
    assert accepted > 0


def test_a_decoder_knows_what_a_finished_text_tells(pair: ModelPair) -> None:
    sampling = Sampling(temperature=6.0)
    result, seen = decoded(pair, sampling, [Action(1, 3, 0)], LIGHT, PROMPT)
    along_RF, *_ = replayed(pair, finished(pair, PROMPT, result.tokens), sampling)
    for step, features in zip(result.steps[1:], seen[1:], strict=True):
        assert features is not None
        torch.testing.assert_close(features[SCALARS_KEY], along_RF[step.length - len(PROMPT)], atol=1e-4, rtol=1e-4)


def test_generate_takes_a_head(pair: ModelPair, folders: tuple[str, str]) -> None:
    head = load_head(folders[1], folders[0], "cpu", torch.float32)
    ours: Any = {"custom_generate": speculative_generate, "draft_model": head}
    assert generated(pair.target, PROMPT, 16, **ours, selector=(1, 4, 0)) == generated(pair.target, PROMPT, 16)
    with pytest.raises(InputError, match=r"the tree \(2, 1, 2\) has branches; a head drafts chains"):
        generated(pair.target, PROMPT, 16, **ours, selector=(2, 1, 2))


def test_branches_and_short_prompts_are_refused(pair: ModelPair) -> None:
    with pytest.raises(InputError, match=r"the tree \(2, 1, 3\) has branches; a head drafts chains"):
        decode(pair, Action(2, 1, 3), PROMPT, 8, Sampling())
    with pytest.raises(InputError, match="the prompt has one token"):
        decode(pair, Action(1, 3, 0), [5], 8, Sampling())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"speculators_model_type": "dflash"}, "is no eagle3 head in the format of the speculators library: dflash"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "reads layer 6; .* can read up to 5"),
        ({"hidden_size": 64}, "is for a target with hidden_size=64; .* has 32"),
        ({"vocab_size": 301}, "is for a target with vocab_size=301; .* has 300"),
        ({"layer_types": ["sliding_attention"]}, "has a sliding window"),
    ],
)
def test_heads_that_do_not_fit_are_named(
    folders: tuple[str, str], tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    head = Path(save_head(tmp_path / "head", folders[0]))
    config = json.loads((head / "config.json").read_text())
    inside = {key: value for key, value in values.items() if key in ("hidden_size", "vocab_size", "layer_types")}
    outside = {key: value for key, value in values.items() if key not in inside}
    layer = {**config["transformer_layer_config"], **inside}
    (head / "config.json").write_text(json.dumps({**config, **outside, "transformer_layer_config": layer}))
    with pytest.raises(InputError, match=said):
        load_pair_with_head(folders[0], str(head), device="cpu")


def test_maps_of_the_vocabulary_that_contradict_each_other_are_refused(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    head = Path(save_head(tmp_path / "head", folders[0]))
    weights = load_file(head / "model.safetensors")
    weights["d2t"] = weights["d2t"].roll(1)
    save_file(weights, head / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="its maps d2t and t2d of the vocabulary contradict each other"):
        load_pair_with_head(folders[0], str(head), device="cpu")


@pytest.mark.parametrize("table", ["embed_tokens", "lm_head"])
def test_tables_that_a_checkpoint_lacks_are_the_targets(tmp_path: Path, table: str) -> None:
    target = save_target(tmp_path / "target")
    folder = Path(save_head(tmp_path / "head", target, known=None))
    weights = load_file(folder / "model.safetensors")
    lacking = {name: value for name, value in weights.items() if name != f"{table}.weight"}
    assert len(lacking) == len(weights) - 1
    save_file(lacking, folder / "model.safetensors", {"format": "pt"})
    head = load_head(str(folder), target, "cpu", torch.float32)
    own = load_file(Path(target) / "model.safetensors")
    of_target = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    for name, wanted in of_target.items():
        expected = own[wanted] if name == table else weights[f"{name}.weight"]
        torch.testing.assert_close(getattr(head, name).weight.data, expected)
