"""What methods decode, transformers' own assisted generation among them, and that replay says what
decoding does."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import make_shard
from data_gen.texts.prompts import Prompt
from data_gen.texts.written import Work
from data_gen.traces import texts_of
from pipelines.evaluate.methods import (
    AT_ROOT,
    BEST_STATIC,
    BRANCHING,
    CHAIN,
    PLAIN,
    Assistant,
    Decoding,
    Method,
    static_methods,
    tuned_assistants,
)
from pipelines.evaluate.replays import replay
from pipelines.evaluate.stage import turns
from pipelines.pair.stage import recipe
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import LookupRule, Mode
from selector.export.writer import config_of
from selector.latency import Verification
from selector.runtime.network import Network
from selector.runtime.selector import Selector, Tuned
from selector.schema import EARLY, LIGHT
from selector.train.data import Texts, Timed
from selector.train.tuning import StaticTable, best_static
from tests.pipelines.runs import UNTEMPLATED, demo_config
from tests.selector.synthetic import opinionated, profile, texts

SPACE = ActionSpace.of_pairs()
VERIFIERS = ("specinfer", "traversal")
SAMPLING, ACTION = Sampling(0.8), Action(2, 1, 3)
TOKENS, TEXTS = 20, 60
PROMPT = [5, 17, 203, 44, 91]
CONFIG = demo_config(
    *UNTEMPLATED,
    f"verifiers=[{','.join(VERIFIERS)}]",
    "train.verifier=traversal",
    f"data.tokens={TOKENS}",
)
PROFILE = replace(profile(), verify=dict.fromkeys(VERIFIERS, Verification()))


def static(name: str, verifier: str, tree: Action) -> Method:
    return Method(name, verifier, Mode(SAMPLING, tree))


def test_what_the_last_step_yields_beyond_the_limit_does_not_count(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in replay. Of a step's tokens all do."""
    method = static("static", "traversal", Action(4, 0, 8))
    found = method.decode(pair, SAMPLING, PROMPT, 24, seed=3)
    assert found.tokens == 24 < found.block_tokens and len(found.drafted) == found.steps
    prompt = torch.tensor([PROMPT])
    greedy = pair.target.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[
        0, 5:
    ].tolist()
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", [greedy[9]])
    ended = method.decode(pair, Sampling(0), PROMPT, 24, seed=3)
    assert ended.tokens == greedy.index(greedy[9]) + 1 <= ended.block_tokens


def test_what_decodes_alike_is_decoded_once() -> None:
    """A verifier makes a difference where a tree is drafted; where tokens are copied alone, it
    makes none."""
    rule = LookupRule(2, 16)
    copying = {
        (name, tree): Method("rule", name, Mode(Sampling(0.0), tree, rule=rule))
        for name in VERIFIERS
        for tree in (EMPTY, Action(1, 2, 0))
    }
    fixed = {key: static("static", *key) for key in copying}
    for methods in (copying, fixed):
        assert len({method.identity for method in methods.values()}) == 3
        assert methods["specinfer", EMPTY].identity == methods["traversal", EMPTY].identity
    assert {each.identity for each in copying.values()}.isdisjoint(
        each.identity for each in fixed.values()
    )
    selecting = Method("selector", "traversal", copying["traversal", EMPTY].mode, opinionated())
    assert selecting.identity == copying["specinfer", EMPTY].identity


def test_static_trees_are_the_fastest_of_their_kind() -> None:
    """With one verifier that is always the better one by a little."""
    data = texts(10, seed=4)
    data.survivals = {
        "traversal": data.survivals["traversal"],
        "specinfer": 0.95 * data.survivals["traversal"],
    }
    methods = {method.name: method for method in static_methods(data, VERIFIERS, PROFILE)}
    assert next(iter(methods)) == PLAIN and methods[PLAIN].mode.action == EMPTY
    speed_A = StaticTable.of(Timed(data, "traversal", PROFILE)).speeds()
    best = methods[BEST_STATIC]
    assert best.verifier == "traversal" and SPACE.index(best.mode.action) == int(speed_A.argmax())
    assert "static tree, traversal" not in methods and "static tree, specinfer" in methods
    kinds: dict[str, Callable[[Action], bool]] = {
        BRANCHING: lambda tree: tree.K > 1,
        AT_ROOT: lambda tree: tree.L1 == 0 or tree.K == 1,
        CHAIN: lambda tree: tree.K == 1 and tree != EMPTY,
    }
    for name, belongs in kinds.items():
        fastest = max(float(speed_A[a]) for a, tree in enumerate(SPACE.trees) if belongs(tree))
        assert float(speed_A[SPACE.index(methods[name].mode.action)]) == fastest, name


@pytest.fixture(scope="module")
def labelled(pair: ModelPair) -> tuple[Texts, list[Prompt]]:
    """Texts of half the prompts, labelled; and the other half, to decode."""
    words, generator = pair.tokenizer.decode(range(260, 290)).split(), random.Random(5)
    sentences = [" ".join(generator.choices(words, k=8)) for _ in range(2 * TEXTS)]
    prompts = [Prompt(f"p{n}", text, "words", f"s{n}") for n, text in enumerate(sentences)]
    work = Work("test", SAMPLING, tuple((prompt, 0) for prompt in prompts[:TEXTS]))
    return texts_of(make_shard(pair, recipe(CONFIG), work), VERIFIERS), prompts[TEXTS:]


