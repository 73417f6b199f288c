"""The exported selector in one file of 4-byte words, in the order in which `selector/export/c/espalier.h` reads them.

Legend: I inputs, O outputs, N words.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import STYLES, Choice, Lookup
from selector.export.deployed import DeployedSelector
from selector.plain import FORMAT

FILE = "selector.bin"  # in the artefact directory
MAGIC = 0x50534531
TABLES = (
    *("settings_S3", "lengths_L", "early_SLA", "late_SLA", "speed_S", "rho_S", "late_S", "least_S", "level_S"),
    *("longest_S", "allowed_SA", "copied_SA", "static_SA"),
)
SCALING = "mean_F", "scale_F", "low_F", "high_F", "count_F"

Part = Tensor | Sequence[int]


def flat(made: DeployedSelector, actions: Sequence[Choice]) -> bytes:
    """The content of the file."""
    find, body = made.state_dict(), "network.body." if made.regressor else "network."
    shapes = [
        (0, each.length, 0, 0) if isinstance(each, Lookup) else (*each[:3], STYLES.index(each.style))
        for each in actions
    ]
    places = [*made.setting_at, made.batch_at, made.match_at, made.length_at]
    settings, lengths, _ = made.late_SLA.shape
    sizes = [made.scalars, made.early, *places, len(shapes), settings, lengths, int(made.regressor)]
    parts: list[Part] = [sizes, torch.tensor(shapes), *map(find.__getitem__, TABLES)]
    parts += [find[body + name] for name in SCALING]
    parts.append([len(made.hidden_widths)])
    for i, width in enumerate(made.hidden_widths):
        block = f"{body}blocks.{i}."
        parts += [[width], *_linear(find, block + "0"), find[block + "1.weight"], find[block + "1.bias"]]
    layers = sorted({int(name.split(".")[-2]) for name in find if name.startswith(body + "mlp.")})
    parts.append([len(layers)])
    for layer in layers:
        parts += _linear(find, f"{body}mlp.{layer}")
    if made.regressor:
        parts += [*_ones(find["network.factors_SS"]), *_ones(find["sums_SA"])]
    content = b"".join(_words([int(FORMAT.rpartition("-")[2])], *parts))
    return np.array([MAGIC, zlib.crc32(content)], "<u4").tobytes() + content


def _linear(find: dict[str, Any], name: str) -> list[Part]:
    weight_OI, bias_O = find[name + ".weight"], find[name + ".bias"]
    return [[len(bias_O)], weight_OI.T, bias_O]


def _ones(weight_IO: Tensor) -> list[Part]:
    """A matrix of zeros and ones: how many ones, where those of each input begin, and their outputs."""
    assert bool(((weight_IO == 0) | (weight_IO == 1)).all())
    found_N2 = weight_IO.nonzero()
    start = weight_IO.count_nonzero(1).cumsum(0)
    return [[len(found_N2)], [0], start, found_N2[:, 1]]


def _words(*parts: Part) -> list[bytes]:
    arrays: list[NDArray[Any]] = [np.asarray(part) for part in parts]
    return [each.astype("<f4" if each.dtype == np.float32 else "<i4").tobytes() for each in arrays]
