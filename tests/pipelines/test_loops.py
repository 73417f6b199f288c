"""Loops of greedy text: what counts as one, and how training removes them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipelines.config import Embedded
from pipelines.evaluate.replays import loops as loops_of
from pipelines.pair import language_model, loops
from pipelines.pair.language_model import Schedule
from tests.pipelines.runs import SMALL_PAIR, espalier


def test_loops_are_runs_that_repeat_a_few_tokens() -> None:
    words = list(range(100, 140))
    assert sum(loops.inside_loops(words)) == 0
    assert loops.inside_loops([*words, *[7] * 20, *words]).count(True) == 19
    assert loops.inside_loops(words + [1, 2, 3] * 8).count(True) == 21
    assert sum(loops.inside_loops(words[:12] * 2 + words[20:])) == 0  # one repeat is no loop
    assert sum(loops.inside_loops(words + words)) == 0  # nor is a long period


def test_loops_of_recorded_texts_are_those_after_their_roots() -> None:
    """The prompt does not count, and neither do the tokens of the last look-ahead."""
    prompt, words = [7] * 40, list(range(100, 140))
    texts = [prompt + words, prompt + words[:20] + [1, 2] * 18, words + [5] * 36, prompt + words[:10] + [3] * 16]
    table = pa.table({"tokens": texts, "start": [39] * 4, "roots": [24, 40, 20, 10]})
    assert loops_of(table).tolist() == pytest.approx([0, 18 / 40, 19 / 20, 0])


@pytest.mark.parametrize("longest", [8, 64, 512])
def test_random_runs_come_twice_after_many_lengths(longest: int) -> None:
    tokens_T = language_model.repeats(20_000, 10**9, longest, 1)
    assert 20_000 <= len(tokens_T) < 20_000 + 2 * max(longest, language_model.SHORTEST)
    places: dict[int, list[int]] = {}
    for at, token in enumerate(tokens_T.tolist()):
        places.setdefault(token, []).append(at)
    lengths = {second - first for first, second in places.values()}  # every token comes exactly twice
    least, most = sorted((longest, language_model.SHORTEST))
    assert least <= min(lengths) and max(lengths) <= most
    if longest == 512:
        assert min(lengths) < 32 and max(lengths) > 256


def test_runs_of_one_length_all_come_again_after_it() -> None:
    tokens_T = language_model.repeats(5_000, 10**9, 64, 1, shortest=64)
    halves = tokens_T.view(-1, 2, 64)
    assert torch.equal(halves[:, 0], halves[:, 1]) and len(set(tokens_T.tolist())) == len(tokens_T) // 2


def test_unlikelihood_is_that_of_the_tokens_inside_loops() -> None:
    torch.manual_seed(1)
    model = language_model.build_model(Embedded(hidden=32), 2, 50, 0, 1)
    batch_BT = torch.randint(50, (2, 65))
    texts_PW = model.generate(batch_BT[:, :32], do_sample=False, min_new_tokens=32, max_new_tokens=32)
    probabilities = model(texts_PW).logits.softmax(-1)
    expected = [
        -torch.log1p(-probabilities[row, 32 + at - 1, texts_PW[row, 32 + at]])
        for row in range(2)
        for at, looped in enumerate(loops.inside_loops(texts_PW[row, 32:].tolist()))
        if looped
    ]
    assert expected  # such a model repeats what it has just read
    found = loops.unlikelihood(model, batch_BT[:, :64])
    assert found.item() == pytest.approx(torch.stack(expected).sum().item() / 64, rel=1e-4)


def test_training_against_loops_removes_them(tmp_path: Path) -> None:
    stream = torch.randint(50, (4000,), generator=torch.Generator().manual_seed(1))

    def looped_after(loss_fn: language_model.Loss) -> float:
        model = language_model.build_model(Embedded(hidden=32, context=64), 2, 50, 0, 1)
        kept = tmp_path / "kept"
        language_model.train(model, loss_fn, stream, Schedule(60, 4, 3e-3), 64, 1, kept, lambda *_: None)
        prompts = stream[: 8 * 32].view(8, 32)
        texts = model.generate(prompts, do_sample=False, min_new_tokens=32, max_new_tokens=32)[:, 32:]
        return sum(sum(loops.inside_loops(text)) for text in texts.tolist()) / texts.numel()

    assert looped_after(loops.loss_without_loops) < 0.7 * looped_after(language_model.next_token_loss)


def test_a_pair_is_trained_against_loops_from_its_base_on(tmp_path: Path) -> None:
    asked = [*SMALL_PAIR, "pair.embedded.loop_steps=2"]
    planned = espalier(tmp_path, "pair", "--plan", *asked, config="embedded_pair.yaml")
    assert "train the base: 2 layers x 32, 12 steps" in planned
    assert "train the target: 2 layers x 32, 2 steps" in planned
    espalier(tmp_path, "pair", *asked, config="embedded_pair.yaml")
    folder = tmp_path / "runs" / "embedded_pair" / "pair" / "models"
    base, target = (language_model.load(folder / role, 32, "cpu").state_dict() for role in ("base", "target"))
    assert any(not torch.equal(base[name], target[name]) for name in base)
    assert all((base[name] - target[name]).abs().max() < 0.01 for name in base)  # not trained anew
