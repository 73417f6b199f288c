"""A mode's decision at one root, in one call: the network, the times, and the choice.

Legend: F scalars, D hidden states one after another, N all numbers of the network, I inputs and O outputs of a layer,
H outputs of the network that the allowed actions need, U survivals that they need, K actions that may be chosen, L
context lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import ActionSpace, Choice
from selector.decision import Mode
from selector.jit import jit
from selector.latency import LatencyProfile
from selector.runtime.artefact import check_finite
from selector.schema import LENGTH_AT, SCALARS_KEY, SCHEMAS
from selector.train.network import survival_factors

Array = NDArray[Any]

EPSILON = torch.nn.LayerNorm(1).eps
NOT_FINITE = -1
PROJECTION = ("0.weight", "0.bias", "1.weight", "1.bias")  # of a hidden state: a linear map and a layer norm


class OneRoot:
    """What a network decides at one root under one sampling setting, from the features of one level.

    The scaling of the scalars is made part of the first layer, and the last layer keeps only the outputs that the
    allowed trees need.

    Args:
        weights: of the exported module.
        config: the artefact's.
        profile: of the machine that it decides on.
        level: which of the mode's features it is asked with.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], config: dict[str, Any], profile: LatencyProfile, mode: Mode, level: str
    ) -> None:
        space, schema = ActionSpace.of_json(config["space"]), SCHEMAS[config["schema"]]
        allowed = sorted(mode.allowed) or list(range(len(space)))
        self.actions = [space.actions[a] for a in allowed]
        with_less = level == schema.levels[0]
        hidden_states = {} if with_less else config["features"]["hidden_states"]
        self.hidden_names, widths = list(hidden_states), list(hidden_states.values())
        inputs = schema.first if with_less else len(schema.scalars)
        regressor = config["objective"] == "regressor"
        body = "network.body." if regressor else "network."
        own = {name.removeprefix(body): weight for name, weight in weights.items() if name.startswith(body)}
        projections = [own[f"blocks.{i}.{part}"] for i in range(len(widths)) for part in PROJECTION]
        numbers = sorted({int(name.split(".")[1]) for name in own if name.startswith("mlp.")})
        layers = [(own[f"mlp.{i}.weight"], own[f"mlp.{i}.bias"]) for i in numbers]
        layers[0] = _of_what_is_seen(*layers[0], own["mean_F"], own["scale_F"], inputs, bool(widths))
        factors_UH, sums_KU = torch.zeros(0, 0), torch.zeros(0, 0)
        if regressor:
            outputs, factors_UH, sums_KU = _of_survivals(space, allowed)
            layers[-1] = layers[-1][0][outputs], layers[-1][1][outputs]
        else:
            layers[-1] = layers[-1][0][allowed], layers[-1][1][allowed]
        asked = mode.feature_levels[: mode.feature_levels.index(level) + 1]
        times = profile.at_batch(mode.batch)
        lengths_L, seconds_LA = times.table(space.actions, config["verifier"], asked, mode.top_p < 1)
        parts = [*projections, *(part for layer in layers for part in layer)]
        self._constants = (
            own["count_F"][:inputs].numpy(),
            np.array(widths, np.int64),
            len(projections[1]) if projections else 0,
            np.array([len(bias_O) for _, bias_O in layers]),
            torch.cat([part.flatten() for part in parts]).numpy(),
            _plain(factors_UH),
            _plain(sums_KU),
            _plain(lengths_L.double()),
            _plain(seconds_LA[:, allowed].double()),
            mode.speed,
            mode.rho,
            LENGTH_AT,
        )
        self._no_states = np.zeros(0, np.float32)

    def tokens(self, features: dict[str, Tensor]) -> Array:
        """Predicted block efficiencies of `actions` at one root, [K]; of a regressor that sees scalars alone.
        InputError where one of them is not finite."""
        check_finite(features)
        network, survivals = self._constants[:5], self._constants[5:7]
        outputs_H = _outputs(features[SCALARS_KEY].numpy(), self._no_states, *network)
        tokens_K: Array = _tokens(outputs_H, *survivals)
        return tokens_K

    def choose(self, features: dict[str, Tensor]) -> Choice:
        """The action at one root, from float32 tensors on the CPU; InputError where one of them is not finite."""
        scalars_F = features[SCALARS_KEY].numpy()
        states_D = self._no_states
        if self.hidden_names:
            states_D = np.concatenate([features[name].numpy() for name in self.hidden_names])
        best = _decide(scalars_F, states_D, *self._constants)
        if best == NOT_FINITE:
            check_finite(features)  # says which
        return self.actions[best]


def _of_what_is_seen(
    weight_OI: Tensor, bias_O: Tensor, mean_F: Tensor, scale_F: Tensor, inputs: int, hidden: bool
) -> tuple[Tensor, Tensor]:
    """The first layer, with the scaling of the scalars in it, for the first `inputs` of them alone."""
    F = len(scale_F)
    scaled_OF = weight_OI[:, :inputs] / scale_F[:inputs]
    bias_O = bias_O - scaled_OF @ mean_F[:inputs]
    if inputs == F:
        bias_O = bias_O + weight_OI[:, F]  # the input that says that the draft has passed the root
    hidden_OI = weight_OI[:, F + 1 :] if hidden else weight_OI[:, :0]
    return torch.cat([scaled_OF, hidden_OI], dim=-1), bias_O


