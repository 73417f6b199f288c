"""The space of trees and lookups, and how block efficiencies are sums of few survivals."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from selector.actions import EMPTY, GREEDY, WIDE_DEPTH, Action, ActionSpace, balanced
from selector.layout import layout_of

SHAPE = Action.ranked([(0,), (2,), (0, 1), (0, 1, 0)])
SPACES = [
    ActionSpace.of_pairs(),
    ActionSpace(3, 1, 2, (3,), styles=("without_replacement", "greedy")),
    ActionSpace.with_lookups(),
    ActionSpace(3, 2, 2),
    ActionSpace(2, 0, 3, (2, 5)),
    ActionSpace(1, 2, 1),
    ActionSpace(3, 2, 0, (1,)),
    ActionSpace.with_wide_trees(),
    ActionSpace(2, 1, 4, (2,), styles=("greedy",), wide=(3, 6)),
    ActionSpace(2, 1, 2, (2, 5), ranked=(SHAPE, Action.ranked(SHAPE.ranks, 5))),
    ActionSpace(2, 1, 2, styles=("greedy",), ranked=(SHAPE,), children=((2, 2), (3, 1, 2))),
]


def test_the_default_space_has_233_ordered_distinct_trees() -> None:
    actions = ActionSpace.default().actions
    assert len(actions) == len(set(actions)) == 233
    assert list(actions) == sorted(actions)
    chains = [action for action in actions if action.K == 1]
    assert chains == [Action(1, min(n, 8), max(0, n - 8)) for n in range(17)]


def test_styled_trees_follow_the_others_and_precede_lookups() -> None:
    """Positions of i.i.d. trees stay; every branching shape is there in every style."""
    space, trees = ActionSpace.of_pairs(), ActionSpace.default().actions
    styled = [shape._replace(style=GREEDY) for shape in trees if shape.K > 1]
    assert space.actions == (
        *trees,
        *styled,
        Action.copy(2),
        Action.copy(4),
        Action.copy(8),
        Action.copy(16),
    )
    assert space.trees == ActionSpace.recorded().actions == space.actions[:449]
    assert [space.index(action) for action in space] == list(range(453))
    assert space.index(Action(1, 3, 2, GREEDY)) == space.index(Action(1, 5, 0))
    assert [Action.of(list(action)) for action in space] == list(space)
    assert ActionSpace.of_json(space.to_json()) == space
    with pytest.raises(
        ValueError, match=r"\(2, 1, 1, without_replacement\) is not in .*, style iid or greedy"
    ):
        space.index(Action(2, 1, 1, "without_replacement"))


def test_a_shape_is_closed_under_prefixes_and_survives_json() -> None:
    """Its paths stand in the order of depth, whatever order they are given in."""
    union = Action.ranked([(0, 1, 0), (2,), (0, 1), (0,)], copied=5)
    assert union.ranks == SHAPE.ranks and (SHAPE.K, SHAPE.L2, SHAPE.nodes) == (2, 3, 4)
    assert (union.copied, union.depth, union.nodes, union.inner_widths) == (5, 5, 9, [1, 1])
    for action in (SHAPE, union, Action.copy(3), Action(2, 1, 4, GREEDY), Action.branching((3, 2))):
        assert Action.of(json.loads(json.dumps(action))) == action
    assert balanced(5, 2).ranks == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    for paths in ([(0, 0)], [], [(0,), (1, 0)], [(32,)], [(0,) * n for n in range(1, 10)]):
        with pytest.raises(ValueError, match="path"):
            Action.ranked(paths)


@pytest.mark.parametrize(
    "values",
    [[], [1, 2], [1, 2, 3, 4], [1, 2, 3, "sorted"], [1, 2.0, 3], [1, 0, 1, "ranked"], [1, 0, 1, 5]],
)
def test_what_is_no_action_is_refused(values: list[object]) -> None:
    with pytest.raises(TypeError):
        Action.of(values)


def test_a_layout_names_every_node_after_its_parent() -> None:
    """With where its token comes from; an engine needs no more to draft it."""
    assert layout_of(Action(1, 2, 0)) == [(0, "sampled"), (1, "sampled")]
    assert layout_of(Action.copy(2)) == [(0, "copied"), (1, "copied")]
    trunk, first, second = (0, "sampled"), (1, "sampled"), (1, "sampled")
    assert layout_of(Action(2, 1, 2)) == [trunk, first, (2, "sampled"), second, (4, "sampled")]
    assert layout_of(Action(3, 0, 1, GREEDY)) == [(0, 0), (0, 1), (0, "other")]
    twice = Action.branching((2, 1, 2))
    assert layout_of(twice) == [(n, "sampled") for n in (0, 0, 1, 2, 3, 3, 4, 4)]
    union = Action.ranked(SHAPE.ranks, copied=2)
    assert layout_of(union) == [(0, 0), (0, 2), (1, 1), (3, 0), (0, "copied"), (5, "copied")]
    for action in (*ActionSpace.with_wide_trees(), union):
        assert len(layout_of(action)) == action.nodes
        assert all(0 <= parent < node for node, (parent, _) in enumerate(layout_of(action), 1))


def test_actions_that_draft_the_same_tree_have_the_same_index() -> None:
    space = ActionSpace.default()
    assert (
        space.index(Action(3, 5, 0)) == space.index(Action(1, 5, 0)) == space.index(Action(1, 2, 3))
    )
    assert space.index(Action(1, 4, 8)) == space.index(Action(1, 8, 4))
    for outside in (
        Action(5, 0, 1),
        Action(2, 9, 1),
        Action(2, 0, 9),
        Action(0, 1, 1),
        Action(2, -1, 1),
    ):
        with pytest.raises(ValueError, match="not in the space"):
            space.index(outside)


Name = tuple[str, int, int, int]


def names_of(space: ActionSpace) -> list[Name]:
    """Style, K, trunk length and depth below it of every survival, in their order; a chain's have
    no trunk, those of lookups K = 0, and those of shapes by rank K = -1 and their number."""
    names: list[Name] = [("iid", 1, 0, depth) for depth in range(1, space.depth + 1)]
    for style in ("iid", *space.styles):
        for K in range(2, space.max_K + 1):
            for L1, depth in product(range(space.max_L1 + 1), range(1, space.max_L2 + 1)):
                names.append((style, K, L1, depth))
        for K, depth in product(space.wide, range(1, min(space.max_L2, WIDE_DEPTH) + 1)):
            names.append((style, K, 0, depth))
    for number, children in enumerate(space.children):
        names += [("every level", -2, number, depth) for depth in range(1, len(children) + 1)]
    names += [("iid", 0, 0, depth) for depth in range(1, max(space.lookups, default=0) + 1)]
    for number, shape in enumerate(space.ranked):
        names += [("ranked", -1, number, depth) for depth in range(1, shape.depth + 1)]
    return names


def own_survivals(space: ActionSpace, action: Action) -> list[Name]:
    """By depth: of a tree those of the chain along the trunk, then those of its branches; of a
    lookup and of a shape its own."""
    if action.copies:
        return [("iid", 0, 0, depth) for depth in range(1, action.L1 + 1)]
    if action.children:
        number = space.children.index(action.children)
        return [("every level", -2, number, depth) for depth in range(1, action.depth + 1)]
    if action.ranks:
        number = space.ranked.index(action)
        return [("ranked", -1, number, depth) for depth in range(1, action.depth + 1)]
    K, L1, L2 = action[:3]
    if K == 1:
        return [("iid", 1, 0, depth) for depth in range(1, L1 + L2 + 1)]
    trunk: list[Name] = [("iid", 1, 0, depth) for depth in range(1, L1 + 1)]
    return trunk + [(action.style_name, K, L1, depth) for depth in range(1, L2 + 1)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_block_efficiency_is_the_sum_of_the_actions_own_survivals(space: ActionSpace) -> None:
    """Which stand in the order of depth."""
    count = len(space.sums_SA)
    survivals_S = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names = names_of(space)
    by_name = dict(zip(names, survivals_S.tolist(), strict=True))
    assert len(by_name) == count
    efficiency_A = space.efficiencies(survivals_S)
    for a, (places, action) in enumerate(zip(space.survival_of_AD.tolist(), space, strict=True)):
        expected = own_survivals(space, action)
        assert float(efficiency_A[a]) == pytest.approx(
            1 + sum(by_name[name] for name in expected), abs=1e-12
        ), action
        assert [names[position] for position in places if position < count] == expected
        assert places[len(expected) :] == [count] * (space.deepest - len(expected))
    assert float(efficiency_A[space.index(EMPTY)]) == 1
