"""Transformers' own assisted generation, as a method to compare with."""

from __future__ import annotations

import pytest

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from pipelines.evaluate.assisted import CONSTANTS, LOOKUPS, Assistant, best_of

PROMPT = [5, 17, 203, 44, 91]


@pytest.mark.parametrize("assistant", [Assistant(), Assistant(3), Assistant(4, lookup=True)])
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.7, 0.9)], ids=str)
def test_it_decodes_to_the_limit_and_leaves_the_pair_as_it_was(
    pair: ModelPair, sampling: Sampling, assistant: Assistant
) -> None:
    before = pair.draft.generation_config.to_dict()
    new, passes, seconds = assistant.generate(pair, sampling, PROMPT, 24, seed=1)
    assert new == 24 and seconds > 0
    assert 24 / (1 + (assistant.constant or 20)) <= passes <= 24  # one token more than was drafted
    assert pair.draft.generation_config.to_dict() == before


@pytest.mark.parametrize("tried", [CONSTANTS, LOOKUPS])
def test_the_best_is_the_fastest_of_those_tried(
    pair: ModelPair, tried: tuple[Assistant, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: in tokens per second over all prompts."""
    for fastest in tried:

        def generate(own: Assistant, *_: object, fastest: Assistant = fastest) -> tuple[int, int, float]:
            return (8, 4, 1.0) if own == fastest else (16, 4, 2.5)

        monkeypatch.setattr(Assistant, "generate", generate)
        assert best_of(tried, pair, Sampling(), [PROMPT, PROMPT], 8, seed=1) == fastest
