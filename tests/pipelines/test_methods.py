"""What methods decode, and that replay says what decoding does."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt
from data_gen.texts.recorded import texts_of
from pipelines.config import load_config
from pipelines.evaluate.methods import (
    AT_ROOT,
    BEST_BY_KIND,
    BEST_STATIC,
    BRANCHING,
    PLAIN,
    SELECTOR,
    Decoding,
    Method,
    Task,
    row_of,
    static_methods,
)
from pipelines.evaluate.replays import repeats
from pipelines.pair.loading import recipe
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import LookupRule, Mode
from selector.export.deployed import DeployedSelector, config_of
from selector.latency import gpu_like
from selector.runtime.selector import Selector
from selector.runtime.tuned import Tuned
from selector.schema import EARLY, LIGHT, MATCH
from selector.train.data import Texts, Timed
from selector.train.recent_acceptance import RecentAcceptance
from selector.train.tuning import StaticTable, best_static, static_replay
from tests.selector.synthetic import opinionated, texts
from tests.selector.synthetic import profile as synthetic_profile

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
SPACE = ActionSpace.of_pairs()
VERIFIERS = ("specinfer", "traversal")
SAMPLING, ACTION = Sampling(0.8), Action(2, 1, 3)
TOKENS, TEXTS = 20, 80
CONFIG = load_config(DEMO, [f"verifiers=[{','.join(VERIFIERS)}]", "train.verifier=traversal", f"data.tokens={TOKENS}"])
PROFILE = gpu_like("pair", VERIFIERS, 0.2)


def static(name: str, verifier: str, tree: Action, by_kind: dict[str, tuple[str, Action]] | None = None) -> Method:
    return Method(name, verifier, Mode(0.8, 1.0, tree), by_kind=by_kind or {})


def task(kind: str = "code") -> Task:
    return Task([5, 17, 203, 44, 91], kind, 24, seed=3)


def test_plain_decoding_is_a_token_a_step(pair: ModelPair) -> None:
    found = static(PLAIN, "traversal", EMPTY).decode(pair, SAMPLING, task())
    assert (found.tokens, found.steps, found.block_tokens) == (24, 24, 24)
    assert found.drafted == ["(1, 0, 0)"] * 24
    assert 0 < sum(found.seconds_of_steps) <= found.seconds
    assert found.select_seconds < 0.05 * sum(found.seconds_of_steps)


def test_what_the_last_step_yields_beyond_the_limit_does_not_count(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in replay. Of a step's tokens all do."""
    method = static("static", "traversal", Action(4, 0, 8))
    found = method.decode(pair, SAMPLING, task())
    assert found.tokens == 24 < found.block_tokens and len(found.drafted) == found.steps
    prompt = torch.tensor([task().prompt])
    greedy = pair.target.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", [greedy[9]])
    ended = method.decode(pair, Sampling(0), task())
    assert ended.tokens == greedy.index(greedy[9]) + 1 <= ended.block_tokens


def test_what_decodes_alike_is_decoded_once() -> None:
    """A verifier makes a difference where a tree is drafted; where tokens are copied alone, it makes none."""
    rule = LookupRule(2, 16)
    copying = {
        (name, tree): Method("rule", name, Mode(0.0, 1.0, tree, (MATCH,), rule=rule))
        for name in VERIFIERS
        for tree in (EMPTY, Action(1, 2, 0))
    }
    fixed = {key: static("static", *key) for key in copying}
    for methods in (copying, fixed):
        assert len({method.identity("code") for method in methods.values()}) == 3
        assert methods["specinfer", EMPTY].identity("code") == methods["traversal", EMPTY].identity("code")
    assert {each.identity("code") for each in copying.values()}.isdisjoint(
        each.identity("code") for each in fixed.values()
    )
    selecting = Method("selector", "traversal", copying["traversal", EMPTY].mode, opinionated())
    assert selecting.identity("code") == copying["specinfer", EMPTY].identity("code")
    by_kind = static("by kind", "traversal", ACTION, by_kind={"data": ("specinfer", EMPTY)})
    assert by_kind.identity("data") == fixed["traversal", EMPTY].identity("data")
    assert by_kind.identity("code") == static("static", "traversal", ACTION).identity("code")


def test_a_method_knows_whether_it_drafts_branches() -> None:
    chain, module = Action(1, 4, 0), opinionated()
    chains = replace(Mode(0.0, 1.0, chain, (EARLY,)), allowed=(0, *module.space.chain_positions))
    assert not static("static", "traversal", chain).branches and static("static", "traversal", ACTION).branches
    assert static("by kind", "traversal", chain, by_kind={"data": ("traversal", ACTION)}).branches
    assert not Method("selector", "traversal", chains, module).branches
    for allowed in ((), (0, module.space.index(ACTION))):
        assert Method("selector", "traversal", replace(chains, allowed=allowed), module).branches


