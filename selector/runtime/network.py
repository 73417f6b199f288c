"""The forward pass of `selector.train.network` over NumPy arrays: at one root the dozens of calls
cost torch ten times as much.

Legend: F scalars, D hidden width of a model, W width of a projected hidden state, I inputs and O
outputs of a layer, S survivals, A actions. Leading axes are those of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from selector.files import Array
from selector.runtime.artefact import ArtefactConfig, Features
from selector.schema import SCALARS_KEY

EPSILON = 1e-5  # of torch's layer norm
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
        self.arrays: dict[str, Array] = {}
        for name, weight in weights.items():
            self.arrays[name.removeprefix(config.prefix)] = np.asarray(weight)
        self._layers = sorted(int(match[1]) for match in map(LAYER.fullmatch, self.arrays) if match)
        self._factors_SS = config.space.survival_factors().numpy()
        self._sums_SA = config.space.sums_SA.numpy()

    def predictions(self, features: Features, early: bool) -> Array:
        """Predicted block efficiencies of all actions in tokens, or the policy objective's logits,
        float32 [.., A], from float32 tensors on the CPU. `early`: by the scalars of the schema's
        first level alone."""
        values_I = self._inputs(features, early)
        for layer in self._layers:
            if layer > 0:
                values_I = np.maximum(values_I, 0) if self.config.regressor else _gelu(values_I)
            weight_OI = self.arrays[f"mlp.{layer}.weight"][:, : values_I.shape[-1]]
            values_I = values_I @ weight_OI.T + self.arrays[f"mlp.{layer}.bias"]
        if not self.config.regressor:
            return values_I
        # survivals are products of the probabilities whose logits are the outputs
        # (`SurvivalNetwork`)
        survivals_S = np.exp(-np.logaddexp(0, -values_I) @ self._factors_SS)
        tokens_A: Array = 1 + survivals_S @ self._sums_SA
        return tokens_A

    def _inputs(self, features: Features, early: bool) -> Array:
        # Of the early view the first ones alone: the network was trained with zeros for the others.
        F = self.config.schema.first if early else len(self.config.schema.scalars)
        count_F, low_F, high_F, mean_F, scale_F = (self.arrays[name][:F] for name in SCALING)
        scalars_F = np.clip(features[SCALARS_KEY].numpy()[..., :F], low_F, high_F)
        scalars_F = np.where(count_F, np.log1p(np.maximum(scalars_F, 0)), scalars_F)
        scaled_F: Array = (scalars_F - mean_F) / scale_F
        if early:
            return scaled_F
        parts = [scaled_F, np.ones_like(scaled_F[..., :1])]
        for i, name in enumerate(self.config.hidden_states):
            weight_WD, bias_W, scale_W, shift_W = (
                self.arrays[f"blocks.{i}.{part}"] for part in BLOCK
            )
            values_W = features[name].numpy() @ weight_WD.T + bias_W
            centred_W = values_W - values_W.mean(-1, keepdims=True)
            deviation = np.sqrt(values_W.var(-1, keepdims=True) + EPSILON)
            parts.append(centred_W / deviation * scale_W + shift_W)
        return np.concatenate(parts, axis=-1)


def _gelu(values_I: Array) -> Array:
    cubic_I: Array = values_I + np.float32(0.044715) * values_I**3
    inner_I: Array = np.float32(np.sqrt(2 / np.pi)) * cubic_I
    return np.float32(0.5) * values_I * (1 + np.tanh(inner_I))
