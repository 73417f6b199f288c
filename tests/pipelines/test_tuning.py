"""Static trees and stopping rules, tuned on training data."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipelines.tuning import Tuning
from selector.data import kind_number
from tests.selector.synthetic import SPACE, roots


def test_the_best_static_tree_is_that_of_the_kind() -> None:
    """Short trees where tokens are rarely accepted, long ones elsewhere; a kind without data takes those of all."""
    data = roots(200)
    rare = data.target_hidden_prev[:, 0] <= 0
    data = replace(data, kind_B=torch.where(rare, kind_number("rare"), kind_number("often")))
    tuning = Tuning({"traversal": data}, ["rare", "often", "unseen"])
    depth = {kind: sum(tuning.static("traversal", kind).action[1:]) for kind in ("rare", "often", "unseen")}
    assert depth["rare"] < depth["unseen"] < depth["often"]
    assert tuning.static("traversal", "unseen").action == tuning.static("traversal").action
    for kind in ("rare", "often"):
        assert tuning.static("traversal", kind).speed >= tuning.static("traversal", kind, at_root=True).speed
        action = tuning.static("traversal", kind, at_root=True).action
        assert action.L1 == 0 or action.K == 1


def test_the_best_verifier_is_the_fastest_one() -> None:
    slow = roots(50)
    fast = replace(slow, mean_BA=1.2 * slow.mean_BA)
    assert Tuning({"slow": slow, "fast": fast}, []).best(["slow", "fast"]).verifier == "fast"


def test_the_entropy_stop_finds_the_threshold_that_tells_trunks_apart() -> None:
    data = roots(200)
    good_BS = data.trunk_hidden_BSTD[:, :, 0, 0] > 0
    entropy_BST = torch.where(good_BS.unsqueeze(-1), 1.0, 3.0).expand_as(data.trunk_entropy_BST)
    threshold, longest = Tuning(
        {"traversal": replace(data, trunk_entropy_BST=entropy_BST.contiguous())}, []
    ).entropy_stop()
    assert 1.0 <= threshold < 3.0
    speeds = []
    for length in range(1, 17):  # the chain ends at once on bad trunks
        action_BS = torch.where(good_BS, SPACE.index(SPACE.chain(length)), SPACE.index(SPACE.chain(1)))
        tokens = data.trunk_BSA.gather(-1, action_BS.unsqueeze(-1)).double().sum()
        speeds.append(float(tokens / data.static_seconds_BA.gather(-1, action_BS).double().sum()))
    assert longest == 1 + max(range(16), key=speeds.__getitem__)
