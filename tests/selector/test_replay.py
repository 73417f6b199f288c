"""Replay against the decoder that it stands for, by enumeration, on worlds of the last token;
quotients of replayed speeds; compiled functions."""

from __future__ import annotations

import importlib
import math
import pkgutil
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import Tensor

import selector
from data_gen.drafting.lookup import LookupIndex
from data_gen.text_labels.labels import TextLabeller
from data_gen.trees import DraftTree
from data_gen.verification import CERTAIN, get_verifier
from selector.actions import Action, ActionSpace
from selector.jit import jit
from selector.train.replay import Lag, Ratio, Replayed, jackknifed, monotone, outcomes, replay
from tests.data_gen.worlds import normalised

SPACE = ActionSpace(2, 1, 2)
COPYING = ActionSpace(2, 1, 2, (1, 3))
VERIFIERS = ["specinfer", "nss", "traversal", "lifted_uniform"]
Tokens = tuple[int, ...]
Appended = list[tuple[Tokens, float]]


class LastTokenWorld:
    """Two tokens; both models' distributions depend on the last one. Every text begins with token
    0."""

    def __init__(self, seed: int, space: ActionSpace = SPACE) -> None:
        self.space = space  # of the labels
        self.laws: dict[tuple[str, int, Action], Appended] = {}
        generator = torch.Generator().manual_seed(seed)
        self.target_VV, self.draft_VV = normalised(
            torch.rand(2, 2, 2, generator=generator, dtype=torch.float64) ** 2 + 0.05
        )

    def probability(self, text: Tokens) -> float:
        return math.prod(float(self.target_VV[before, after]) for before, after in pairwise(text))

    def survivals(
        self,
        text: Tokens,
        names: list[str],
        siblings: int | None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        tokens_T = torch.tensor(text)
        labeller = TextLabeller(tokens_T, names, siblings, generator, self.space)
        labeller.add(self.target_VV[tokens_T], self.draft_VV[tokens_T])
        return labeller.survivals()

    def continued(self, last: int, length: int) -> Appended:
        """Every draft of so many tokens, with its probability."""
        return [
            (
                path,
                math.prod(
                    float(self.draft_VV[a, b]) for a, b in zip((last, *path), path, strict=False)
                ),
            )
            for path in product(range(2), repeat=length)
        ]

    def law(self, name: str, text: Tokens, action: Action) -> Appended:
        """What a step may append, with its probability, over drafting and verification. A lookup
        drafts nothing where the last token is new."""
        if not action.copies:
            return self.law_of_trees(name, text[-1], action)
        tree = DraftTree.from_paths(LookupIndex(text).proposal(action.L1), [[]])
        return self.appended(CERTAIN.name, text[-1], tree)

    def law_of_trees(self, name: str, last: int, action: Action) -> Appended:
        if (name, last, action) not in self.laws:
            law: Appended = []
            for trunk, on_trunk in self.continued(last, action.L1):
                below = self.continued((last, *trunk)[-1], action.L2)
                for branches in product(below, repeat=action.K):
                    drafted = on_trunk * math.prod(p for _, p in branches)
                    tree = DraftTree.from_paths(trunk, [path for path, _ in branches])
                    for tokens, probability in self.appended(name, last, tree):
                        law.append((tokens, drafted * probability))
            self.laws[name, last, action] = law
        return self.laws[name, last, action]

    def appended(self, name: str, last: int, tree: DraftTree) -> Appended:
        """What the verifier may append after a drafted tree, with its probability: the law of
        `verify`."""
        token_N = tree.tokens_N.clone()
        token_N[0] = last
        law_NV = get_verifier(name).law(tree, self.target_VV[token_N], self.draft_VV[token_N])
        return [
            ((*(tree.token(n) for n in tree.path_to(node)), token), float(law_NV[node, token]))
            for node, token in law_NV.nonzero().tolist()
        ]


def action_at(position: int, last: int, space: ActionSpace) -> int:
    """A policy that decides by what is known at a root."""
    return (7 * position + 7 * last * (position + 1)) % len(space)


def seconds_at(position: int, action: int, space: ActionSpace) -> float:
    """A step takes longer with more drafted tokens, and later in the text."""
    return 1.0 + 0.3 * space.actions[action].nodes + 0.1 * position


def passes_at(position: int, action: int, space: ActionSpace) -> bool:
    """The draft passes the root for every tree, and at some roots whatever is chosen there, as for
    a decision."""
    return bool(space.needs_draft_A[action]) or position == 2


def replayed(
    survivals_XRS: Tensor, texts: list[Tokens], space: ActionSpace, lag_M: Tensor
) -> Replayed:
    """The policy on texts of one length, after a text without a root."""
    X, R, S = survivals_XRS.shape
    actions = [[action_at(n, text[n], space) for n in range(R)] for text in texts]
    seconds = [
        seconds_at(n, a, space) for text_actions in actions for n, a in enumerate(text_actions)
    ]
    size_X = torch.tensor([0, *[R] * X])
    action_R = torch.tensor(actions).flatten()
    seconds_R = torch.tensor(seconds, dtype=torch.float64)
    passes_R = torch.tensor(
        [passes_at(n, a, space) for text_actions in actions for n, a in enumerate(text_actions)]
    )
    lag = Lag(passes_R, lag_M)
    return replay(survivals_XRS.reshape(X * R, S), action_R, seconds_R, size_X, space, lag)


def by_enumeration(
    world: LastTokenWorld, name: str, space: ActionSpace, roots: int, lag: list[float]
) -> tuple[float, float, float, float]:
    """The decoder's expected tokens, seconds and steps, and how many steps begin at the last
    root."""
    # how many steps begin after a text, by how many tokens the draft has missed
    begins: defaultdict[tuple[Tokens, int], float] = defaultdict(float, {((0,), 0): 1.0})
    tokens = seconds = steps = at_end = 0.0
    for position in range(roots):
        texts = [(0, *rest) for rest in product(range(2), repeat=position)]
        for text, missed in product(texts, range(roots)):
            visits, action = begins[text, missed], action_at(position, text[-1], space)
            passes = passes_at(position, action, space)
            late = lag[min(missed, len(lag) - 1)] if passes else 0.0
            steps += visits
            seconds += visits * (seconds_at(position, action, space) + late)
            at_end += visits if position == roots - 1 else 0.0
            for appended, probability in world.law(name, text, space.actions[action]):
                tokens += visits * probability * min(len(appended), roots - position)
                still_missed = 0 if passes else missed + len(appended)
                begins[text + appended, still_missed] += visits * probability
    return tokens, seconds, steps, at_end


@pytest.mark.parametrize("lag", [[0.0], [0.0, 0.5, 0.7, 1.9]], ids=["no lag", "lag"])
@pytest.mark.parametrize("seed", [1, 2])
def test_replay_of_all_texts_is_the_decoder(seed: int, lag: list[float]) -> None:
    """The decoder's expected tokens, seconds and steps, from all it may draft and append, are
    replay's mean over all texts (1e-12). It drafts trees, and copies from the text so far; a draft
    that has missed tokens takes longer. What the last step yields beyond a text's end does not
    count: tokens are the text's own."""
    world, roots, space = LastTokenWorld(seed), 5, COPYING
    chosen = {
        space.actions[action_at(n, last, space)] for n, last in product(range(roots), range(2))
    }
    assert {Action.copy(1), Action.copy(3)} < chosen and len(chosen) > 7
    texts = [(0, *rest) for rest in product(range(2), repeat=roots - 1 + space.deepest)]
    weight_X = torch.tensor(
        [0.0, *(world.probability(text) for text in texts)], dtype=torch.float64
    )
    survivals_XVRS = torch.stack(
        [world.survivals(text, VERIFIERS, siblings=None) for text in texts]
    )
    right = [
        [LookupIndex(text[:n]).agreement(text[n : n + 3]) for n in range(1, roots + 1)]
        for text in texts
    ]
    copied_XRS = (torch.tensor(right).unsqueeze(-1) > torch.arange(3)).float()
    for v, name in enumerate(VERIFIERS):
        labels_XRS = torch.cat([survivals_XVRS[:, v], copied_XRS], dim=-1)
        mine = replayed(labels_XRS, texts, space, torch.tensor(lag, dtype=torch.float64))
        tokens, seconds, steps, at_end = by_enumeration(world, name, space, roots, lag)
        assert float(weight_X @ mine.steps_X) == pytest.approx(steps, abs=1e-12), name
        assert float(weight_X @ mine.seconds_X) == pytest.approx(seconds, abs=1e-12), name
        assert float(weight_X @ mine.tokens_X) == pytest.approx(tokens, abs=1e-12), name
        assert mine.tokens_X.tolist() == pytest.approx([0, *[roots] * len(texts)], abs=1e-12), name
        visits_R = mine.visits_R.view(-1, roots)[:, -1]
        assert float(weight_X[1:] @ visits_R) == pytest.approx(at_end, abs=1e-12)


def drawn_survivals(
    name: str, siblings: int | None, count: int = 300, space: ActionSpace = SPACE
) -> Tensor:
    """Labels of the roots of a text, from drawn siblings or all of them."""
    world, rng, text = LastTokenWorld(3, space), random.Random(4), [0]
    while len(text) < count + space.depth:
        text.append(int(rng.random() < world.target_VV[text[-1], 1]))
    return world.survivals(tuple(text), [name], siblings, torch.Generator().manual_seed(5))[0]


@pytest.mark.parametrize(
    "space", [COPYING, ActionSpace(3, 2, 2), ActionSpace(2, 0, 3), ActionSpace(1, 2, 1)], ids=str
)
def test_labels_become_laws(space: ActionSpace) -> None:
    """Between 0 and 1 and never rising along a path: no outcome has a probability below 0, whatever
    the labels of branches. Without branches there is no noise, and labels stay as they are, those
    that are not known (NaN) too."""
    generator = torch.Generator().manual_seed(13)
    wild_RS = (
        1.5 * torch.rand(50, len(space.sums_SA), generator=generator, dtype=torch.float64) ** 2
        - 0.05
    )
    certain_RS = (wild_RS[:, space.tree_survivals :] > 0.5).double().cumprod(-1)
    wild_RS[:, space.tree_survivals :] = certain_RS
    drawn_RS = drawn_survivals("traversal", 1, 50, replace(space, lookups=()))
    whole_RS = torch.cat([drawn_RS, certain_RS], dim=-1)
    if space.max_K == 1:
        unknown_RS = whole_RS.clone()
        unknown_RS[::7, 1:] = torch.nan
        torch.testing.assert_close(
            monotone(unknown_RS, space), unknown_RS.float(), rtol=0, atol=0, equal_nan=True
        )
        wild_RS = whole_RS
    for labels_RS in (wild_RS, whole_RS):
        law_RS = monotone(labels_RS, space)
        assert law_RS.shape == labels_RS.shape
        assert law_RS.dtype == torch.float32
        assert torch.equal(law_RS[:, space.tree_survivals :].double(), certain_RS)
        assert bool(((law_RS >= 0) & (law_RS <= 1)).all())
        for a in range(len(space)):
            law_RJ = outcomes(law_RS, torch.full((len(law_RS),), a), space)
            assert float(law_RJ.min()) >= 0, space.actions[a]
    assert float(drawn_survivals("traversal", 1).max()) > 1  # there was something to do


@pytest.mark.parametrize("siblings", [1, None])
def test_labels_that_are_laws_stay(siblings: int | None) -> None:
    """All of them where every sibling is enumerated; else those of chains, which have no noise."""
    labels_RS = drawn_survivals("traversal", siblings)
    certain = SPACE.depth if siblings else None
    law_RS = monotone(labels_RS, SPACE)
    assert torch.allclose(law_RS[:, :certain].double(), labels_RS[:, :certain], atol=1e-6)


@pytest.mark.parametrize("name", ["traversal", "lifted_uniform"])
def test_a_columns_mean_stays(name: str) -> None:
    """Within 2%, of labels with one draw of the siblings."""
    labels_RS = drawn_survivals(name, 1)
    mean_S = labels_RS.mean(0)
    assert (
        float((monotone(labels_RS, SPACE).mean(0) / mean_S - 1)[mean_S > 0.02].abs().max()) < 0.02
    )


THREE = torch.tensor([[10.0, 10.0, 10.0, 10.0], [20.0, 10.0, 10.0, 10.0], [30.0, 10.0, 10.0, 10.0]])


def test_a_ratio_and_its_error_worked_by_hand() -> None:
    """(60 / 30) / (30 / 30) = 2; without one source 2.5, 2 and 1.5: the error is sqrt(2/3 x (0.25 +
    0 + 0.25))."""
    ratio, of_one = (
        jackknifed(THREE, torch.tensor(source_X)) for source_X in ([7, 3, 5], [0, 0, 0])
    )
    assert (ratio.value, ratio.error) == pytest.approx((2, (1 / 3) ** 0.5))
    assert str(ratio) == "2.000 ±0.577"
    assert of_one.value == pytest.approx(2) and of_one.error == math.inf


def test_a_method_against_itself_is_one_for_certain() -> None:
    own_X2 = (
        torch.rand(9, 2, generator=torch.Generator().manual_seed(12), dtype=torch.float64) + 0.1
    )
    for source_X in (torch.arange(9), torch.arange(9) % 2, torch.zeros(9, dtype=torch.int64)):
        assert jackknifed(own_X2.repeat(1, 2), source_X) == Ratio(1.0, 0.0)


def test_a_function_without_a_file_is_compiled_all_the_same() -> None:
    """As where neither the package's folder nor the user's may be written to: Numba has no place to
    keep it."""
    names: dict = {}
    exec(
        "def total(values):\n    sum = 0.0\n    for v in values:\n        sum += v\n    return sum",
        names,
    )
    assert jit(names["total"])(np.arange(5.0)) == 10.0


def test_compiled_functions_call_only_those_of_their_own_file() -> None:
    """Because Numba's cache does not see that another file has changed."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(selector.__path__, "selector.")
    ]
    plain = {
        value: value.py_func
        for each in modules
        for value in vars(each).values()
        if hasattr(value, "py_func")
    }
    assert len(plain) > 3
    for dispatcher, caller in plain.items():
        assert isinstance(caller, FunctionType)
        if type(dispatcher._cache).__name__ == "NullCache":
            continue
        called = [plain.get(caller.__globals__.get(name)) for name in caller.__code__.co_names]
        assert {each.__module__ for each in called if each} <= {caller.__module__}