def test_each_kind_of_prompts_has_its_own_tree(pair: ModelPair) -> None:
    method = static("by kind", "traversal", ACTION, by_kind={"data": ("specinfer", Action(1, 4, 0))})
    assert method.action is None and static("static", "traversal", ACTION).action == ACTION
    assert set(method.decode(pair, SAMPLING, task("code")).drafted) == {str(ACTION)}
    assert set(method.decode(pair, SAMPLING, task("data")).drafted) == {"(1, 4, 0)"}
    own = static("static", "specinfer", Action(1, 4, 0)).decode(pair, SAMPLING, task())
    assert method.decode(pair, SAMPLING, task("data")).block_tokens == own.block_tokens


def of_kind(data: Texts, kind: str) -> Texts:
    return data.take(torch.tensor([x for x, own in enumerate(data.kind_X) if own == kind]))


def test_trees_by_kind_are_replayed_by_kind() -> None:
    data = texts(10, seed=3)
    times = synthetic_profile()
    method = static("by kind", "traversal", ACTION, by_kind={"prose": ("traversal", Action(1, 8, 0))})
    found = method.replay(data, times)
    for kind, action in (("code", ACTION), ("prose", Action(1, 8, 0))):
        alone = static_replay(Timed(of_kind(data, kind), "traversal", times), action)
        mine = torch.tensor([x for x, own in enumerate(data.kind_X) if own == kind])
        for name in ("tokens_X", "seconds_X", "steps_X"):
            assert torch.allclose(getattr(found, name)[mine], getattr(alone, name))


def test_static_trees_are_the_fastest_of_their_kind() -> None:
    """With one verifier that is always the better one by a little."""
    data, times = texts(10, seed=4), gpu_like("pair", VERIFIERS, 0.2)
    data.survivals = {"traversal": data.survivals["traversal"], "specinfer": 0.95 * data.survivals["traversal"]}
    methods = {method.name: method for method in static_methods(data, VERIFIERS, times)}
    assert next(iter(methods)) == PLAIN and methods[PLAIN].action == EMPTY
    speed_A = StaticTable.of(Timed(data, "traversal", times)).speeds()
    best = methods[BEST_STATIC]
    assert (
        best.verifier == "traversal" and "static tree, traversal" not in methods and "static tree, specinfer" in methods
    )
    assert best.action is not None and SPACE.index(best.action) == int(speed_A.argmax())

    def fastest(name: str) -> float:
        action = methods[name].action
        assert action is not None
        return float(speed_A[SPACE.index(action)])

    branching = max(float(speed_A[a]) for a, action in enumerate(SPACE.trees) if action.K > 1)
    root = max(float(speed_A[a]) for a, action in enumerate(SPACE.trees) if action.L1 == 0 or action.K == 1)
    assert (fastest(BRANCHING), fastest(AT_ROOT)) == (branching, root)
    for kind in ("code", "prose"):
        own_A = StaticTable.of(Timed(of_kind(data, kind), "traversal", times)).speeds()
        tree = methods[BEST_BY_KIND].by_kind[kind]
        assert tree == ("traversal", SPACE.actions[int(own_A.argmax())])


@pytest.fixture(scope="module")
def labelled(pair: ModelPair) -> tuple[Texts, list[Prompt]]:
    """Texts of half the prompts, labelled; and the other half, to decode."""
    words, generator = pair.tokenizer.decode(range(260, 290)).split(), random.Random(5)
    sentences = [" ".join(generator.choices(words, k=8)) for _ in range(2 * TEXTS)]
    prompts = [Prompt(f"p{n}", text, "words", f"s{n}") for n, text in enumerate(sentences)]
    works = [Work("test", SAMPLING, tuple((prompt, 0) for prompt in prompts[:TEXTS]))]
    (table,) = (make_shard(pair, recipe(CONFIG), work).table for work in works)
    return texts_of(table, VERIFIERS), prompts[TEXTS:]