def _of_survivals(space: ActionSpace, allowed: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The network's outputs that some actions need, bool; of these the factors of the survivals that they need, [U, H];
    and which survivals each action's block efficiency is the sum of, [K, U]."""
    sums_UK = space.sums_SA[:, allowed]
    survivals = sums_UK.any(1)
    factors_HU = survival_factors(space)[:, survivals]
    outputs = factors_HU.any(1)
    return outputs, factors_HU[outputs].T, sums_UK[survivals].T


def _plain(values: Tensor) -> Array:
    array: Array = np.ascontiguousarray(values.numpy())
    return array


@jit
def _decide(
    scalars_F: Array,
    states_D: Array,
    counts_F: Array,
    widths: Array,
    projected: int,
    sizes: Array,
    network_N: Array,
    factors_UH: Array,
    sums_KU: Array,
    lengths_L: Array,
    seconds_LK: Array,
    speed: float,
    rho: float,
    length_at: int,
) -> int:
    """The position of the action to take, as `decision.choices` has it; `NOT_FINITE` where a feature is not finite.

    Args:
        counts_F: bool, the scalars that are numbers of tokens, of which the logarithm goes in; longer scalars are cut.
        widths: of the hidden states; each is projected to `projected` numbers, which a layer norm follows.
        sizes: O of the layers of the MLP.
        network_N: all weights and biases in turn: of each hidden state's projection and layer norm, of each layer.
        factors_UH, sums_KU: see `selector.train.network`; without them the network's outputs are the actions' logits.
        seconds_LK: times of a step, float64.
        length_at: which scalar is the context length. An argument, for Numba keeps compiled code until this file
            changes, and with it the values of globals that other files define.
    """
    if not (np.isfinite(scalars_F).all() and np.isfinite(states_D).all()):
        return NOT_FINITE
    outputs_H = _outputs(scalars_F, states_D, counts_F, widths, projected, sizes, network_N)
    if len(sums_KU) == 0:
        return int(np.argmax(outputs_H))
    tokens_K = _tokens(outputs_H, factors_UH, sums_KU)
    length = min(max(float(scalars_F[length_at]), lengths_L[0]), lengths_L[-1])
    above = max(1, np.searchsorted(lengths_L, length))
    share = (length - lengths_L[above - 1]) / (lengths_L[above] - lengths_L[above - 1])
    seconds_K = seconds_LK[above - 1] + share * (seconds_LK[above] - seconds_LK[above - 1])
    price = speed ** (1 - rho) * (tokens_K / seconds_K).max() ** rho
    return int(np.argmax(tokens_K - price * seconds_K))


@jit
def _outputs(
    scalars_F: Array,
    states_D: Array,
    counts_F: Array,
    widths: Array,
    projected: int,
    sizes: Array,
    network_N: Array,
) -> Array:
    """The network's outputs, [H]; arguments as those of `_decide`."""
    F = len(counts_F)
    values_I = np.empty(F + projected * len(widths), np.float32)
    for f in range(F):
        values_I[f] = np.log1p(max(scalars_F[f], np.float32(0))) if counts_F[f] else scalars_F[f]
    at, begin = 0, 0
    for i in range(len(widths)):
        state = states_D[begin : begin + widths[i]]
        block = values_I[F + i * projected : F + (i + 1) * projected]
        at = _linear(network_N, at, state, block)
        block -= block.mean()
        block /= np.sqrt((block * block).mean() + np.float32(EPSILON))
        block *= network_N[at : at + projected]
        block += network_N[at + projected : at + 2 * projected]
        at, begin = at + 2 * projected, begin + widths[i]
    outputs_H = values_I
    for layer in range(len(sizes)):
        if layer > 0:
            outputs_H = np.maximum(outputs_H, np.float32(0))
        outputs_O = np.empty(sizes[layer], np.float32)
        at = _linear(network_N, at, outputs_H, outputs_O)
        outputs_H = outputs_O
    return outputs_H


@jit
def _tokens(outputs_H: Array, factors_UH: Array, sums_KU: Array) -> Array:
    """Block efficiencies of the actions that may be chosen, [K]."""
    # the logarithm of the logistic function, which must not overflow
    log_accepted_H = np.minimum(outputs_H, np.float32(0)) - np.log1p(np.exp(-np.abs(outputs_H)))
    survivals_U = np.empty(len(factors_UH), np.float32)
    for u in range(len(survivals_U)):
        survivals_U[u] = np.exp(_dot(factors_UH[u], log_accepted_H))
    tokens_K = np.empty(len(sums_KU))
    for k in range(len(tokens_K)):
        tokens_K[k] = 1 + _dot(sums_KU[k], survivals_U)
    return tokens_K


@jit
def _linear(network_N: Array, at: int, values_I: Array, outputs_O: Array) -> int:
    """A linear layer, its weights [O, I] and then its biases from `at` on; the position after them."""
    I, O = len(values_I), len(outputs_O)
    for o in range(O):
        outputs_O[o] = network_N[at + O * I + o] + _dot(network_N[at + o * I : at + (o + 1) * I], values_I)
    return at + O * I + O


@jit
def _dot(one_I: Array, other_I: Array) -> np.float32:
    total = np.float32(0)
    for i in range(len(one_I)):
        total += one_I[i] * other_I[i]
    return total
