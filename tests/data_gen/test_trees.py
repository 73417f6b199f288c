from __future__ import annotations

import pytest
import torch

from data_gen.trees import DraftTree
from tests.data_gen.worlds import Forest


def test_equal_prefixes_are_one_node_and_child_lists_keep_duplicates_in_order() -> None:
    tree = DraftTree.from_paths([7], [[1, 2], [3, 4], [1, 5]])
    assert tree.tokens_N.tolist() == [-1, 7, 1, 2, 3, 4, 5]
    assert tree.parents_N.tolist() == [-1, 0, 1, 2, 1, 4, 2]
    assert tree.depths_N.tolist() == [0, 1, 2, 3, 2, 3, 3]
    assert all(t.dtype == torch.int64 for t in (tree.tokens_N, tree.parents_N, tree.depths_N))
    a, b = tree.node_of([7, 1]), tree.node_of([7, 3])
    assert tree.children(0) == [1]
    assert tree.children(1) == [a, b, a]
    assert tree.children(a) == [tree.node_of([7, 1, 2]), tree.node_of([7, 1, 5])]
    assert tree.node_of([]) == 0


def test_an_absent_path_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        DraftTree.from_paths([1], [[2]]).node_of([1, 3])


def test_branches_of_length_zero_leave_the_trunk_alone() -> None:
    tree = DraftTree.from_paths([4, 5], [[]])
    assert tree.tokens_N.tolist() == [-1, 4, 5]
    assert [tree.children(node) for node in range(3)] == [[1], [2], []]
    assert len(DraftTree.from_paths([], [[]])) == 1


def test_branches_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        DraftTree.from_paths([], [[1], [1, 2]])


def test_postorder_is_depth_first_in_order_of_first_appearance() -> None:
    tree = DraftTree.from_paths([], [[1, 2], [3, 4], [1, 5]])
    paths = [[tree.token(n) for n in tree.path_to(node)] for node in tree.postorder()]
    assert paths == [[1, 2], [1, 5], [1], [3, 4], [3], []]


def test_ancestors_are_what_a_node_may_attend_to() -> None:
    tree = DraftTree.from_paths([9], [[1, 2], [1, 3]])
    seen = tree.ancestors_NN()
    for node in range(len(tree)):
        assert set(seen[node].nonzero().flatten().tolist()) == {0, *tree.path_to(node)}


def test_a_forest_keeps_every_tree_as_it_is() -> None:
    trees = [DraftTree.from_paths([4], [[1, 2], [1, 3]]), DraftTree.from_paths([], [[5], [5]])]
    forest = Forest(trees)
    assert forest.roots == [0, len(trees[0])]
    for offset, tree in zip(forest.roots, trees, strict=True):
        for node in range(len(tree)):
            assert [child - offset for child in forest.children(offset + node)] == tree.children(node)
            assert [above - offset for above in forest.path_to(offset + node)] == tree.path_to(node)
