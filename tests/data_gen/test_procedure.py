from __future__ import annotations

import pytest
import torch

from data_gen.models import ModelPair
from data_gen.procedure import label_action, passes
from data_gen.sampling import Sampling
from data_gen.trajectories import TrajectoryLabeller
from selector.actions import Action, ActionSpace

SAMPLING = Sampling(0.7)
TOKENS = [5, 17, 203, 44, 91, 3, 8]


@pytest.mark.parametrize("action", [(1, 0, 0), (1, 8, 3), (2, 0, 3), (4, 2, 2), (3, 3, 8)], ids=str)
def test_independent_trees_agree_with_the_supertrees(pair: ModelPair, action: tuple[int, int, int]) -> None:
    """Mean over 400 trees against 200 supertrees, |z| < 4.5 (false alarms: 7e-6 each)."""
    verifiers = ["specinfer", "traversal", "lifted_uniform", "block"]
    labeller = TrajectoryLabeller(pair, TOKENS, SAMPLING, 200, verifiers)
    own_VS = label_action(labeller, 7, Action(*action), 400, verifiers, torch.Generator().manual_seed(5))
    (labels,) = labeller.labels([(7, 11)])
    index = ActionSpace.default().index(Action(*action))
    for v, name in enumerate(verifiers):
        error = float(labels[f"{name}.error"][index]) ** 2 + float(own_VS[v].var()) / 400
        difference = float(labels[f"{name}.mean"][index]) - float(own_VS[v].mean())
        assert abs(difference) < 4.5 * error**0.5 + 1e-5, name


def test_the_procedure_takes_two_thousand_passes() -> None:
    assert sum(passes(action) for action in ActionSpace.default()) == 1972
