"""The exported selector compiled ahead of time, a `.pt2` package for engines in C++ (`selector/export/cpp`).

Legend: B roots, F scalars, D hidden width, A actions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from selector.actions import Choice, Lookup
from selector.export.deployed import DeployedSelector
from selector.schema import HIDDEN_STATES, SCALARS_KEY, InputError

PACKAGE = "selector.pt2"  # in the artefact directory


class PackagedSelector(nn.Module):
    """`DeployedSelector` with plain tensors in and out, for a batch of any size."""

    shapes_A3: Tensor

    def __init__(self, made: DeployedSelector, actions: tuple[Choice, ...]) -> None:
        super().__init__()
        self.made = made
        shapes = [(0, action.length, 0) if isinstance(action, Lookup) else action[:3] for action in actions]
        self.register_buffer("shapes_A3", torch.tensor(shapes))

    def forward(self, scalars_BF: Tensor, passed_B: Tensor, states_BD: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes, int64 [B, 3], (K, L1, L2) of a tree or (0, length, 0) of a lookup; positions, int64 [B]; scores,
        float32 [B, A]. All shapes and positions of a root where a number is not finite are -1.

        Args:
            scalars_BF: float32, zeros where they are not known.
            passed_B: float32, 1 where the draft has passed the root, 0 elsewhere.
            states_BD: hidden states, float32, in schema order, zeros where not known; none for a light selector.
        """
        given = [scalars_BF, *states_BD]
        finite_B1 = torch.cat(given, dim=-1).isfinite().all(-1, keepdim=True)
        scalars_BF, *states_BD = (each.where(finite_B1, 0) for each in given)  # NaN would become a wild index
        index_B, scores_BA = self.made.decide(scalars_BF, states_BD, passed_B.unsqueeze(-1))
        return self.shapes_A3[index_B].where(finite_B1, -1), index_B.where(finite_B1[:, 0], -1), scores_BA


def compile_package(made: DeployedSelector, actions: tuple[Choice, ...], path: Path) -> None:
    """Writes the package for this processor and this version of torch; InputError where compilation fails."""
    packaged = PackagedSelector(made, actions).eval()
    batch = torch.export.Dim("batch", min=1)
    example = (torch.zeros(2, made.scalars), torch.ones(2), [torch.zeros(2, width) for width in made.hidden_widths])
    shapes = ({0: batch}, {0: batch}, [{0: batch} for _ in made.hidden_widths])
    program = torch.export.export(packaged, example, dynamic_shapes=shapes)
    # the compiled code does not check its inputs, so `espalier.h` does, by these widths
    widths = {
        "early": str(made.early),
        "widths": " ".join(map(str, [made.scalars, *made.hidden_widths])),
    }
    configs = {"aot_inductor.metadata": widths}
    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)
    except Exception as error:  # torch and the C++ compiler raise many kinds
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"export.compiled: {path.name} could not be compiled ({reason}); is g++ installed?") from error


def run_package(path: Path, widths: dict[str, int]) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    """The package with the interface of `selector.pt`: a batch of features in, positions of actions and scores out.

    `widths` are those of the features, by name.
    """
    package = torch._inductor.aoti_load_package(str(path))

    def ask(features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scalars_BF = features[SCALARS_KEY]
        roots, missing = len(scalars_BF), widths[SCALARS_KEY] - scalars_BF.shape[1]
        states = [features.get(name, torch.zeros(roots, widths[name])) for name in HIDDEN_STATES if name in widths]
        padded_BF = torch.nn.functional.pad(scalars_BF, (0, missing))
        _, index_B, scores_BA = package(padded_BF, torch.full((roots,), float(missing == 0)), states)
        return index_B, scores_BA

    return ask
