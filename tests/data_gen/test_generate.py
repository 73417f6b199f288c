"""`generate(custom_generate=speculative_generate)`: the text of `generate`, with its settings,
rules and refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from data_gen.decoding.decoder import Decoder
from data_gen.generate import SpeculativeOutput, speculative_generate
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from selector.actions import Action
from selector.runtime.selector import load_selector
from selector.schema import InputError
from tests.data_gen.families import model_of, nameless, random_llama
from tests.data_gen.test_texts import chi_square
from tests.selector.exported import export

PROMPT = torch.tensor([[5, 9, 5, 9, 7, 11]])
TREE = Action(3, 1, 3)


def speculative(pair: ModelPair, **options: Any) -> Any:
    ours = {"custom_generate": speculative_generate, "draft_model": pair.draft, "selector": TREE}
    options = {**ours, "max_new_tokens": 24, "do_sample": False, **options}
    return pair.target.generate(options.pop("input_ids", PROMPT), **options)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [17, 40, 41]},
    {"min_new_tokens": 12, "eos_token_id": [3, 25, 60, 61, 62]},
    {"eos_token_id": list(range(20, 60))},
    {"bad_words_ids": [[9, 5], [60]]},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_greedy_text_is_that_of_generate(pair: ModelPair, options: dict[str, Any]) -> None:
    """Whatever processors and stopping rules there are; the same checkpoint settings are filled in
    for both."""
    expected = pair.target.generate(PROMPT, max_new_tokens=24, do_sample=False, **options)
    for tree in (("traversal", Action(4, 0, 4)), ("specinfer", (1, 5, 0))):
        assert torch.equal(speculative(pair, selector=tree, **options), expected)


def test_what_a_checkpoint_fills_in_counts(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = speculative(pair)
    monkeypatch.setattr(pair.target.generation_config, "repetition_penalty", 1.5)
    filled = speculative(pair)
    assert torch.equal(filled, pair.target.generate(PROMPT, max_new_tokens=24, do_sample=False))
    assert not torch.equal(filled, plain)


@pytest.fixture(scope="module")
def small() -> ModelPair:
    """Five tokens, so that all texts of three tokens can be enumerated."""
    return nameless(random_llama(5, 2, 0), random_llama(5, 1, 1))


def test_sampled_texts_follow_the_law_of_generate(small: ModelPair) -> None:
    """Texts of three tokens, against their enumerated probabilities: chi-square, false alarms 1e-4,
    a fixed seed."""
    settings = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 4,
        "repetition_penalty": 1.4,
        "max_new_tokens": 3,
    }
    prompt, count = torch.tensor([[1, 3]]), 200
    law = dict(_law(small, prompt, settings))
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    torch.manual_seed(7)
    drawn = Counter(
        tuple(speculative(small, input_ids=prompt, selector=(2, 0, 2), **settings)[0, 2:].tolist())
        for _ in range(count)
    )
    assert set(drawn) <= set(law)
    assert chi_square(*torch.tensor([(drawn[text], p) for text, p in law.items()]).T) > 1e-4


def _law(
    pair: ModelPair,
    prompt: torch.Tensor,
    settings: dict[str, Any],
    text: tuple[int, ...] = (),
    probability: float = 1.0,
) -> Iterator[tuple[tuple[int, ...], float]]:
    """By `generate`'s own scores after every beginning."""
    if len(text) == settings["max_new_tokens"]:
        yield text, probability
        return
    begun = torch.cat([prompt, torch.tensor([text], dtype=torch.int64)], dim=1)
    one = {**settings, "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    for token, p in enumerate(pair.target.generate(begun, **one).scores[0][0].softmax(-1).tolist()):
        if p > 0:
            yield from _law(pair, prompt, settings, (*text, token), probability * p)


def test_a_selector_decides(pair: ModelPair, tmp_path: Path) -> None:
    """From its folder; the greedy text is the same, the trees are the selector's."""
    export(tmp_path / "selector")
    output = speculative(pair, selector=tmp_path / "selector", return_dict_in_generate=True)
    assert torch.equal(
        output.sequences, pair.target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    )
    sampled = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 60}
    torch.manual_seed(0)
    output = speculative(
        pair, selector=str(tmp_path / "selector"), return_dict_in_generate=True, **sampled
    )
    assert len(set(output.actions)) > 1


