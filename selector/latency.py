"""A machine's latency profile, and the time of a decoding step with a given action.

Legend: L context lengths, A actions.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from selector.actions import EMPTY, Action
from selector.schema import SCHEMA_VERSION, InputError


@dataclass(frozen=True)
class Table:
    """Seconds on a grid of context lengths and pass sizes; linear in between and beyond."""

    lengths: list[int]
    sizes: list[int]
    seconds: list[list[float]]  # [length][size]

    def at(self, length: float, size: float) -> float:
        columns = [_interpolate(self.sizes, row, size) for row in self.seconds]
        return max(_interpolate(self.lengths, columns, length), 1e-9)


def _interpolate(grid: list[int], values: list[float], x: float) -> float:
    if len(grid) == 1:
        return values[0]
    i = 0
    while i < len(grid) - 2 and x > grid[i + 1]:
        i += 1
    share = (x - grid[i]) / (grid[i + 1] - grid[i])
    return values[i] + share * (values[i + 1] - values[i])


@dataclass(frozen=True)
class LatencyProfile:
    """Measured times of one pair on one machine, in seconds.

    Attributes:
        device: the machine: processor, threads, dtype.
        pair: fingerprint of the models.
        draft: tq(length, width), one draft pass of `width` tokens, drawing their successors included.
        target: tp(length, nodes), one target pass over a tree of `nodes` nodes, the root included, with its
            distributions and the commit of a path.
        verify: for each verifier, seconds by number of nodes.
        select: one call of a selector, its features included.
        step: the rest of a decoding step.
    """

    device: str
    pair: str
    draft: Table
    target: Table
    verify: dict[str, Table]
    select: float
    step: float

    @classmethod
    def load(cls, path: Path) -> LatencyProfile:
        """InputError where the file is missing, damaged, or of another schema version."""
        try:
            values = json.loads(Path(path).read_text())
            found = values.pop("schema_version")
            values.pop("check", None)
            draft, target = Table(**values.pop("draft")), Table(**values.pop("target"))
            verify = {name: Table(**table) for name, table in values.pop("verify").items()}
            profile = cls(draft=draft, target=target, verify=verify, **values)
        except OSError as error:
            raise InputError(f"{path}: no latency profile there: run the latency stage first") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: not a latency profile: run the latency stage again") from error
        if found != SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {found}, this program reads {SCHEMA_VERSION}")
        return profile

    def to_json(self) -> dict[str, object]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def pass_seconds(self, length: float) -> tuple[float, float]:
        """One draft pass and one target pass over a single token: the two latency features of the schema."""
        return self.draft.at(length, 1), self.target.at(length, 1)

    def action_seconds(self, action: Action, length: float, verifier: str, selector: bool = False) -> float:
        """Predicted time of one decoding step.

        It charges every draft pass at its width, the pass over the root token included; with a selector, that pass
        even where nothing is drafted, and the selector's own time.

        Args:
            length: committed tokens before the step, the root token included.
        """
        K, L1, L2 = action
        passes = [(length + depth, 1) for depth in range(L1 + (L2 > 0))]
        passes += [(length + L1 + depth * K, K) for depth in range(1, L2)]
        if selector and not passes:
            passes = [(length, 1)]
        seconds = sum(self.draft.at(*size) for size in passes)
        nodes = 1 + action.nodes
        seconds += self.target.at(length, nodes) + self.step + (self.select if selector else 0.0)
        if action != EMPTY:
            seconds += self.verify[verifier].at(length, nodes)
        return seconds

    def table(self, actions: tuple[Action, ...], lengths: list[int], verifier: str, selector: bool) -> Tensor:
        """`action_seconds` for every length and action, float64 [L, A]."""
        rows = [[self.action_seconds(a, length, verifier, selector) for a in actions] for length in lengths]
        return torch.tensor(rows, dtype=torch.float64)


def interpolated(table_LA: Tensor, lengths_L: Tensor, length_B: Tensor) -> Tensor:
    """Rows of a table at other lengths, linear in between and beyond; [B, A]. Scriptable.

    Args:
        lengths_L: the table's lengths, ascending, at least two.
    """
    length_B = length_B.to(lengths_L.dtype)
    upper_B = torch.searchsorted(lengths_L, length_B.contiguous()).clamp(1, lengths_L.size(0) - 1)
    low_B, high_B = lengths_L[upper_B - 1], lengths_L[upper_B]
    share_B1 = ((length_B - low_B) / (high_B - low_B)).unsqueeze(-1)
    return table_LA[upper_B - 1] * (1 - share_B1) + table_LA[upper_B] * share_B1
