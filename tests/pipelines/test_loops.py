"""Loops of greedy text: what counts as one."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipelines.evaluate.replays import loops as loops_of
from pipelines.pair import loops


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
