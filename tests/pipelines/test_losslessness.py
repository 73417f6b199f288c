"""The greedy check, and the rival: under the pair's own law, whatever a checkpoint's generation
config says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data_gen.models.masks import TreeMasks
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.possible import tie
from data_gen.texts.prompts import Prompt
from pipelines.evaluate.methods import Assistant, greedy_check
from pipelines.pair.stage import encode
from selector.schema import InputError
from tests.pipelines.runs import UNTEMPLATED, demo_config

ONE = ("verifiers=[traversal]", "train.verifier=traversal")
CONFIG = demo_config(*UNTEMPLATED, *ONE, "prompts.tokens=12", "data.tokens=10")
PROMPTS = [
    Prompt("0", "the quick brown fox", "prose", "a"),
    Prompt("1", "over the lazy dog", "prose", "a"),
]
POISON = {
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(40, 90)),
    "min_p": 0.9,
}


def test_a_checkpoints_settings_move_neither_the_rival_nor_the_check(
    pair: ModelPair, pair_folders: tuple[str, str]
) -> None:
    poisoned = ModelPair.load(*pair_folders, device="cpu")
    for model in (poisoned.target, poisoned.draft):
        model.generation_config.update(**POISON)
    prompt = torch.tensor([[5, 17, 203]])
    text, moved = (
        one_pair.target.generate(prompt, max_new_tokens=12, do_sample=False).tolist()
        for one_pair in (pair, poisoned)
    )
    assert text != moved  # `generate` itself is moved
    for sampling in (Sampling(0), Sampling(0.8, 0.9)):
        decoded, again = (
            Assistant(4).decode(one_pair, sampling, [5, 17, 203], 24, seed=2)
            for one_pair in (pair, poisoned)
        )
        assert (decoded.text, decoded.steps) == (again.text, again.steps)
    checked = greedy_check(poisoned, CONFIG, PROMPTS)
    assert checked["continuations"] == 6 and not checked["ties"]
    assert poisoned.target.generation_config.repetition_penalty == POISON["repetition_penalty"]


def test_texts_that_end_are_compared_to_their_end(pair_folders: tuple[str, str]) -> None:
    pair = ModelPair.load(*pair_folders, device="cpu")
    prompt = torch.tensor([encode(CONFIG, pair, PROMPTS[0])])
    generated = pair.target.generate(prompt, max_new_tokens=10, do_sample=False)
    text = generated[0, prompt.shape[1] :].tolist()
    pair.target.generation_config.eos_token_id = text[4]
    checked = greedy_check(pair, CONFIG, PROMPTS[:1])
    assert checked["tokens"] == 6 * (1 + text.index(text[4])) and not checked["ties"]


def test_in_bfloat16_texts_part_at_ties_alone(pair_folders: tuple[str, str]) -> None:
    pair = ModelPair.load(*pair_folders, device="cpu", dtype="bfloat16")
    assert greedy_check(pair, CONFIG, PROMPTS)["continuations"] == 6


def test_a_difference_that_is_no_tie_is_found(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a decoder whose passes look at one committed token too few."""
    build = TreeMasks.build

    def blind(masks: TreeMasks, *arguments: Any) -> Any:
        mask = build(masks, *arguments)
        mask[..., 0] = torch.finfo(mask.dtype).min
        return mask

    monkeypatch.setattr(TreeMasks, "build", blind)
    with pytest.raises(InputError, match=r"prompt 0, token \d+ with traversal on"):
        greedy_check(pair, CONFIG, PROMPTS[:1])


@pytest.mark.parametrize(
    ("best", "dtype", "expected"),
    [
        (20.0, torch.bfloat16, 0.5),
        (31.9, torch.bfloat16, 0.5),
        (32.0, torch.bfloat16, 1.0),
        (-3.0, torch.bfloat16, 0.0625),
        (20.0, torch.float16, 0.0625),
        (20.0, torch.float32, 1e-4),
    ],
)
def test_a_tie_follows_from_the_dtype(best: float, dtype: torch.dtype, expected: float) -> None:
    assert tie(best, dtype) == pytest.approx(expected)
