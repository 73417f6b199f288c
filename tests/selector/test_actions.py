"""The space of trees and lookups, and how block efficiencies are sums of few survivals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from selector.actions import EMPTY, GREEDY, Action, ActionSpace
from selector.layout import layout_of
from selector.train.ranked import balanced

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
    ActionSpace(3, 1, 2, (4,), delayed=(Action(2, 0, 1), Action(3, 1, 2), Action(2, 1, 2, GREEDY))),
    ActionSpace(4, 2, 2, delayed=()),
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


def test_a_restricted_space_has_its_chains_and_lookups_and_what_is_given() -> None:
    """Their order stays, and survivals that no action needs go."""
    shape, union = Action.ranked([(0,), (1,)]), Action.ranked([(0,), (1,)], 4)
    whole = replace(ActionSpace.with_wide_trees(), lookups=(2, 4), ranked=(shape, union, SHAPE))
    given = [union, Action(3, 2, 4, GREEDY), Action(8, 0, 2), Action.branching((2, 2, 1)), SHAPE]
    space = whole.restricted_to(given)
    always = [action for action in whole if action.copies or (action.K == 1 and not action.ranks)]
    assert list(space) == [action for action in whole if action in {*given, *always}]
    assert len(space) == 17 + 2 + 5
    assert set(space.survivals) == {part for action in space for part in action.parts}
    assert ActionSpace.of_json(json.loads(json.dumps(space.to_json()))) == space
    assert space.restricted_to([SHAPE]).actions == (*always[:17], SHAPE, *always[17:])
    with pytest.raises(ValueError, match="not in the space"):
        space.index(Action(2, 2, 4, GREEDY))


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


def names_of(action: Action) -> list[object]:
    """By depth, on what the survivals of an action depend: of a tree the chain along the trunk,
    then the branches; of a shape and of a tree that branches at every level what it has down to
    there."""
    depths = range(1, action.depth + 1)
    if action.copies:
        return [("copy", depth) for depth in depths]
    if action.children:
        return [action.children[:depth] for depth in depths]
    if action.ranks:
        names: list[object] = []
        for depth in depths:
            paths = {path for path in action.ranks if len(path) <= depth}
            names.append((frozenset(paths), min(action.copied, depth)))
        return names
    K, L1, L2, style = action
    if K == 1:
        return [("chain", depth) for depth in depths]
    trunk: list[object] = [("chain", depth) for depth in range(1, L1 + 1)]
    return trunk + [(style, K, L1, depth) for depth in range(1, L2 + 1)]


def test_survivals_stand_in_the_order_in_which_traces_hold_them() -> None:
    """Chains by depth, branches by style, width, trunk and depth, lookups by depth, shapes."""
    space = ActionSpace(2, 1, 2, (2,), (GREEDY,), (6,), (SHAPE,), ((3, 2),))
    chains = [Action(1, depth, 0) for depth in (1, 2, 3)]
    branches = []
    for style in ("iid", GREEDY):
        for K, L1 in ((2, 0), (2, 1), (6, 0)):
            branches += [Action(K, L1, depth, style) for depth in (1, 2)]
    levels = [Action.branching((3,)), Action.branching((3, 2))]
    shapes = [Action.ranked([(0,), (2,)]), Action.ranked([(0,), (2,), (0, 1)]), SHAPE]
    copies = [Action.copy(1), Action.copy(2)]
    assert list(space.survivals) == [*chains, *branches, *levels, *copies, *shapes]
    assert space.survivals_by_part == (3, 14, 2, 3) and space.tree_survivals == 17


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_block_efficiency_is_the_sum_of_the_actions_own_survivals(space: ActionSpace) -> None:
    """Which stand in the order of depth."""
    count = len(space.survivals)
    survivals_S = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    efficiency_A = space.efficiencies(survivals_S)
    position_of: dict[object, int] = {}
    for a, (places, action) in enumerate(zip(space.survival_of_AD.tolist(), space, strict=True)):
        names = names_of(action)
        expected = places[: len(names)]
        assert [
            position_of.setdefault(name, at) for name, at in zip(names, expected, strict=True)
        ] == expected
        assert places[len(names) :] == [count] * (space.deepest - len(names))
        assert float(efficiency_A[a]) == pytest.approx(
            1 + float(survivals_S[expected].sum()), abs=1e-12
        ), action
    assert sorted(position_of.values()) == list(range(count))
    assert float(efficiency_A[space.index(EMPTY)]) == 1
