"""The engines' plug-ins: decisions from token ids, however they arrive; and the engines' own
classes around them.

No engine is run here; small classes stand in for theirs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from data_gen.engines import steps
from data_gen.engines.requests import KEPT, Requests
from data_gen.engines.text import NAME, TextSelector
from data_gen.engines.vllm import Proposer
from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from selector.actions import ActionSpace
from selector.decision import LookupRule, Setting
from selector.export.writer import write_artefact
from selector.runtime.selector import load_selector
from selector.runtime.tokens import TokenStatistics
from selector.schema import DRAFTER, LOG, SCALARS_KEY, TEXT, InputError
from selector.train.module import SelectorModule
from tests.checks import python
from tests.data_gen.test_drafter import TEXTS, drafted, drafter
from tests.selector import logged
from tests.selector.synthetic import setting_row
from tests.tiny import small_pair

LONGEST, ROOM = 6, 90  # drafted tokens and the model's positions, of the engines below


def exported(folder: Path, longest: int) -> Path:
    """The artefact of a log's selector, for chains of so many tokens and copies of twenty. It has
    learnt nothing, but its choices vary from root to root: those of its network, or without chains
    those of a lookup rule."""
    space = ActionSpace.chains(longest, 20)
    texts = logged.texts()
    rows = []
    for prompt, generated in TEXTS:
        knowledge = DrafterKnowledge(prompt, Sampling(0.0), TokenStatistics.empty())
        for token in generated:
            knowledge.committed([token], [1.0])
            rows.append(knowledge.features(DRAFTER)[SCALARS_KEY].numpy())
    scalars_RF = torch.from_numpy(np.resize(rows, texts.scalars_RF.shape))
    texts = replace(texts, scalars_RF=scalars_RF)
    torch.manual_seed(1)
    module = SelectorModule(
        "regressor", DRAFTER, [], {"hidden": [8]}, schema=LOG.name, space=space.to_json()
    )
    module.begin_at(texts, "naive", torch.arange(len(texts.length_R)))
    with torch.no_grad():
        list(module.network.modules())[-1].weight.mul_(25.0)
    setting = Setting(Sampling(0.0), space.chain(2), (TEXT,), 200.0, level=TEXT)
    if not longest:
        setting = replace(setting, action=space.chain(0), feature_levels=(), rule=LookupRule(2, 6))
    entries = []
    for batch in (2, 4):  # one request is decided as two are
        entries.append(setting_row(replace(setting, batch=batch), torch.ones(len(space.trees))))
    profile = logged.profile()
    pair = {"target": "t", "draft": "d", "fingerprint": profile.pair}
    facts = {"pair": pair, "metrics": {}, "run_id": "none"}
    statistics = TokenStatistics.empty()
    write_artefact(
        folder, module, profile, "naive", setting.action, entries, facts, tokens=statistics
    )
    return folder


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("copies") / "selector", 0)


loaded = cache(load_selector)


def test_texts_grow_as_if_they_were_read_at_once(
    copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also long prompts, of which every step reads a part."""
    monkeypatch.setattr("data_gen.engines.requests.READ", 3)
    monkeypatch.setattr("data_gen.engines.requests.NEW", 2)
    chosen = TextSelector(copies, way_out=False)
    requests = Requests(partial(chosen.text, ()))
    policy = load_selector(copies).at(0.0, level=TEXT)
    lengths = set()
    for prompt, generated in TEXTS:
        read = 0
        for end in range(1, len(generated), 2):
            (text,) = requests.step([np.array(prompt + generated[:end], np.int32)], [min(end, 2)])
            read = min(read + 5, len(prompt) + end)
            if read < len(prompt) + end:
                assert text is None
                continue
            assert text is not None
            knowledge = DrafterKnowledge(prompt, Sampling(0.0), loaded(copies).tokens)
            knowledge.committed(generated[:end])
            action = policy.select(knowledge.features(TEXT))
            length = action.L1 if action.copies else 0
            lengths.add(length)
            for most in (LONGEST, 20):
                expected = knowledge.text.index.proposal(min(length, most))
                assert chosen.drafts([text], [most]) == [expected]
            assert torch.equal(*(known.features(TEXT)[SCALARS_KEY] for known in (text, knowledge)))
        assert read == len(prompt) + end
    assert len(lengths) > 1


