"""The drafter beside an engine: chains of many requests from one bounded cache, against whole
forward passes."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_gen.engines.drafter import GIB, CachedDrafter
from selector.schema import InputError
from tests.data_gen.families import model_of
from tests.pipelines.small_logs import record
from tests.tiny import VOCABULARY, save_pair, small_pair

TEXTS = [
    (entry["prompt_token_ids"], entry["generated_token_ids"])
    for entry in map(record, range(100, 106))
]


@cache
def drafter(family: str = "") -> CachedDrafter:
    if family:
        return CachedDrafter(model_of(family))
    return CachedDrafter.load(small_pair()[1], small_pair()[0])


def drafted(text: list[int], length: int, family: str = "") -> list[int]:
    """The most probable tokens, by a whole forward pass for each."""
    whole = list(text)
    for _ in range(length):
        logits_TV = drafter(family).model(torch.tensor([whole])).logits[0]
        whole.append(int(logits_TV[-1].argmax()))
    return whole[len(text) :]


def test_requests_that_draft_in_turn_are_read_once() -> None:
    """Each of five that draft alone, one after another, passes its text once and then its newest
    token."""
    fresh = CachedDrafter(drafter().model)
    passed: list[int] = []
    with fresh.model.register_forward_pre_hook(lambda _, args: passed.append(args[0].numel())):
        for end, row in product((20, 21, 22), range(5)):
            texts = [[*prompt, *generated][:end] for prompt, generated in TEXTS[:5]]
            fresh.chains(texts, [int(row == other) for other in range(5)])
    assert sum(passed) == 5 * 22


@pytest.mark.parametrize("family", ["", "Mistral, sliding window", "Gemma 3, text"])
def test_chains_of_several_requests_are_those_of_each_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a batch change places, grow by few or many tokens, pause, come back, and begin
    alike."""
    # texts take several blocks and pages
    monkeypatch.setattr("data_gen.engines.drafter.BLOCK", 16)
    monkeypatch.setattr("data_gen.engines.drafter.PAGE", 16)
    fresh = CachedDrafter(drafter(family).model)
    wholes, chance = [[*prompt, *answer] for prompt, answer in TEXTS[:5]], random.Random(0)
    wholes += [[*wholes[0][:30], *wholes[1]], wholes[2][:3] + wholes[3]]
    at = [chance.randint(3, 20) for _ in wholes]
    for _ in range(12):
        rows = chance.sample(range(len(wholes)), chance.randint(1, len(wholes)))
        lengths = [chance.randint(0, 4) for _ in rows]
        texts = [wholes[row][: at[row]] for row in rows]
        wanted = [
            drafted(text, length, family) for text, length in zip(texts, lengths, strict=True)
        ]
        assert fresh.chains(texts, lengths) == wanted
        at = [end + chance.choice([0, 1, 3, 12]) for end in at]
    assert fresh.chains(texts, [0] * len(texts)) == [[]] * len(texts)


@pytest.mark.parametrize("limit", ["table", "target", "positions"])
def test_a_request_beyond_a_limit_leaves_the_others_their_chains(
    limit: str, tmp_path: Path
) -> None:
    """Ids beyond the draft's table, which are read as its last one; ids beyond the target's, which
    are not drafted; and the draft's last position."""
    target, draft = save_pair(tmp_path, positions=64)
    wide = AutoModelForCausalLM.from_pretrained(target if limit == "table" else draft)
    if limit != "positions":
        wide.resize_token_embeddings(VOCABULARY + 20)
        # the rows that the tokenizer has no tokens for are the likeliest
        wide.get_output_embeddings().weight.data[VOCABULARY:] *= 1000
        wide.save_pretrained(target if limit == "table" else draft)
    model = AutoModelForCausalLM.from_pretrained(draft)
    others = [[5, 6, 7], [4, 4, 4]]
    asked = [8, 9, VOCABULARY + 3 if limit == "table" else VOCABULARY - 1]
    if limit == "positions":
        asked *= 21
    wanted: list[list[int]] = []
    for text in (others[0], [min(token, VOCABULARY - 1) for token in asked], others[1]):
        whole = list(text)
        while len(whole) < min(len(text) + 3, 65):
            logits_TV = model(torch.tensor([whole])).logits[0]
            whole.append(int(logits_TV[-1, :VOCABULARY].argmax()))
        wanted.append(whole[len(text) :])
    assert len(wanted[1]) == (2 if limit == "positions" else 3)
    loaded = CachedDrafter.load(draft, target)
    assert loaded.chains([others[0], asked, others[1]], [3, 3, 3]) == wanted
    assert loaded.chains([asked * 30], [3]) == [[]]


def test_the_drafts_cache_has_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With room for three texts of five the first three draft; the others once there is room, and
    no row is allocated then."""
    monkeypatch.setattr("data_gen.engines.drafter.PAGE", 16)
    bound = 128  # bytes of a row: a layer's keys and values of 2 heads of width 8, in float32
    few = CachedDrafter(drafter().model, cache_gib=6 * 16 * bound / GIB)
    texts = [[*prompt, *answer][:30] for prompt, answer in TEXTS[:5]]
    wanted = [drafted(text, 3) for text in texts]
    caplog.clear()
    for _ in range(2):
        assert few.chains(texts, [3] * 5) == [*wanted[:3], [], []]
    assert few.chains(texts[3:], [3] * 2) == wanted[3:]
    assert few.chains(texts, [0, 3, 0, 3, 3]) == [[], wanted[1], [], *wanted[3:]]
    assert few.chains([[7] * 200, texts[0]], [3, 3]) == [[], wanted[0]]
    (line,) = {entry.getMessage() for entry in caplog.records}
    assert line == "the draft's KV cache is too small for all requests: some draft nothing"
    with pytest.raises(InputError, match="draft_cache_gib=1e-07 has no room for 16 tokens of 128"):
        CachedDrafter(drafter().model, cache_gib=1e-7)


def test_a_step_reads_a_part_of_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others draft meanwhile."""
    monkeypatch.setattr("data_gen.engines.drafter.READ", 40)
    monkeypatch.setattr("data_gen.engines.drafter.BLOCK", 16)
    fresh = CachedDrafter(drafter().model)
    long, short = [*range(100)], [5, 6, 7]
    passed: list[int] = []
    steps = []
    with fresh.model.register_forward_pre_hook(lambda _, args: passed.append(args[0].numel())):
        for _ in range(4):
            passed.clear()
            steps.append(fresh.chains([long, short], [2, 2]))
            assert sum(passed) <= 40 + 2 * 3 + 2
    assert steps[:2] == [[[], drafted(short, 2)]] * 2
    assert steps[2:] == [[drafted(long, 2), drafted(short, 2)]] * 2
