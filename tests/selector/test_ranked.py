"""Shapes by rank: labels, and the best ones on some texts, against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from selector.actions import MOST_RANKS, Action, ActionSpace, Ranks
from selector.latency import draft_passes
from selector.train.ranked import along_ranks, balanced, candidates, frequent_paths, united
from selector.train.tuning import (
    LEAST_GAIN,
    StaticTable,
    actions_that_pay,
    best_static,
    tune_lookup_rule,
)
from tests.selector.synthetic import profile, texts, timed

SHAPE = Action.ranked([(0,), (2,), (0, 1), (0, 1, 0), (2, 0)])


def ranks(roots: int, most: int, seed: int = 0, depth: int = 4) -> torch.Tensor:
    """Of which small ones are the most frequent."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.randint(most + 1, (2, roots, depth), generator=generator).amin(0)
    return low.to(torch.uint8)


def accepted(shape: Ranks, path: tuple[int, ...]) -> int:
    return max(length for length in range(len(path) + 1) if not length or path[:length] in shape)


@pytest.mark.parametrize("shape", [SHAPE, balanced(1, 1), balanced(12, 4)], ids=str)
def test_a_text_goes_as_far_as_the_shape_has_its_ranks(shape: Action) -> None:
    """A rank beyond all that shapes have leads out of every one."""
    rank_RD = ranks(400, 3)
    rank_RD[::7, 1] = 255
    expected = [accepted(shape.ranks, tuple(path)) for path in rank_RD.tolist()]
    assert along_ranks(rank_RD, shape.ranks).tolist() == expected


def closed_shapes(most: int, depth: int, size: int) -> Iterator[Ranks]:
    """All shapes of a size, with ranks below `most`."""

    def grow(shape: frozenset[tuple[int, ...]]) -> Iterator[frozenset[tuple[int, ...]]]:
        if len(shape) == size:
            yield shape
            return
        for path in ((), *shape):
            for rank in range(most):
                child = (*path, rank)
                if child not in shape and len(child) <= depth and (not shape or child > max(shape)):
                    yield from grow(shape | {child})

    for shape in set(grow(frozenset())):
        yield tuple(sorted(shape))


@pytest.mark.parametrize(("size", "depth"), [(1, 1), (3, 2), (4, 3), (5, 2)])
def test_the_most_frequent_paths_are_the_best_shape(size: int, depth: int) -> None:
    """No other shape of as many nodes has more of the text's tokens, by enumeration."""
    rank_RD = ranks(300, 2, seed=size)
    (best,) = candidates(rank_RD, [size], [depth])
    tokens = int(along_ranks(rank_RD, best.ranks).sum())
    others = [Action.ranked(shape) for shape in closed_shapes(3, depth, size)]
    assert len(others) > 1
    assert tokens == max(int(along_ranks(rank_RD, shape.ranks).sum()) for shape in others)
    paths = frequent_paths(rank_RD, depth)
    assert all(path[:-1] in paths[:at] for at, path in enumerate(paths) if len(path) > 1)


def test_labels_of_a_shape_and_a_copy_are_the_longer_of_both() -> None:
    data = texts(count=4, roots=30, repeats=0.5)
    rank_RD = ranks(len(data.length_R), 3, depth=8)
    (union,) = united(SHAPE, [6])
    space = replace(data.space, ranked=(SHAPE, union))
    offered = replace(data, rank_RD=rank_RD, space=space)
    survivals_RS = offered.labels("traversal", slice(None), space)
    tokens_RA = space.efficiencies(survivals_RS)
    shape_R = along_ranks(rank_RD, SHAPE.ranks)
    copy_R = offered.lookup_R.clamp(max=6)
    assert torch.equal(tokens_RA[:, space.index(SHAPE)], 1.0 + shape_R)
    assert torch.equal(tokens_RA[:, space.index(union)], 1.0 + torch.maximum(shape_R, copy_R))
    before_S = data.labels("traversal", slice(None), data.space)
    assert torch.equal(survivals_RS[:, : before_S.shape[1]], before_S)


