from __future__ import annotations

import pytest
import torch

from data_gen.trees import DraftTree


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


def test_absent_paths_and_branches_of_different_lengths_are_refused() -> None:
    with pytest.raises(KeyError):
        DraftTree.from_paths([1], [[2]]).node_of([1, 3])
    with pytest.raises(ValueError, match="differ in length"):
        DraftTree.from_paths([], [[1], [1, 2]])


def test_postorder_is_depth_first_in_order_of_first_appearance() -> None:
    tree = DraftTree.from_paths([], [[1, 2], [3, 4], [1, 5]])
    paths = [[tree.token(n) for n in tree.path_to(node)] for node in tree.postorder()]
    assert paths == [[1, 2], [1, 5], [1], [3, 4], [3], []]
