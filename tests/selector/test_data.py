"""Traces as tensors: the verifier of every action, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from data_gen.traces import root_schema, to_table
from selector.actions import ActionSpace
from selector.data import fastest_verifiers, setting_number, to_roots
from selector.latency import LatencyProfile, Table
from selector.schema import TRACE_SCALARS, TRUNK_COLUMNS, label_columns
from tests.selector.synthetic import profile

SPACE = ActionSpace.default()
NAMES = ["block", "lifted_uniform"]
SHAPE = (2, SPACE.decisions)


def times(verify: dict[str, float]) -> LatencyProfile:
    return replace(profile(), verify={name: Table([1], [1], [[seconds]]) for name, seconds in verify.items()})


def table(weights: tuple[float, ...] = (1.0, 1.0, 1.0), prompts: str = "001") -> pa.Table:
    """Three steps, the last at another temperature. `lifted_uniform` yields a token more where trees branch, at the
    first temperature; less in the second step than it gains in the first."""
    gains = np.array([float(action.K > 1) for action in SPACE])
    rows = []
    for number, (temperature, gain) in enumerate(((1.0, 1.0), (1.0, -0.4), (0.5, 0.0))):
        row = {
            **{"prompt": prompts[number], "kind": "code", "root_kind": "step", "root_token": 1},
            "weight": weights[number],
            **{name: np.ones(3) for name in ("target_hidden_prev", "draft_hidden_prev", "draft_hidden_root")},
            **dict.fromkeys(TRACE_SCALARS, 1.0),
            **{"temperature": temperature, "context_length": 50.0},
            **{column: np.ones((*SHAPE, 3) if name == "hidden" else SHAPE) for name, column in TRUNK_COLUMNS.items()},
            **dict.fromkeys(("decoded_verifier", "decoded_action", "decoded_expected", "decoded_realised")),
        }
        for name in NAMES:
            values = 3.0 + gain * gains * (name == "lifted_uniform")
            for kind, column in label_columns(name).items():
                row[column] = np.stack([values, values]) if kind == "trunk" else values
        rows.append(row)
    return to_table(rows, root_schema([3, 3, 3], NAMES, SPACE, samples=2))


def test_every_action_has_the_verifier_with_which_it_is_worth_most() -> None:
    branching = tuple(int(action.K > 1) for action in SPACE)
    own = fastest_verifiers(table(), NAMES, times({"block": 0.0, "lifted_uniform": 1e-5}), SPACE)
    assert own == {setting_number(1.0, 1.0): branching, setting_number(0.5, 1.0): (0,) * len(SPACE)}
    dear = fastest_verifiers(table(), NAMES, times({"block": 0.0, "lifted_uniform": 1.0}), SPACE)
    assert dear[setting_number(1.0, 1.0)] == (0,) * len(SPACE)
    hard = fastest_verifiers(table((1.0, 3.0, 1.0)), NAMES, times({"block": 0.0, "lifted_uniform": 0.0}), SPACE)
    assert hard[setting_number(1.0, 1.0)] == (0,) * len(SPACE)


def test_a_text_counts_once_however_many_steps_it_took() -> None:
    """The hard step stands for three in a text of its own: as long as the other, and lost less than the other gains."""
    free = times({"block": 0.0, "lifted_uniform": 0.0})
    own = fastest_verifiers(table((1.0, 3.0, 1.0), prompts="012"), NAMES, free, SPACE)
    assert own[setting_number(1.0, 1.0)] == tuple(int(action.K > 1) for action in SPACE)


def test_labels_and_times_are_those_of_the_actions_own_verifier() -> None:
    priced = times({"block": 0.0, "lifted_uniform": 1e-5})
    own = fastest_verifiers(table(), NAMES, priced, SPACE)
    joint = to_roots(table(), NAMES, priced, SPACE, own)
    alone = {name: to_roots(table(), [name], priced, SPACE) for name in NAMES}
    branching = torch.tensor([action.K > 1 for action in SPACE])
    for field in ("mean_BA", "half_BA", "static_seconds_BA", "seconds_BA", "trunk_BSA"):
        values = {name: getattr(roots, field) for name, roots in alone.items()}
        expected = torch.where(branching, values["lifted_uniform"], values["block"])
        assert torch.equal(getattr(joint, field)[:2], expected[:2]), field
        assert torch.equal(getattr(joint, field)[2], values["block"][2]), field
    assert not torch.equal(joint.mean_BA[0], alone["block"].mean_BA[0])
