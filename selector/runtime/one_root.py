"""A mode's decision at one root over NumPy arrays: the network, the times and what every action is worth.

This is the forward pass of `selector.train.network` with the rule of `selector.decision`, because the dozens of calls
cost torch ten times as much as NumPy.

Legend: F scalars, I inputs and O outputs of a layer, A actions, K those that may be chosen, D depths, S survivals, L
context lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.runtime.artefact import ArtefactConfig, Features
from selector.schema import SCALARS_KEY

Array = NDArray[Any]

EPSILON = 1e-5  # of torch's layer norm


class OneRoot:
    """What the actions are worth at one root under one mode, from the early features or from all of them."""

    def __init__(
        self,
        weights: Mapping[str, Array | Tensor],
        config: ArtefactConfig,
        profile: LatencyProfile,
        mode: Mode,
        early: bool,
    ) -> None:
        schema, self.early, self._regressor, self._mode = config.schema, early, config.regressor, mode
        body = "network.body." if config.regressor else "network."
        own = {name.removeprefix(body): np.asarray(each) for name, each in weights.items() if name.startswith(body)}
        self._F = F = schema.first if early else len(schema.scalars)
        self._hidden_states = [] if early else list(config.hidden_states)
        self._passed = np.ones(0 if early else 1, np.float32)  # the input that says so
        self._length_at = schema.index("context_length")
        self._count_F, self._low_F, self._high_F, self._mean_F, self._scale_F = (
            own[f"{name}_F"][:F] for name in ("count", "low", "high", "mean", "scale")
        )
        parts = ("0.weight", "0.bias", "1.weight", "1.bias")  # a linear map and a layer norm
        self._blocks = [[own[f"blocks.{i}.{part}"] for part in parts] for i in range(len(self._hidden_states))]
        numbers = sorted({int(name.split(".")[1]) for name in own if name.startswith("mlp.")})
        self._layers = [(own[f"mlp.{i}.weight"], own[f"mlp.{i}.bias"]) for i in numbers]
        if early:
            self._layers[0] = self._layers[0][0][:, :F], self._layers[0][1]
        self._path_AD = config.space.survival_of_AD.numpy()
        asked = [each for each in mode.feature_levels if not early or each == schema.levels[0]]
        times = profile.at_batch(mode.batch)
        lengths_L, seconds_LA = times.table(config.space.actions, config.verifier, asked, mode.sampling)
        self._lengths_L, self._seconds_LA = lengths_L.double().numpy(), seconds_LA.double().numpy()

    def worth(self, features: Features, actions_K: Array) -> Array:
        """`E - price T` of some actions in tokens, or a policy's logits, [K]; from float32 tensors on the CPU."""
        values_K = self.tokens(features, actions_K)
        return self.net(values_K, self.length(features), actions_K) if self._regressor else values_K

    def length(self, features: Features) -> float:
        return float(features[SCALARS_KEY][self._length_at])

    def tokens(self, features: Features, actions_K: Array) -> Array:
        """Predicted block efficiencies of some actions, or a policy's logits, [K]."""
        values_S = self._outputs(features)
        if not self._regressor:
            return values_S[actions_K]
        # Survivals are products of the probabilities whose logits are the outputs (`SurvivalNetwork`).
        accepted_S = np.append(-np.logaddexp(0, -values_S), np.float32(-np.inf))  # the last one: beyond an action
        tokens_K: Array = 1 + np.exp(accepted_S[self._path_AD[actions_K]].cumsum(1)).sum(1)
        return tokens_K

    def net(self, tokens_K: Array, length: float, actions_K: Array) -> Array:
        """`E - price T` (`selector.decision.net_tokens`) of some actions at a context length."""
        lengths_L = self._lengths_L
        length = min(max(length, lengths_L[0]), lengths_L[-1])
        above = max(1, int(np.searchsorted(lengths_L, length)))
        share = (length - lengths_L[above - 1]) / (lengths_L[above] - lengths_L[above - 1])
        low_K, high_K = self._seconds_LA[above - 1 : above + 1, actions_K]
        seconds_K = low_K + share * (high_K - low_K)
        speed, rho = self._mode.speed, self._mode.rho
        net_K: Array = tokens_K - speed ** (1 - rho) * (tokens_K / seconds_K).max() ** rho * seconds_K
        return net_K

    def _outputs(self, features: Features) -> Array:
        """The network's outputs, float32 [O]."""
        scalars_F = np.minimum(np.maximum(features[SCALARS_KEY].numpy()[: self._F], self._low_F), self._high_F)
        scalars_F = np.where(self._count_F, np.log1p(np.maximum(scalars_F, 0)), scalars_F)
        parts = [(scalars_F - self._mean_F) / self._scale_F, self._passed]
        for name, (weight_OI, bias_O, scale_O, shift_O) in zip(self._hidden_states, self._blocks, strict=True):
            values_O = weight_OI @ features[name].numpy() + bias_O
            parts.append((values_O - values_O.mean()) / np.sqrt(values_O.var() + EPSILON) * scale_O + shift_O)
        values_I = np.concatenate(parts)
        for number, (weight_OI, bias_O) in enumerate(self._layers):
            if number:
                values_I = np.maximum(values_I, 0) if self._regressor else _gelu(values_I)
            values_I = weight_OI @ values_I + bias_O
        return values_I


def _gelu(values_I: Array) -> Array:
    inner_I: Array = np.float32(np.sqrt(2 / np.pi)) * (values_I + np.float32(0.044715) * values_I**3)
    return np.float32(0.5) * values_I * (1 + np.tanh(inner_I))
