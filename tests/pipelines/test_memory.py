"""The plan's device memory against what torch really allocates: tiny pairs, large vocabularies and long prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_gen import text_labels
from data_gen.models import DTYPES, ModelPair
from data_gen.texts import Plausibility, written_by_target
from pipelines.config import Config
from pipelines.config.sections import Pair
from pipelines.data import memory
from pipelines.data.shards import BEYOND, Work, label
from selector.schema import InputError


def model(vocabulary: int, shape: dict[str, int], dtype: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=2048, num_attention_heads=4, tie_word_embeddings=True, **shape
    )
    return LlamaForCausalLM(config).to(DTYPES[dtype]).eval()


def peak(work: Callable[[], Any]) -> int:
    """Bytes that torch's allocator holds at most, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CASES = {  # the larger part: vocabulary, shape, dtype, prompt, new tokens, texts at once, setting
    "labels": (15_000, SMALL, "bfloat16", 8, 64, 2, {"top_p": 0.9}),
    "logits": (3000, SMALL, "float32", 4, 4, 200, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}),
    "prompts": (300, {**SMALL, "hidden_size": 64, "intermediate_size": 1200}, "float32", 700, 8, 8, {}),
    "masks": (300, {**SMALL, "hidden_size": 64}, "bfloat16", 1000, 8, 4, {}),
    "cache": (300, {**SMALL, "hidden_size": 64, "num_hidden_layers": 4}, "float32", 4, 40, 32, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_within_a_tenth_of_what_is_allocated(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_labels, "ELEMENTS", 1 << 16)  # rows are taken 32 at a time, as of 131,000 tokens
    vocabulary, shape, dtype, prompt, new, count, setting = CASES[case]
    models = [model(vocabulary, own, dtype) for own in (shape, {**shape, "num_hidden_layers": 1})]
    for role, each in zip(("target", "draft"), models, strict=True):
        each.config.save_pretrained(tmp_path / role)
    config = Config.model_validate(
        {
            "name": "memory",
            "pair": {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft"), "dtype": dtype},
            "prompts": {"tokens": prompt},
            "sampling": [setting],
            "verifiers": ["lifted_uniform"],
            "data": {"tokens": new, "texts_per_shard": count},
        }
    )
    pair = ModelPair(models[0], models[1], None, ("target", "draft"), "")  # type: ignore[arg-type]
    prompts = [[(7 * place + n) % vocabulary for place in range(prompt - n % 2)] for n in range(count)]
    sampling, texts = config.sampling[0].build(), []
    writing = peak(lambda: texts.extend(written_by_target(pair, prompts, new + BEYOND, sampling, seed=1)))
    labelling = peak(lambda: label(config, pair, texts[0], Work("train", sampling, ()), Plausibility()))
    weights = sum(each.num_parameters() for each in models) * DTYPES[dtype].itemsize
    planned = memory.memory(config)
    assert planned.weights == weights
    assert planned.peak == pytest.approx(weights + max(writing, labelling), rel=0.1)
    assert (labelling > writing) == case.startswith("labels")


@pytest.mark.parametrize(
    ("overrides", "there", "key"),
    [
        ({}, 1e6, "pair.dtype: "),
        ({"dtype": "bfloat16"}, 1e6, "pair.target: "),
        ({"dtype": "bfloat16"}, 60e6, "data.texts_per_shard: "),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key_to_change(
    monkeypatch: pytest.MonkeyPatch, overrides: dict[str, str], there: float, key: str
) -> None:
    config = Config.model_validate({"name": "memory", "pair": overrides, "data": {"texts_per_shard": 400}})
    monkeypatch.setattr(memory, "capacity", lambda _: there)
    with pytest.raises(
        InputError, match=f"^{key}.* GB of device memory at the peak .*; there are {there / 1e9:.2f} GB"
    ):
        memory.line(config)
    monkeypatch.setattr(memory, "capacity", lambda _: 1e12)
    assert memory.line(config).endswith("of 1000.00")


def test_models_that_are_not_there_yet_are_no_mistake_of_a_plan(tmp_path: Path) -> None:
    config = Config(name="memory", pair=Pair(target=str(tmp_path), draft=str(tmp_path)))
    assert memory.line(config) == f"device memory is not known: pair.target: cannot read the config of {tmp_path}"
