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
from selector.train.ranked import balanced
from tests.data_gen.families import model_of, nameless, random_llama
from tests.data_gen.test_texts import chi_square
from tests.selector.exported import export

PROMPT = torch.tensor([[5, 9, 5, 9, 7, 11]])
TREE = Action(3, 1, 3)


def speculative(pair: ModelPair, **options: Any) -> Any:
    ours = {"custom_generate": speculative_generate, "draft_model": pair.draft, "selector": TREE}
    options = {**ours, "max_new_tokens": 24, "do_sample": False, **options}
    return pair.target.generate(options.pop("input_ids", PROMPT), **options)


def plain(pair: ModelPair, **options: Any) -> Any:
    """The greedy text of `generate` itself."""
    return pair.target.generate(PROMPT, **{"max_new_tokens": 24, "do_sample": False, **options})


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
    expected = plain(pair, **options)
    for tree in (("traversal", Action(4, 0, 4)), ("specinfer", (1, 5, 0))):
        assert torch.equal(speculative(pair, selector=tree, **options), expected)


@pytest.fixture(scope="module")
def small() -> ModelPair:
    """Five tokens, so that all texts of three tokens can be enumerated."""
    return nameless(random_llama(5, 2, 0), random_llama(5, 1, 1))


def test_sampled_texts_follow_the_law_of_generate(small: ModelPair) -> None:
    """Texts of three tokens, against their enumerated probabilities: chi-square, false alarms 1e-4,
    a fixed seed."""
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 4, "repetition_penalty": 1.4}
    law = dict(_law(small, (1, 3), 3, settings))
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    torch.manual_seed(7)
    options = {"input_ids": torch.tensor([[1, 3]]), "selector": (2, 0, 2), "max_new_tokens": 3}
    drawn = Counter(
        tuple(speculative(small, **options, **settings)[0].tolist()) for _ in range(200)
    )
    assert set(drawn) <= set(law)
    assert chi_square(*torch.tensor([(drawn[text], p) for text, p in law.items()]).T) > 1e-4


