"""Transformers' own assisted generation, as a method to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from pipelines.evaluate.assisted import (
    ASSISTED,
    ASSISTED_TUNED,
    CONSTANTS,
    LOOKUPS,
    PROMPT_LOOKUP,
    ROUND,
    Assistant,
    best_of,
)
from pipelines.evaluate.methods import Decoding
from pipelines.evaluate.stage import tuned_assistants
from pipelines.run import Journal
from tests.pipelines.runs import UNTEMPLATED, demo_config, write_lines

PROMPT = [5, 17, 203, 44, 91]


@pytest.mark.parametrize("assistant", [Assistant(), Assistant(3), Assistant(4, 3)])
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.7, 0.9)], ids=str)
def test_it_decodes_to_the_limit_and_leaves_the_pair_as_it_was(
    pair: ModelPair, sampling: Sampling, assistant: Assistant
) -> None:
    before = pair.draft.generation_config.to_dict()
    found = assistant.decode(pair, sampling, PROMPT, 24, seed=1)
    assert found.tokens == len(found.text) == 24 and found.seconds > 0
    assert 24 / (1 + (assistant.tokens or 20)) <= found.steps <= 24  # one token more than was drafted
    assert pair.draft.generation_config.to_dict() == before


@pytest.mark.parametrize("tried", [CONSTANTS, LOOKUPS])
def test_the_best_is_the_fastest_of_those_tried(
    pair: ModelPair, tried: tuple[Assistant, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, in tokens per second over all prompts; with fewer and fewer ways after each round."""
    prompts = [PROMPT] * 4 * ROUND
    for fastest in tried:
        calls = []

        def decode(own: Assistant, *_: object, fastest: Assistant = fastest, calls: list = calls) -> Decoding:
            calls.append(own)
            return Decoding(8, 1.0, 4, 8) if own == fastest else Decoding(16, 2.5, 4, 16)

        monkeypatch.setattr(Assistant, "decode", decode)
        assert best_of(tried, pair, Sampling(), prompts, 8, seed=1) == fastest
        assert len(calls) < 2 * ROUND * len(tried) and calls.count(fastest) >= 3 * ROUND


def test_prompt_lookup_is_tuned_over_its_longest_match_too(pair: ModelPair) -> None:
    """Here the last token alone occurred first in another place than the last two, which the text follows."""
    assert {(each.tokens, each.match) for each in LOOKUPS} >= {(6, 1), (6, 2)}
    start = torch.tensor([[8, *PROMPT[1:]]])
    text = pair.target.generate(start, max_new_tokens=60, do_sample=False, pad_token_id=0)[0].tolist()
    one, two = (Assistant(6, match).decode(pair, Sampling(0), text, 24, seed=1).steps for match in (1, 2))
    assert two < one


def test_an_interruption_costs_no_tuning(pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is tuned anew could come out otherwise than the prompts that are already decoded."""
    file, journal = tmp_path / "prompts.jsonl", tmp_path / "tuned.jsonl"
    write_lines(file, ({"text": f"the quick brown fox {n}"} for n in range(8)))
    config = demo_config(*UNTEMPLATED, f"prompts.file={file}", "data.tokens=4", "sampling=[{temperature: 0.5}]")
    found = tuned_assistants(config, pair, Journal(journal, {}))
    assert [each.name for each in found[Sampling(0.5)]] == [ASSISTED, ASSISTED_TUNED, PROMPT_LOOKUP]
    monkeypatch.setattr("pipelines.evaluate.stage.best_of", None)
    assert tuned_assistants(config, pair, Journal(journal, {})) == found