def test_requests_that_miss_steps_go_on_and_others_begin_anew(copies: Path) -> None:
    """However many steps, while no more are left out than are kept; also where one's text begins
    another's, and where two are equal."""
    chosen = TextSelector(copies)
    requests = Requests(partial(chosen.text, ()))
    (prompt, answer), *_ = TEXTS

    def step(*texts: list[int]) -> list[DrafterKnowledge | None]:
        return requests.step([np.array([*prompt, *text]) for text in texts], [1] * len(texts))

    first, second, same = step([5], [5, 6], [5])
    assert first is not same
    for _ in range(5):
        step([99, *answer])
    assert set(step([5, 7], [5, 7])) == {first, same}
    assert step([5, 6, 7]) == [second]
    assert [text.text.start for text in (first, second)] == [len(prompt), len(prompt) + 1]
    for number in range(KEPT + 1):
        step([number, *answer])
    (again,) = step([5, 6, 7, 8])  # it was forgotten
    assert again is not second and list(again.text.index.tokens) == [*prompt, 5, 6, 7, 8]


def test_a_selector_that_drafts_needs_its_draft(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name its `draft` model"):
        TextSelector(exported(tmp_path / "selector", 5))
    for other in (
        {"artefact": "x"},
        {"selector": 3},
        {"selector": "x", "temperature": "0"},
        {"selector": "x", "draft_cache_gib": "1"},
        {"top_p": 1.0},
        {"selector": "x", "way_out": 0},
        None,
    ):
        with pytest.raises(
            InputError, match="selector, temperature, top_p, draft, draft_cache_gib"
        ):
            TextSelector.of(other, lambda *_: pytest.fail("no draft is named"))


def test_a_draft_is_loaded_only_where_it_may_be_asked(copies: Path, tmp_path: Path) -> None:
    """A rule that copies alone never asks it; a server without a selector does."""
    drafting = exported(tmp_path / "selector", 5)
    loaded_drafts: list[str] = []

    def load(draft: str, cache_gib: float) -> Any:
        loaded_drafts.append(draft)
        return drafter().chains

    TextSelector.of({"selector": str(copies), "top_p": 1.0, "draft": "unasked"}, load)
    TextSelector.of({"selector": str(drafting), "draft": "asked"}, load)
    TextSelector.of({"steps": str(tmp_path / "steps.jsonl"), "draft": "in turn"}, load)
    assert loaded_drafts == ["asked", "in turn"]


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, "copy"), (1.0, "chain")])
def test_each_request_is_copied_or_drafted_as_the_selector_decides(
    temperature: float, kind: str, tmp_path: Path
) -> None:
    """Requests that are decoded together: the network copies; the static chain of a setting unknown
    to it drafts."""
    folder = exported(tmp_path / "selector", 5)
    most = [6, 1, 6, 0]
    kinds = set()
    chosen = TextSelector(folder, temperature, chains=drafter().chains, way_out=False)
    policy = loaded(folder).at(temperature, batch=4, level=TEXT)
    for end in range(1, 40, 3):
        texts = [chosen.text([*prompt, *answer[:end]], len(prompt)) for prompt, answer in TEXTS[:4]]
        drafts = chosen.drafts(texts, most)
        actions = policy.select_jointly([text.features(TEXT) for text in texts])
        for text, action, limit, draft in zip(texts, actions, most, drafts, strict=True):
            index = text.text.index
            length = min(action.L1, limit)
            if action.copies:
                assert draft == index.proposal(length)
            else:
                assert draft == drafted(list(index.tokens), length)
            if draft:
                kinds.add("copy" if action.copies else "chain")
    assert kinds == {kind}


def test_what_vllm_loads_imports_no_numba() -> None:
    """vLLM 0.32 walks through all modules to replace Triton's kernels, and fails at llvmlite's."""
    code = "import sys, data_gen.engines.vllm, data_gen.engines.drafter, selector.runtime.selector"
    code += "; print({'numba', 'llvmlite'} & {*sys.modules})"
    assert python("-c", code).stdout.strip() == "set()"