def test_labels_are_found_in_a_larger_space() -> None:
    """Of the recorded trees and of wide ones, those of a part."""
    wide = ActionSpace.with_wide_trees()
    data = texts(count=4, roots=6)
    stored_RS = torch.rand(len(data.length_R), wide.tree_survivals).half()
    offered = replace(data, survivals={"traversal": stored_RS}, space=wide, labelled=wide)
    stored_RA = wide.efficiencies(offered.labels("traversal", slice(None), wide))
    for space in (ActionSpace.default(), ActionSpace.recorded(), wide):
        labels_RS = offered.labels("traversal", slice(None), replace(space, lookups=()))
        for a, action in enumerate(space):
            expected_R = stored_RA[:, wide.index(action)]
            assert torch.allclose(space.efficiencies(labels_RS)[:, a], expected_R), action


def test_what_pays_is_offered_and_chosen() -> None:
    """Where the text's token is the draft's second choice, no tree of drawn tokens has it; the
    shape with it is the best static tree, and where copies are right half of the time only, both
    stand in one tree."""
    data = texts(count=8, roots=40, repeats=0.4)
    generator = torch.Generator().manual_seed(3)
    is_right_R = torch.rand(len(data.length_R), generator=generator) < 0.5
    data = replace(data, lookup_R=data.lookup_R * is_right_R)
    second_RD = torch.ones(len(data.length_R), 8, dtype=torch.uint8)
    none = dict.fromkeys(data.survivals, 0 * data.survivals["traversal"])
    data = replace(data, rank_RD=second_RD, survivals=none)
    cheap = profile(draft=1e-4)
    shapes = [action for action in actions_that_pay(timed(data, cheap)) if action.ranks]
    assert shapes and shapes[0].ranks[0] in ((0,), (1,)) and (1, 1) in shapes[0].ranks
    assert {shape.copied for shape in shapes} == {0, *data.space.lookups[1:]}
    offered = timed(replace(data, space=replace(data.space, ranked=tuple(shapes))), cheap)
    static = best_static(offered, StaticTable.of(offered))
    assert static.action == shapes[0]
    rule = tune_lookup_rule(offered, static)
    assert rule.rule is not None and rule.action.ranks and rule.rule.length > 0


def test_actions_that_are_left_out_would_add_little() -> None:
    """The fastest static tree is chosen; where the best one of the chosen actions is drafted at
    each root, another one would gain less than the bound in the mean."""
    data = texts(count=8, roots=40, repeats=0.4)
    generator = torch.Generator().manual_seed(5)
    ranks_RD = torch.randint(6, (len(data.length_R), 8), generator=generator, dtype=torch.uint8)
    data = replace(data, rank_RD=ranks_RD)
    cheap = profile(draft=1e-3)
    chosen = actions_that_pay(timed(data, cheap))
    whole = timed(
        replace(data, space=replace(data.space, ranked=tuple(candidates(ranks_RD)))), cheap
    )
    table = StaticTable.of(whole)
    assert best_static(whole, table).action in chosen
    space = whole.space
    seconds_RA = whole.seconds()
    efficiency_RA = 1 + whole.survivals_RS @ space.sums_SA
    net_RA = efficiency_RA - float(table.speeds().max()) * seconds_RA
    best_R = torch.full((len(net_RA),), -torch.inf)
    for action in space:
        if action in chosen or (action.K == 1 and not action.ranks):
            best_R = torch.maximum(best_R, net_RA[:, space.index(action)])
    gains = [float((torch.maximum(net_R, best_R) - best_R).mean()) for net_R in net_RA.unbind(1)]
    assert max(gains) < LEAST_GAIN
    static_R = net_RA[:, table.best()]
    assert float((best_R - static_R).mean()) > 10 * LEAST_GAIN  # the choice is worth something


@pytest.mark.parametrize("copied", [0, 7])
def test_a_shape_takes_a_pass_for_each_level_with_children(copied: int) -> None:
    """Over as many nodes as have some; a copy takes none."""
    shape = Action.ranked(SHAPE.ranks, copied)
    assert draft_passes(shape, 100) == [(100, 2), (102, 2), (103, 1)]
    assert shape.drafts and not Action.copy(7).drafts


def test_ranks_that_no_shape_has_are_left_out() -> None:
    rank_RD = torch.full((10, 4), MOST_RANKS, dtype=torch.uint8)
    assert candidates(rank_RD) == []
    for most, depth in product((1, 3), (1, 2)):
        paths = frequent_paths(ranks(50, most), depth)
        assert max(map(len, paths)) == depth and max(map(max, paths)) <= most
