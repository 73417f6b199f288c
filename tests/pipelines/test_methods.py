"""What methods decode, transformers' own assisted generation among them, and that replay says what
decoding does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
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
from pipelines.evaluate.replays import rank_correlation, replay
from pipelines.evaluate.stage import turns
from pipelines.pair.stage import recipe
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import LookupRule, Setting
from selector.export.writer import config_of
from selector.latency import Verification
from selector.runtime.network import Network
from selector.runtime.selector import Policy, Selector
from selector.schema import EARLY, LIGHT
from selector.train.data import Texts, Timed
from selector.train.tuning import StaticTable, best_static
from tests.pipelines.runs import UNTEMPLATED, demo_config
from tests.selector import logged
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


def static(verifier: str, tree: Action) -> Method:
    return Method("static", verifier, Setting(SAMPLING, tree))


def test_what_the_last_step_yields_beyond_the_limit_does_not_count(pair: ModelPair) -> None:
    """Nor in replay. Of a step's tokens all do."""
    method = static("traversal", Action(4, 0, 8))
    decoded = method.decode(pair, SAMPLING, PROMPT, 24, seed=3)
    assert decoded.tokens == 24 < decoded.block_tokens
    assert len(decoded.drafted) == decoded.steps


def test_what_decodes_alike_is_decoded_once() -> None:
    """A verifier makes a difference where a tree is drafted; where tokens are copied alone, it
    makes none."""
    keys = list(product(VERIFIERS, (EMPTY, Action(1, 2, 0))))
    fixed = {key: static(*key) for key in keys}
    copying = {
        key: replace(method, setting=replace(method.setting, rule=LookupRule(2, 16)))
        for key, method in fixed.items()
    }
    for methods in (copying, fixed):
        assert len({method.identity for method in methods.values()}) == 3
        assert methods["specinfer", EMPTY].identity == methods["traversal", EMPTY].identity
    ranked = {
        static(verifier, Action.ranked([[0], [1], [0, 0]])).identity for verifier in VERIFIERS
    }
    assert len(ranked) == 1, "each of its tokens is certain"
    copying_identities = {method.identity for method in copying.values()}
    assert copying_identities.isdisjoint(method.identity for method in fixed.values())
    selecting = replace(copying["traversal", EMPTY], name="selector", network=opinionated())
    assert selecting.identity == copying["specinfer", EMPTY].identity


def test_static_trees_are_the_fastest_of_their_kind() -> None:
    """With one verifier that is always the better one by a little."""
    data = texts(10, seed=4)
    data.survivals = {
        "traversal": data.survivals["traversal"],
        "specinfer": 0.95 * data.survivals["traversal"],
    }
    methods = {method.name: method for method in static_methods(data, VERIFIERS, PROFILE)}
    assert next(iter(methods)) == PLAIN and methods[PLAIN].setting.action == EMPTY
    speed_A = StaticTable.of(Timed(data, "traversal", PROFILE)).speeds()
    best = methods[BEST_STATIC]
    assert best.verifier == "traversal" and SPACE.index(best.setting.action) == int(
        speed_A.argmax()
    )
    assert "static tree, traversal" not in methods and "static tree, specinfer" in methods
    kinds: dict[str, Callable[[Action], bool]] = {
        BRANCHING: lambda tree: tree.K > 1,
        AT_ROOT: lambda tree: tree.L1 == 0 or tree.K == 1,
        CHAIN: lambda tree: tree.K == 1 and tree != EMPTY,
    }
    for name, belongs in kinds.items():
        fastest = max(float(speed_A[a]) for a, tree in enumerate(SPACE.trees) if belongs(tree))
        assert float(speed_A[SPACE.index(methods[name].setting.action)]) == fastest, name


def test_a_rank_correlation_is_with_what_happened() -> None:
    """That of whoever knows is 1, of whoever is always wrong -1, and of whoever says one thing
    0."""
    data = logged.timed(count=6)
    labelled_RA = data.space.efficiencies(data.survivals_RS)
    predicted = (labelled_RA, -labelled_RA, torch.ones_like(labelled_RA))
    assert [rank_correlation(tokens_RA, data) for tokens_RA in predicted] == pytest.approx(
        [1, -1, 0]
    )


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
    setting = Setting(
        timed.sampling, best.action, (EARLY, LIGHT), best.speed, 0.5, (*chains, *lookups)
    )
    module = opinionated()
    policy = Policy(
        setting,
        Selector(
            Network(module.state_dict(), config_of(module, "traversal", best.action, [setting])),
            PROFILE,
            [setting],
        ),
    )
    return {
        "chain": static("specinfer", Action(1, 5, 0)),
        "tree": static("traversal", ACTION),
        "selector": Method("selector", "traversal", setting, module, policy),
        "lookups": Method("lookups", "traversal", replace(best, rule=LookupRule(1, 8))),
    }


def quotient(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float]:
    """Of sums, and its standard error."""
    value = sum(numerators) / sum(denominators)
    squares = [(n - value * d) ** 2 for n, d in zip(numerators, denominators, strict=True)]
    return value, math.sqrt(sum(squares)) / sum(denominators)


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
    replayed = replay(Timed(data, method.verifier, PROFILE), method.setting, method.network)
    # what is beyond the end does not count
    tokens_per_text = [min(text.block_tokens, TOKENS) for text in decoded]
    value, error = quotient(tokens_per_text, [text.steps for text in decoded])
    expected, other_error = quotient(replayed.tokens_X.tolist(), replayed.steps_X.tolist())
    assert expected == pytest.approx(replayed.block_efficiency)
    assert abs(value - expected) < 4 * math.hypot(error, other_error)
    # or else the comparison says nothing
    assert math.hypot(error, other_error) < 0.1 * value
    actions = {action for text in decoded for action in text.drafted}
    assert (len(actions) == 1) == (method.setting.decider == "static")


def test_every_method_takes_every_place_over_as_many_rounds_as_there_are_methods() -> None:
    """And different places in fewer rounds."""
    items = list("abcdef")
    for rounds in (1, 2, 3, 4, 6):
        orders = turns(items, rounds)
        assert all(sorted(order) == items for order in orders)
        assert all(len({order.index(item) for order in orders}) == rounds for item in items)


@pytest.mark.parametrize("assistant", [Assistant(), Assistant(3), Assistant(10, 2)], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.7, 0.9)], ids=str)
def test_assisted_generation_decodes_to_the_limit_and_leaves_the_pair_as_it_was(
    pair: ModelPair, sampling: Sampling, assistant: Assistant
) -> None:
    before = pair.draft.generation_config.to_dict()
    decoded = assistant.decode(pair, sampling, PROMPT, 24, seed=1)
    assert decoded.tokens == len(decoded.text) == 24 and decoded.seconds > 0
    # one token more than was drafted
    assert 24 / (1 + (assistant.tokens or 20)) <= decoded.steps <= 24
    assert pair.draft.generation_config.to_dict() == before


def test_the_library_is_tuned_by_what_is_fastest(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = [Assistant(4), Assistant(10, 2)]

    def decode(self: Assistant, *_: Any) -> Decoding:
        return Decoding(tokens=10, seconds=2.0 - (self in best), steps=5, block_tokens=10)

    monkeypatch.setattr(Assistant, "decode", decode)
    tuned = tuned_assistants(pair, Sampling(0), [PROMPT] * 2, 24, seed=1)
    assert tuned == [Assistant(), *best]
