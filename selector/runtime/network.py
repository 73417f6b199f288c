"""The forward pass of `selector.train.network` over NumPy arrays: at one root the dozens of calls
cost torch ten times as much.

Legend: F scalars, D hidden width of a model, W width of a projected hidden state, I inputs and O
outputs of a layer, S survivals, K actions. Leading axes are those of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy

import numpy as np
from torch import Tensor

from selector.files import Array
from selector.runtime.artefact import ArtefactConfig, Features
from selector.schema import SCALARS_KEY

EPSILON = 1e-5  # of torch's layer norm
HIGHEST = 80.0  # the exponential of more overflows
SERIAL = 2**18  # multiplications of a matrix product that OpenBLAS does in one thread
SCALING = ("count_F", "low_F", "high_F", "mean_F", "scale_F")
BLOCK = ("0.weight", "0.bias", "1.weight", "1.bias")  # a linear map and a layer norm
LAYER = re.compile(r"mlp\.(\d+)\.bias")


class Network:
    """A selector's network in evaluation mode.

    Args:
        weights: arrays or tensors by the names in `model.safetensors`.
    """

    def __init__(self, weights: Mapping[str, Array | Tensor], config: ArtefactConfig) -> None:
        self.config = config
        arrays: dict[str, Array] = {}
        for name, weight in weights.items():
            arrays[name.removeprefix(config.prefix)] = np.asarray(weight)
        self._scaling = [arrays[name] for name in SCALING]
        self._blocks: list[list[Array]] = []
        for number in range(len(config.hidden_states)):
            self._blocks.append([arrays[f"blocks.{number}.{part}"] for part in BLOCK])
        numbers = sorted(int(match[1]) for match in map(LAYER.fullmatch, arrays) if match)
        (first_IO, bias_I), *self._layers = [
            (arrays[f"mlp.{number}.weight"].T, arrays[f"mlp.{number}.bias"]) for number in numbers
        ]
        # The early view has the first inputs alone, for the network was trained with zeros for the
        # others. The input after the scalars is 1 in the other view.
        F = len(config.schema.scalars)
        self._first = {
            True: (first_IO[: config.schema.first], bias_I),
            False: (np.delete(first_IO, F, axis=0), bias_I + first_IO[F]),
        }
        self._factors_SS = config.space.survival_factors().numpy()
        self._sums_SK = config.space.sums_SA.numpy()

    def at(self, positions_K: Array) -> Network:
        """The network of the actions at some positions alone, int64 [K], ascending."""
        part = copy(self)
        outputs = positions_K
        if self.config.regressor:  # the survivals that are summed, and those that they depend on
            sums_SK = self._sums_SK[:, positions_K]
            summed = np.flatnonzero(sums_SK.any(1))
            outputs = np.flatnonzero(self._factors_SS[:, summed].any(1))
            part._sums_SK = sums_SK[summed]
            part._factors_SS = self._factors_SS[np.ix_(outputs, summed)]
        *before, (last_IO, bias_O) = self._layers
        part._layers = [*before, (last_IO[:, outputs], bias_O[outputs])]
        return part

    def predictions(self, features: Features, early: bool) -> Array:
        """Predicted block efficiencies of the actions in tokens, or the policy objective's logits,
        float32 [.., K], from float32 tensors on the CPU. `early`: by the scalars of the schema's
        first level alone."""
        weight_IO, bias_O = self._first[early]
        values_O = _product(self._inputs(features, early), weight_IO) + bias_O
        for weight_IO, bias_O in self._layers:
            values_I = np.maximum(values_O, 0) if self.config.regressor else _gelu(values_O)
            values_O = _product(values_I, weight_IO) + bias_O
        if not self.config.regressor:
            return values_O
        # survivals are products of the probabilities whose logits are the outputs
        # (`SurvivalNetwork`)
        odds_O = np.exp(np.minimum(-values_O, HIGHEST))
        survivals_S = np.exp(-np.log(1 + odds_O) @ self._factors_SS)
        tokens_K: Array = 1 + survivals_S @ self._sums_SK
        return tokens_K

    def _inputs(self, features: Features, early: bool) -> Array:
        F = self.config.schema.first if early else len(self.config.schema.scalars)
        count_F, low_F, high_F, mean_F, scale_F = (array[:F] for array in self._scaling)
        scalars_F = np.minimum(np.maximum(features[SCALARS_KEY].numpy()[..., :F], low_F), high_F)
        np.log1p(np.maximum(scalars_F, 0), out=scalars_F, where=count_F)
        scaled_F: Array = (scalars_F - mean_F) / scale_F
        if early or not self._blocks:
            return scaled_F
        parts = [scaled_F]
        for name, block in zip(self.config.hidden_states, self._blocks, strict=True):
            weight_WD, bias_W, scale_W, shift_W = block
            values_W = features[name].numpy() @ weight_WD.T + bias_W
            centred_W = values_W - values_W.mean(-1, keepdims=True)
            deviation = np.sqrt(values_W.var(-1, keepdims=True) + EPSILON)
            parts.append(centred_W / deviation * scale_W + shift_W)
        return np.concatenate(parts, axis=-1)


def _product(values_I: Array, weight_IO: Array) -> Array:
    """The product with a matrix, of a few rows of a batch at a time. OpenBLAS divides larger ones
    between threads, which wait for one another where another program has a core."""
    rows = max(1, SERIAL // max(1, weight_IO.size))  # there may be no outputs
    if values_I.ndim == 1 or len(values_I) <= rows:
        product_O: Array = values_I @ weight_IO
        return product_O
    begins = range(0, len(values_I), rows)
    return np.concatenate([values_I[begin : begin + rows] @ weight_IO for begin in begins])


def _gelu(values_I: Array) -> Array:
    cubic_I: Array = values_I + np.float32(0.044715) * values_I**3
    inner_I: Array = np.float32(np.sqrt(2 / np.pi)) * cubic_I
    return np.float32(0.5) * values_I * (1 + np.tanh(inner_I))