@pytest.mark.parametrize(("temperature", "draft_temperature"), [(0.0, 0.3), (0.8, 0.0)])
def test_drafts_have_the_temperature_that_the_selector_was_trained_with(
    pair: ModelPair, tmp_path: Path, temperature: float, draft_temperature: float | None
) -> None:
    """The steps are those of a decoder with this draft temperature and the same seed."""
    selector = export(tmp_path / "selector")
    again = load_selector(tmp_path / "selector")  # each learns from its own steps
    for each in (selector, again):
        own = [replace(mode.sampling, draft_temperature=draft_temperature) for mode in each.modes]
        each.modes = [
            replace(mode, sampling=sampling) for mode, sampling in zip(each.modes, own, strict=True)
        ]
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    torch.manual_seed(5)
    found = speculative(
        pair, selector=selector, max_new_tokens=30, return_dict_in_generate=True, **sampled
    )
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
    sampling = Sampling(temperature, draft_temperature=draft_temperature)
    decoder = Decoder(pair, sampling, get_verifier(again.verifier), again.at(temperature))
    expected = decoder.decode(PROMPT[0].tolist(), 30, generator)
    assert found.sequences[0, PROMPT.shape[1] :].tolist() == expected.tokens
    assert isinstance(found, SpeculativeOutput) and found.accepted == tuple(
        step.accepted for step in expected.steps
    )
    assert found.actions == tuple(step.action for step in expected.steps)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_ends_where_generation_fails(pair: ModelPair) -> None:
    recorder = Recorder()
    with pytest.raises(InputError):
        speculative(pair, selector=(9, 9, 9), text_streamer=recorder)
    assert recorder.ended


def test_lengths_and_stop_strings_stop(pair: ModelPair) -> None:
    recorder, criteria = (
        Recorder(),
        [transformers.MaxLengthCriteria(max_length=PROMPT.shape[1] + 5)],
    )
    text = speculative(pair, text_streamer=recorder, stopping_criteria=criteria)
    assert (
        recorder.ended
        and recorder.tokens == text[0].tolist()
        and text.shape[1] == PROMPT.shape[1] + 5
    )
    plain = pair.target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    word = next(
        filter(str.isalpha, map(pair.tokenizer.decode, plain[0, PROMPT.shape[1] :].tolist()))
    )
    options = {"stopping_criteria": [transformers.StopStringCriteria(pair.tokenizer, word)]}
    expected = pair.target.generate(PROMPT, max_new_tokens=24, do_sample=False, **options)
    assert expected.shape[1] < plain.shape[1]
    assert torch.equal(speculative(pair, **options), expected)


@pytest.mark.parametrize("selector", [(2, 1, 4, "greedy"), (1, 8, 0, "copy")], ids=str)
def test_every_length_of_a_text_that_loops_and_every_end_inside_it(
    pair: ModelPair, selector: tuple[Any, ...]
) -> None:
    """A step may accept more than is asked for, or tokens behind the end of the text: none of them
    are returned."""
    prompt = torch.tensor([[5, 9, 7] * 6])
    plain = pair.target.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)
    for count in range(1, 41):
        recorder, given = (
            Recorder(),
            {"input_ids": prompt, "selector": selector, "max_new_tokens": count},
        )
        text = speculative(pair, text_streamer=recorder, eos_token_id=None, **given)
        assert (
            torch.equal(text, plain[:, : prompt.shape[1] + count])
            and recorder.tokens == text[0].tolist()
        )
        if count % 8 == 1:
            sampled = speculative(pair, do_sample=True, eos_token_id=None, **given)
            assert sampled.shape[1] == prompt.shape[1] + count
    for end in {*plain[0, prompt.shape[1] :].tolist()}:
        expected = pair.target.generate(
            prompt, max_new_tokens=40, do_sample=False, eos_token_id=end
        )
        found = speculative(
            pair, input_ids=prompt, selector=selector, max_new_tokens=40, eos_token_id=end
        )
        assert torch.equal(found, expected)


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Cooler(transformers.TemperatureLogitsWarper):
    """A subclass may depend on anything."""