def methods_of(data: Texts) -> dict[str, Method]:
    timed = Timed(data, "traversal", PROFILE)
    best = best_static(timed, StaticTable.of(timed))
    chains = tuple(SPACE.index(SPACE.chain(length)) for length in range(0, 17, 2))
    lookups = tuple(range(len(SPACE.trees), len(SPACE)))
    mode = Mode(*timed.setting, best.action, (EARLY, LIGHT), best.speed, 0.5, (*chains, *lookups))
    module = opinionated()
    made = DeployedSelector(module, PROFILE, [mode], "traversal")
    tuned = Tuned(mode, Selector(made, config_of(module, "traversal", best.action, [mode]), PROFILE, [mode]))
    rule = RecentAcceptance.tuned(timed, best)
    return {
        "chain": static("static", "specinfer", Action(1, 5, 0)),
        "tree": static("static", "traversal", ACTION),
        "rule": Method("rule", "traversal", rule.mode, chooser=rule),
        "selector": Method("selector", "traversal", mode, module, tuned),
        "lookups": Method("lookups", "traversal", replace(best, feature_levels=(MATCH,), rule=LookupRule(1, 8))),
    }


def test_texts_that_loop_are_told_from_others_that_repeat_themselves() -> None:
    """Six texts under two settings in turn: of each setting one loops, one has long repeats, and one has neither."""
    data = texts(6, seed=5)
    data.settings, data.setting_X = [(0.5, 1.0), (1.0, 1.0)], torch.tensor([0, 1] * 3)
    data.scalar("match")[torch.isin(data.text_R, torch.tensor([0, 2, 5]))] = 20  # text 0 loops, too
    loops_X = torch.tensor([0.3, 0.0, 0.1, 0.9, 0.0, 0.2])
    mine, base = (static(name, "traversal", tree) for name, tree in ((SELECTOR, Action(1, 3, 0)), (BEST_STATIC, EMPTY)))
    profile = synthetic_profile()
    rows = repeats({key: [mine, base] for key in data.settings}, data, loops_X, profile)
    found = {(row["temperature"], row["texts"]): row for row in rows}
    expected = {"that loop": (0, 3), "with other long repeats": (2, 5), "without either": (4, 1)}
    assert found.keys() == {(setting[0], name) for setting in data.settings for name in expected}
    for name, numbers in expected.items():
        for setting, number in zip(data.settings, numbers, strict=True):
            row, part = found[setting[0], name], data.take(torch.tensor([number]))
            saved = base.replay(part, profile).seconds_X - mine.replay(part, profile).seconds_X
            assert row["count"] == 1 and row["seconds_saved"] == pytest.approx(float(saved), rel=0.1)


def quotient(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float]:
    """Of sums, and its standard error."""
    value = sum(tops) / sum(bottoms)
    return value, math.sqrt(sum((t - value * b) ** 2 for t, b in zip(tops, bottoms, strict=True))) / sum(bottoms)


@pytest.mark.parametrize("name", ["chain", "tree", "rule", "selector", "lookups"])
def test_replay_says_what_decoding_does(pair: ModelPair, labelled: tuple[Texts, list[Prompt]], name: str) -> None:
    """Tokens per step of other texts, decoded: z is below 4. The selector here has learnt nothing; its choices vary
    from root to root, all the same."""
    data, prompts = labelled
    method = methods_of(data)[name]
    decoded: list[Decoding] = []
    for number, prompt in enumerate(prompts):
        tokens = pair.tokenizer(prompt.text)["input_ids"][: CONFIG.prompts.tokens]
        decoded.append(method.decode(pair, SAMPLING, Task(tokens, prompt.kind, TOKENS, seed=number)))
    replayed = method.replay(data, PROFILE)
    own = [
        min(each.block_tokens, TOKENS) for each in decoded
    ]  # what the last step yields beyond the end does not count
    found = quotient(own, [each.steps for each in decoded])
    said = quotient(replayed.tokens_X.tolist(), replayed.steps_X.tolist())
    assert said[0] == pytest.approx(replayed.block_efficiency)
    assert abs(found[0] - said[0]) < 4 * math.hypot(found[1], said[1])
    assert math.hypot(found[1], said[1]) < 0.1 * found[0]  # or else the comparison says nothing
    actions = {action for each in decoded for action in each.drafted}
    assert (len(actions) == 1) == (method.action is not None)


def test_a_row_holds_the_method_and_what_it_decoded(pair: ModelPair) -> None:
    method = static("static", "traversal", ACTION)
    decoding = method.decode(pair, SAMPLING, task())
    row = row_of(method, decoding)
    assert (row["method"], row["verifier"], row["action"], row["drafts"]) == (
        "static",
        "traversal",
        [2, 1, 3],
        "(2, 1, 3)",
    )
    assert all(row[name] == value for name, value in vars(decoding).items())