def test_a_decision_that_fails_drafts_nothing_and_says_so_once(
    copies: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("it failed\nin two lines")

    proposer = Proposer(vllm_config(copies))
    monkeypatch.setattr(TextSelector, "drafts", fails)
    for _ in range(3):
        drafts = proposer.propose([[1], [1]], np.full(2, 9, np.int32), np.ones((2, ROOM), np.int32))
        assert drafts == [[], []]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "no draft: RuntimeError: it failed"


def vllm_config(folder: Path) -> Any:
    return SimpleNamespace(
        additional_config={NAME: {"selector": str(folder), "temperature": 0.0, "way_out": False}},
        speculative_config=SimpleNamespace(num_speculative_tokens=LONGEST),
        model_config=SimpleNamespace(max_model_len=ROOM),
    )


def test_vllms_rows_are_proposed_what_their_texts_ask_for_wherever_they_stand(copies: Path) -> None:
    """Called as in `GPUModelRunner.propose_draft_token_ids`; rows change places, end, begin, and
    wait for prompts."""
    random_ = random.Random(1)
    proposer = Proposer(vllm_config(copies))
    chosen = TextSelector(copies, way_out=False)
    ids, counts = np.zeros((8, ROOM), np.int32), np.zeros(8, np.int32)
    at = dict.fromkeys(range(4), 0)
    ragged = 0
    for step in range(12):
        rows = random_.sample(sorted(at), len(at) - step % 2)  # one may be left out
        sampled: list[list[int]] = []
        for row, number in enumerate(rows):
            prompt, generated = TEXTS[number]
            # its prompt is not finished
            new = 0 if step == 0 and number == 2 else random_.randrange(1, 5)
            sampled.append(generated[at[number] : at[number] + new])
            at[number] += new
            counts[row] = len(prompt) + at[number]
            ids[row] = random_.choices(range(40), k=ROOM)  # what an earlier request left
            ids[row, : counts[row]] = [*prompt, *generated[: at[number]]]
        live = [row for row, new in enumerate(sampled) if new]
        texts = [chosen.text(ids[row, : counts[row]], len(TEXTS[rows[row]][0])) for row in live]
        wanted = chosen.drafts(texts, [min(LONGEST, ROOM - counts[row] - 1) for row in live])
        proposed = proposer.propose(sampled, counts, ids, slot_mappings=None)
        assert [proposed.pop(row) for row in reversed(live)] == wanted[::-1]
        assert not any(proposed)
        ragged += len(set(map(len, wanted))) > 1
        if step == 5:
            del at[0]
            at[4] = 0
    assert ragged > 2
    counts[:] = ROOM
    assert proposer.propose([[1]] * 4, counts, ids) == [[], [], [], []]


PLAIN_SECONDS = 0.02  # of a step, in the server below


class Server:
    """Answers one request after another greedily, so that its texts do not depend on drafts; each
    step takes as long as was recorded."""

    def __init__(
        self, chosen: TextSelector, drafted_seconds: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.slowness = 1.0  # of the machine
        self.chosen = chosen
        self.drafted_seconds = drafted_seconds  # for each drafted token
        self.now = 0.0
        self.done: list[tuple[int, float]] = []  # tokens and seconds of each step
        monkeypatch.setattr(steps, "perf_counter", lambda: self.now)

    def answer(self, prompt: list[int], answer: list[int]) -> None:
        text = self.chosen.text([*prompt, answer[0]], len(prompt))
        at = 1
        while at < len(answer):
            (draft,) = self.chosen.drafts([text], [LONGEST])
            begin = at
            for token in draft:
                if answer[at : at + 1] != [token]:
                    break
                at += 1
            new = answer[begin : at + 1]
            at = begin + len(new)
            seconds = PLAIN_SECONDS + self.drafted_seconds * len(draft)
            self.done.append((len(new), seconds))
            self.now += self.slowness * seconds
            text.committed(new)

    def speed(self, begin: int, end: int) -> float:
        """Over plain decoding, of some steps."""
        tokens, seconds = zip(*self.done[begin:end], strict=True)
        return sum(tokens) * PLAIN_SECONDS / sum(seconds)


@cache
def greedy_answers() -> list[tuple[list[int], list[int]]]:
    """The small target's answers to the prompts, which seldom repeat themselves."""
    model = AutoModelForCausalLM.from_pretrained(small_pair()[0])
    answers = []
    for prompt, _ in TEXTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=300, do_sample=False)[0]
        answers.append((prompt, ids[len(prompt) :].tolist()))
    return answers


@pytest.mark.parametrize(("drafted_seconds", "changes"), [(0.01, False), (0.003, True)])
def test_where_drafting_does_not_pay_nothing_is_drafted(
    drafted_seconds: float,
    changes: bool,
    copies: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A drafted token takes half a plain step where the clock says a 25th; or it takes little, but
    after some requests others come that do not repeat themselves. With other numbers of requests
    it goes on."""
    steps.log_once.cache_clear()
    server = Server(TextSelector(copies), drafted_seconds, monkeypatch)
    begin = 0
    if changes:
        for prompt, answer in TEXTS:
            server.answer(prompt, answer)
        begin = len(server.done)
        assert server.speed(0, begin) > 1.3 and not caplog.records
    for prompt, answer in 2 * greedy_answers():
        server.answer(prompt, answer)
    ends = range(begin + 400, len(server.done), 50)
    assert min(server.speed(begin + 100, end) for end in ends) > 0.97
    assert server.speed(begin, begin + 100) < 0.97
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("drafting is slower than plain decoding here")
    # two requests at once are judged by themselves
    texts = [server.chosen.text([*prompt, *answer[:-1]], len(prompt)) for prompt, answer in TEXTS]
    wanted = [server.chosen.drafts(texts[:2], [LONGEST] * 2) for _ in range(steps.FIRST + 2)]
    assert any(map(any, wanted))


def test_a_machine_that_becomes_slower_does_not_end_drafting(
    copies: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its drafting steps are then slower than the plain ones before, and faster than those that
    follow."""
    steps.log_once.cache_clear()
    server = Server(TextSelector(copies), 0.003, monkeypatch)
    for slowness in (1.0, 5.0, 1.0):
        server.slowness = slowness
        for prompt, answer in 4 * TEXTS:
            server.answer(prompt, answer)
    assert not caplog.records
    assert server.speed(0, len(server.done)) > 1.3


def test_many_more_requests_than_a_selector_knows_are_not_drafted(
    copies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its settings are of two and four."""
    steps.log_once.cache_clear()
    chosen = TextSelector(copies, way_out=False)
    (prompt, answer), *_ = TEXTS
    drafted_by_batch = {}
    for batch in (8, 9, 10):
        texts = [chosen.text([*prompt, *answer], len(prompt)) for _ in range(batch)]
        drafted_by_batch[batch] = any(chosen.drafts(texts, [LONGEST] * batch))
    assert drafted_by_batch == {8: True, 9: False, 10: False}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "up to 8 requests" in line


def test_the_steps_of_a_server_without_a_selector_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of decoding alone; drafts of all lengths take turns."""
    path = tmp_path / "steps.jsonl"
    server = Server(TextSelector(None, steps=path), 0.004, monkeypatch)
    for prompt, answer in TEXTS:
        server.answer(prompt, answer)
        server.now += 5.0  # and a prompt
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(server.done) - len(TEXTS)  # a text's last step ends with its successor
    for line in lines:
        assert (line["batch"], line["passes"]) == (1, 0)
        assert line["seconds"] == pytest.approx(PLAIN_SECONDS + 0.004 * (line["verified"] - 1))
        assert 12 < line["context"] < 72
    answered = sum(line["tokens"] for line in lines)
    assert 0.5 < answered / sum(len(answer) for _, answer in TEXTS) < 1
    assert {line["verified"] - 1 for line in lines} >= {0, 1, 2, 4}
    with pytest.raises(InputError, match="cannot be written"):
        TextSelector(None, steps=tmp_path / "none" / "steps.jsonl")


def test_vllms_draft_is_loaded_with_the_target(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its runners count the memory that this takes, and not what is taken before."""
    target, draft = small_pair()
    config = vllm_config(exported(tmp_path / "selector", 5))
    config.additional_config[NAME] |= {"temperature": 1.0, "draft": draft, "draft_cache_gib": 0.01}
    config.model_config.model = target
    config.model_config.dtype = torch.float32
    config.device_config = SimpleNamespace(device_type="cpu")
    ids = np.array([[*prompt, answer[0]] for prompt, answer in TEXTS[:2]], np.int32)
    proposer = Proposer(config)
    assert not caplog.records
    proposer.load_model()
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert line == "the draft's KV cache: 0.01 GiB, for 83,840 tokens of all requests together"
    proposed = proposer.propose([[row[-1]] for row in ids], np.full(2, ids.shape[1]), ids)
    assert proposed == [drafted(row, 2) for row in ids.tolist()]


class Engine:
    """llama-cpp-python's `Llama`, as far as ours overrides and calls it."""

    def __init__(self, model_path: str, **options: Any) -> None:
        self.options = options
        self.n_batch = 3
        self.n_tokens = 0
        self.input_ids = np.zeros(20, np.intc)
        self.passes: list[tuple[list[int], int, bool]] = []  # tokens, cached ones, all logits
        self._batch = self._ctx = self

    def set_batch(self, batch: list[int], n_past: int, logits_all: bool) -> None:
        self.passes.append((batch, n_past, logits_all))

    def kv_cache_seq_rm(self, sequence: int, begin: int, end: int) -> None:
        assert (sequence, begin, end) == (-1, self.n_tokens, -1)

    def decode(self, batch: object) -> None:
        assert batch is self

    def eval(self, tokens: list[int]) -> None:
        self.set_batch(tokens, self.n_tokens, self._logits_all)  # type: ignore[attr-defined]
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def generate(self, tokens: list[int], *drafted: list[int]) -> Iterator[int]:
        for step in (tokens, *drafted):
            self.eval(step)
            yield step[-1]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our plug-in of llama-cpp-python, which is imported with classes that stand in for its own."""
    held = {"": {"Llama": Engine}, ".llama_speculative": {"LlamaDraftModel": object}}
    for name, values in held.items():
        stub = ModuleType(f"llama_cpp{name}")
        vars(stub).update(values)
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, "data_gen.engines.llama_cpp", raising=False)
    return import_module("data_gen.engines.llama_cpp")


def test_llama_cpp_computes_all_logits_where_it_verifies_alone(plugin: Any) -> None:
    """Of a prompt and of a plain step the last ones are enough, also of a prompt that begins as the
    last text did. There is room for a batch, as in their own class."""
    llama = plugin.VerifyingLlama("model.gguf", n_ctx=20)
    assert [*llama.generate([1, 2], [4], [5, 6, 7, 8], [9])] == [2, 4, 8, 9]
    assert [*llama.generate([3, 4], [5, 6])] == [4, 6]
    assert llama.passes == [
        ([1, 2], 0, False),
        ([4], 2, False),
        ([5, 6, 7], 3, True),
        ([9], 6, False),
        ([3, 4], 7, False),
        ([5, 6], 9, True),
    ]
    assert llama.input_ids[: llama.n_tokens].tolist() == [1, 2, 4, 5, 6, 7, 9, 3, 4, 5, 6]
    assert not llama._logits_all  # so that logprobs are refused
    assert llama.options == {"n_ctx": 20}


def test_llama_cpp_is_given_the_copies_of_its_one_text(copies: Path, plugin: Any) -> None:
    """Also where the next text begins as the last one did."""
    chosen = TextSelector(copies, way_out=False)
    drafting = plugin.SelectedDrafts(copies, way_out=False)
    lengths, random_ = set(), random.Random(0)
    (first, begun), (second, generated_second), *_ = TEXTS
    others = [(second, generated_second[:9]), (first, generated_second), (first, begun)]
    for prompt, generated in [*TEXTS, TEXTS[0], *others, TEXTS[0]]:
        end = 1
        while end < len(generated):
            ids = [*prompt, *generated[:end]]
            draft = drafting(np.array(ids, np.intc))
            assert draft.dtype == np.intc
            assert [draft.tolist()] == chosen.drafts([chosen.text(ids, len(prompt))], [len(ids)])
            lengths.add(len(draft))
            end += random_.randrange(1, len(draft) + 2)
    assert len(lengths) > 1