class Unsure(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return scores[-1].amax(-1) < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": PROMPT.repeat(2, 1)}, "2 texts at once"),
        ({"num_beams": 2}, "num_beams"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, "attention_mask: padded"),
        ({"logits_processor": LogitsProcessorList([Unknown()])}, "Unknown: not known to follow"),
        ({"logits_processor": LogitsProcessorList([Cooler(0.5)])}, "Cooler: not known to follow"),
        ({"stopping_criteria": [Unsure()]}, "stopping_criteria: .* no scores"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "output_hidden_states=True",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"cache_implementation": "offloaded"}, "cache_implementation=offloaded"),
        ({"position_ids": torch.arange(3, 9).unsqueeze(0)}, "position_ids"),
        (
            {"inputs_embeds": torch.zeros(1, 6, 32), "input_ids": None},
            "inputs_embeds: .* nothing but token ids",
        ),
        ({"labels": PROMPT}, "labels: .* nothing but token ids"),
        (
            {"input_ids": torch.zeros(1, 0, dtype=torch.int64)},
            "input_ids: the prompt holds no tokens",
        ),
        ({"draft_model": None}, "draft_model: none was given"),
        ({"draft_model": "org/small"}, "draft_model: 'org/small' is not a model"),
        ({"selector": None}, "selector: neither a selector"),
        ({"selector": (9, 9, 9)}, "selector: neither a selector"),
        ({"selector": "/no/such/folder"}, "this is no selector directory"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_cannot_be_honoured_is_refused(
    pair: ModelPair, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        speculative(pair, **options)


def test_a_filled_cache_and_a_draft_that_does_not_fit_are_refused(
    pair: ModelPair, small: ModelPair
) -> None:
    cache = pair.target(PROMPT[:, :-1], use_cache=True).past_key_values
    with pytest.raises(InputError, match=r"past_key_values: .* this one is filled"):
        speculative(pair, past_key_values=cache)
    with pytest.raises(InputError, match="vocabularies differ"):
        speculative(pair, draft_model=small.draft)
    elsewhere: Any = LlamaForCausalLM(small.draft.config)
    with pytest.raises(InputError, match="draft_model: it is on meta, and the target on cpu"):
        speculative(small, draft_model=elsewhere.to("meta"))


def test_settings_that_ask_for_nothing_are_no_reason_to_refuse(pair: ModelPair) -> None:
    """Of beams and assistants that there are not, of speed, and of other programs."""
    config = GenerationConfig(
        **{
            "length_penalty": 2.0,
            "num_assistant_tokens": 5,
            "cache_implementation": "static",
            "chat_format": "raw",
        },
        **{"max_new_tokens": 24, "output_scores": False, "position_ids": None},
    )
    expected = pair.target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    assert torch.equal(speculative(pair, generation_config=config), expected)


def test_a_longer_text_is_checked_anew(small: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that a short text does not reach is no reason to trust a long one."""
    asked: list[int] = []
    monkeypatch.setattr(
        "data_gen.models.self_check.check_model", lambda model, name, longest: asked.append(longest)
    )
    for length in (4, 4, 9, 6):
        speculative(small, input_ids=torch.tensor([[1, 3]]), max_new_tokens=length)
    # prompt, all new tokens but the last, and a tree; both models
    assert asked == [2 + 3 + 16] * 2 + [2 + 8 + 16] * 2


@pytest.mark.parametrize("rows", [64, 128], ids="target's rows {}".format)
def test_a_text_ends_before_a_tree_leaves_the_table_of_positions(rows: int) -> None:
    """Trees of 16 tokens behind 48 fill the draft's table of 64; one token more is refused in one
    line."""
    sizes = {"bos_token_id": None, "eos_token_id": None}
    pair = nameless(
        *(model_of("GPT-2", **sizes, n_positions=own, n_layer=1 + own // 128) for own in (rows, 64))
    )
    options = {"selector": Action(2, 8, 8), "max_new_tokens": 49 - PROMPT.shape[1]}
    expected = pair.target.generate(PROMPT, do_sample=False, max_new_tokens=49 - PROMPT.shape[1])
    assert torch.equal(speculative(pair, **options), expected)
    with pytest.raises(InputError, match="up to 65 positions; the model has 64"):
        speculative(pair, **{**options, "max_new_tokens": 50 - PROMPT.shape[1]})