def _law(
    pair: ModelPair, text: tuple[int, ...], length: int, settings: dict[str, Any]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Texts of so many more tokens and their probabilities, by `generate`'s own scores."""
    if length == 0:
        yield text, 1.0
        return
    one = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    scores_V = pair.target.generate(torch.tensor([text]), **settings, **one).scores[0][0]
    for token, p in enumerate(scores_V.softmax(-1).tolist()):
        if p > 0:
            for longer, probability in _law(pair, (*text, token), length - 1, settings):
                yield longer, p * probability


def test_a_selector_decides(pair: ModelPair, tmp_path: Path) -> None:
    """From its folder; the greedy text is the same, the trees are the selector's."""
    export(tmp_path / "selector")
    options = {"selector": str(tmp_path / "selector"), "return_dict_in_generate": True}
    assert torch.equal(speculative(pair, **options).sequences, plain(pair))
    torch.manual_seed(0)
    output = speculative(pair, do_sample=True, temperature=0.6, max_new_tokens=60, **options)
    assert len(set(output.actions)) > 1


@pytest.mark.parametrize(("temperature", "draft_temperature"), [(0.0, 0.3), (0.8, 0.0)])
def test_drafts_have_the_temperature_that_the_selector_was_trained_with(
    pair: ModelPair, tmp_path: Path, temperature: float, draft_temperature: float | None
) -> None:
    """The steps are those of a decoder with this draft temperature and the same seed."""
    export(tmp_path / "selector")
    # each learns from its own steps
    selector, again = load_selector(tmp_path / "selector"), load_selector(tmp_path / "selector")
    for loaded in (selector, again):
        for at, setting in enumerate(loaded.settings):
            sampling = replace(setting.sampling, draft_temperature=draft_temperature)
            loaded.settings[at] = replace(setting, sampling=sampling)
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    torch.manual_seed(5)
    output = speculative(
        pair, selector=selector, max_new_tokens=30, return_dict_in_generate=True, **sampled
    )
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
    sampling = Sampling(temperature, draft_temperature=draft_temperature)
    decoder = Decoder(pair, sampling, get_verifier(again.verifier), again.at(temperature))
    expected = decoder.decode(PROMPT[0].tolist(), 30, generator)
    assert isinstance(output, SpeculativeOutput)
    assert output.sequences[0, PROMPT.shape[1] :].tolist() == expected.tokens
    assert output.accepted == tuple(step.accepted for step in expected.steps)
    assert output.actions == tuple(step.action for step in expected.steps)


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
    recorder = Recorder()
    length = PROMPT.shape[1] + 5
    criteria: list[StoppingCriteria] = [transformers.MaxLengthCriteria(max_length=length)]
    text = speculative(pair, text_streamer=recorder, stopping_criteria=criteria)
    assert text.shape[1] == length and recorder.tokens == text[0].tolist() and recorder.ended
    whole = plain(pair)
    words = map(pair.tokenizer.decode, whole[0, PROMPT.shape[1] :].tolist())
    word = next(filter(str.isalpha, words))
    criteria = [transformers.StopStringCriteria(pair.tokenizer, word)]
    expected = plain(pair, stopping_criteria=criteria)
    assert expected.shape[1] < whole.shape[1]
    assert torch.equal(speculative(pair, stopping_criteria=criteria), expected)


@pytest.mark.parametrize(
    "selector",
    [
        (2, 1, 4, "greedy"),
        (1, 8, 0, "copy"),
        balanced(12, 4),
        (2, 6, 2, [[0], [1], [0, 0], [0, 1]]),
    ],
    ids=str,
)
def test_every_length_of_a_text_that_loops_and_every_end_inside_it(
    pair: ModelPair, selector: tuple[Any, ...]
) -> None:
    """A step may accept more than is asked for, or tokens behind the end of the text: none of them
    are returned."""
    prompt = torch.tensor([[5, 9, 7] * 6])
    ours = {"input_ids": prompt, "selector": selector}
    whole = pair.target.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)
    for count in range(1, 41):
        recorder = Recorder()
        options = {**ours, "max_new_tokens": count, "eos_token_id": None}
        text = speculative(pair, text_streamer=recorder, **options)
        assert torch.equal(text, whole[:, : prompt.shape[1] + count])
        assert recorder.tokens == text[0].tolist()
        if count % 8 == 1:
            sampled = speculative(pair, do_sample=True, **options)
            assert sampled.shape[1] == prompt.shape[1] + count
    for end in {*whole[0, prompt.shape[1] :].tolist()}:
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": end}
        assert torch.equal(
            speculative(pair, **ours, **options), pair.target.generate(prompt, **options)
        )


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
        ({"cache_implementation": "offloaded"}, "cache_implementation=offloaded"),
        ({"position_ids": torch.arange(3, 9).unsqueeze(0)}, "position_ids"),
        (
            {"inputs_embeds": torch.zeros(1, 6, 32), "input_ids": None},
            "inputs_embeds: .* nothing but token ids",
        ),
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
        length_penalty=2.0,
        num_assistant_tokens=5,
        cache_implementation="static",
        chat_format="raw",
        max_new_tokens=24,
        output_scores=False,
        position_ids=None,
    )
    assert torch.equal(speculative(pair, generation_config=config), plain(pair))


@pytest.mark.parametrize("rows", [64, 128], ids="target's rows {}".format)
def test_a_text_ends_before_a_tree_leaves_the_table_of_positions(rows: int) -> None:
    """Trees of 16 tokens behind 48 fill the draft's table of 64; one token more is refused in one
    line."""
    sizes = {"bos_token_id": None, "eos_token_id": None}
    pair = nameless(
        *(
            model_of("GPT-2", **sizes, n_positions=size, n_layer=1 + size // 128)
            for size in (rows, 64)
        )
    )
    options = {"selector": Action(2, 8, 8), "max_new_tokens": 49 - PROMPT.shape[1]}
    expected = plain(pair, max_new_tokens=49 - PROMPT.shape[1])
    assert torch.equal(speculative(pair, **options), expected)
    with pytest.raises(InputError, match="up to 65 positions; the model has 64"):
        speculative(pair, **{**options, "max_new_tokens": 50 - PROMPT.shape[1]})