def methods_of(data: Texts) -> dict[str, Method]:
    timed = Timed(data, "traversal", PROFILE)
    best = best_static(timed, StaticTable.of(timed))
    chains = tuple(SPACE.index(SPACE.chain(length)) for length in range(0, 17, 2))
    lookups = tuple(range(len(SPACE.trees), len(SPACE)))
    mode = Mode(timed.sampling, best.action, (EARLY, LIGHT), best.speed, 0.5, (*chains, *lookups))
    module = opinionated()
    tuned = Tuned(
        mode,
        Selector(
            Network(module.state_dict(), config_of(module, "traversal", best.action, [mode])),
            PROFILE,
            [mode],
        ),
    )
    return {
        "chain": static("static", "specinfer", Action(1, 5, 0)),
        "tree": static("static", "traversal", ACTION),
        "selector": Method("selector", "traversal", mode, module, tuned),
        "lookups": Method("lookups", "traversal", replace(best, rule=LookupRule(1, 8))),
    }


def quotient(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float]:
    """Of sums, and its standard error."""
    value = sum(tops) / sum(bottoms)
    return value, math.sqrt(
        sum((t - value * b) ** 2 for t, b in zip(tops, bottoms, strict=True))
    ) / sum(bottoms)


@pytest.mark.parametrize("name", ["chain", "tree", "selector", "lookups"])
def test_replay_says_what_decoding_does(
    pair: ModelPair, labelled: tuple[Texts, list[Prompt]], name: str
) -> None:
    """Tokens per step of other texts, decoded: z is below 4. The selector has learnt nothing, but
    its choices vary."""
    data, prompts = labelled
    method = methods_of(data)[name]
    decoded: list[Decoding] = []
    for number, prompt in enumerate(prompts):
        tokens = pair.tokenizer(prompt.text)["input_ids"][: CONFIG.prompts.tokens]
        decoded.append(method.decode(pair, SAMPLING, tokens, TOKENS, seed=number))
    timed = Timed(data, method.verifier, PROFILE)
    replayed = replay(timed, method.mode, method.network)
    # what is beyond the end does not count
    own = [min(each.block_tokens, TOKENS) for each in decoded]
    found = quotient(own, [each.steps for each in decoded])
    said = quotient(replayed.tokens_X.tolist(), replayed.steps_X.tolist())
    assert said[0] == pytest.approx(replayed.block_efficiency)
    assert abs(found[0] - said[0]) < 4 * math.hypot(found[1], said[1])
    assert math.hypot(found[1], said[1]) < 0.1 * found[0]  # or else the comparison says nothing
    actions = {action for each in decoded for action in each.drafted}
    assert (len(actions) == 1) == (method.mode.decider == "static")


def test_every_method_takes_every_place_over_as_many_rounds_as_there_are_methods() -> None:
    """And different places in fewer rounds."""
    items = list("abcdef")
    for rounds in (1, 2, 3, 4, 6):
        orders = turns(items, rounds)
        assert all(sorted(order) == items for order in orders)
        assert all(len({order.index(item) for order in orders}) == rounds for item in items)


@pytest.mark.parametrize(
    "assistant", [Assistant(), Assistant(3), Assistant(10, 2)], ids=lambda own: own.name
)
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.7, 0.9)], ids=str)
def test_assisted_generation_decodes_to_the_limit_and_leaves_the_pair_as_it_was(
    pair: ModelPair, sampling: Sampling, assistant: Assistant
) -> None:
    before = pair.draft.generation_config.to_dict()
    found = assistant.decode(pair, sampling, PROMPT, 24, seed=1)
    assert found.tokens == len(found.text) == 24 and found.seconds > 0
    # one token more than was drafted
    assert 24 / (1 + (assistant.tokens or 20)) <= found.steps <= 24
    assert pair.draft.generation_config.to_dict() == before


def test_the_library_is_tuned_by_what_is_fastest(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the chains and of the lookups, on prompts of which the slower half sees few."""
    best, asked = {Assistant(4), Assistant(10, 2)}, list[Assistant]()

    def decode(self: Assistant, *_: Any) -> Decoding:
        asked.append(self)
        return Decoding(
            tokens=10,
            seconds=1.0 if self in best else 2.0 + (self.tokens == 1),
            steps=5,
            block_tokens=10,
        )

    monkeypatch.setattr(Assistant, "decode", decode)
    found = tuned_assistants(pair, Sampling(0), [PROMPT] * 6, 24, seed=1)
    assert found == [Assistant(), Assistant(4), Assistant(10, 2)]
    assert [own.name for own in found] == [
        "assisted generation",
        "assisted generation, tuned",
        "prompt lookup",
    ]
    counts = Counter(asked)
    assert counts[Assistant(4)] > counts[Assistant(1)] == 3  # the first call of all does not count
