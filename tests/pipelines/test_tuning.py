"""Static trees and stopping rules, tuned on training data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipelines.tuning import Tuning
from selector.data import Roots, kind_number
from selector.schema import TRUNK_SCALARS
from selector.stopping import StoppingModule
from tests.selector.synthetic import SPACE, WIDTHS, roots

REVISE = 1e-5  # seconds


def test_the_best_static_tree_is_that_of_the_kind() -> None:
    """Short trees where tokens are rarely accepted, long ones elsewhere; a kind without data takes those of all."""
    data = roots(200)
    rare = data.target_hidden_prev[:, 0] <= 0
    data = replace(data, kind_B=torch.where(rare, kind_number("rare"), kind_number("often")))
    tuning = Tuning({"traversal": data}, ["rare", "often", "unseen"], REVISE)
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
    assert Tuning({"slow": slow, "fast": fast}, [], REVISE).best(["slow", "fast"]).verifier == "fast"


def told_apart(data: Roots, good_BS: Tensor, revise: float) -> int:
    """The longest chain that is best where chains go on on good trunks and end at once on bad ones."""
    speeds = []
    for length in range(1, 17):
        drafted_BS = torch.where(good_BS, length, 1)
        action_BS = torch.where(good_BS, SPACE.index(SPACE.chain(length)), SPACE.index(SPACE.chain(1)))
        weight_B1 = data.weight_B.unsqueeze(-1)
        tokens_BS = weight_B1 * data.trunk_BSA.gather(-1, action_BS.unsqueeze(-1))[..., 0]
        decisions_BS = torch.minimum(drafted_BS, torch.tensor(length - 1))
        seconds_BS = weight_B1 * (data.static_seconds_BA.gather(-1, action_BS) + revise * decisions_BS)
        texts = [(data.prompt_B == prompt).nonzero().flatten() for prompt in data.prompt_B.unique()]
        speeds.append(1 / sum(float(seconds_BS[text].sum() / tokens_BS[text].sum()) for text in texts))
    return 1 + max(range(16), key=speeds.__getitem__)


@pytest.mark.parametrize("revise", [0.0, REVISE, 1e-3])
def test_the_entropy_stop_finds_the_threshold_that_tells_trunks_apart(revise: float) -> None:
    data = roots(200)
    good_BS = data.trunk_hidden_BSTD[:, :, 0, 0] > 0
    entropy_BST = torch.where(good_BS.unsqueeze(-1), 1.0, 3.0).expand_as(data.trunk_entropy_BST)
    data = replace(data, trunk_entropy_BST=entropy_BST.contiguous())
    threshold, longest = Tuning({"traversal": data}, [], revise).entropy_stop()
    assert 1.0 <= threshold < 3.0
    assert longest == told_apart(data, good_BS, revise)


def test_the_stopping_head_finds_the_threshold_that_tells_trunks_apart() -> None:
    """A head that reads the sign in the state: what it drafts is as good as stopping on every bad trunk at once."""
    data = roots(200)
    head = StoppingModule(WIDTHS[-1], {"hidden": (1,), "dropout": 0.0}, 6.0, 1e-3, 0.0)
    state = torch.zeros(1, WIDTHS[-1] + len(TRUNK_SCALARS))
    state[0, 0] = 1e4  # nothing but the sign
    with torch.no_grad():
        head.network.body[0].weight.copy_(state)
        head.network.body[0].bias.fill_(0.0)
        head.network.head.weight.fill_(1e4)
        head.network.head.bias.fill_(-4.0)
    good_BS = data.trunk_hidden_BSTD[:, :, 0, 0] > 0
    rejected, longest = Tuning({"traversal": data}, [], REVISE).stopping_head(head.eval())
    assert 0.0 <= rejected < torch.sigmoid(torch.tensor(4.0))
    assert longest == told_apart(data, good_BS, REVISE)


def test_decisions_are_charged() -> None:
    """Where a decision costs more than a step, no chain is long enough to need one."""
    data = roots(50)
    free, dear = (Tuning({"traversal": data}, [], revise) for revise in (0.0, 1.0))
    assert free.entropy_stop()[1] > 1 and dear.entropy_stop()[1] == 1
    torch.manual_seed(0)
    head = StoppingModule(WIDTHS[-1], {}, 6.0, 1e-3, 0.0).eval()
    assert free.stopping_head(head)[1] > 1 and dear.stopping_head(head)[1] == 1
