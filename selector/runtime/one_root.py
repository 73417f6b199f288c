"""A mode's decision at one root in one call: the network, the times and the choice.

This is the forward pass of `selector.train.network` in Numba, because dozens of torch calls would take too long.

Legend: F scalars, D concatenated hidden states, N all numbers of the network, I inputs and O outputs of a layer, K
actions that may be chosen, U survivals and H outputs of the network that these need, L context lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import Choice
from selector.decision import Costs, Mode, best_action
from selector.jit import jit
from selector.latency import LatencyProfile
from selector.runtime.artefact import ArtefactConfig, check_finite
from selector.schema import SCALARS_KEY

Array = NDArray[Any]

EPSILON = torch.nn.LayerNorm(1).eps
NOT_FINITE = -1
PROJECTION = ("0.weight", "0.bias", "1.weight", "1.bias")  # of a hidden state: a linear map and a layer norm


class Network(NamedTuple):
    """The network in flat arrays."""

    ranges_3F: Array  # whether the logarithm of each scalar is taken, and the range that it is clamped to, float32
    widths: Array  # of the hidden states
    projected: int  # numbers that each hidden state is projected to
    sizes: Array  # O of the layers of the MLP
    numbers_N: Array  # weights and biases of each hidden state's projection and layer norm, then of each layer
    factors_UH: Array  # for `_tokens`; empty for a policy, whose outputs are the actions' logits
    sums_KU: Array  # for `_tokens`, as well; empty for a policy, whose activation is GELU


class OneRoot:
    """A network's decision at one root under one mode, from the features of one level.

    The first layer includes the scaling of the scalars. The last layer keeps only the outputs that the allowed actions
    need.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], config: ArtefactConfig, profile: LatencyProfile, mode: Mode, level: str
    ) -> None:
        space, schema = config.space, config.schema
        allowed = sorted(mode.allowed) or list(range(len(space)))
        self.actions = [space.actions[a] for a in allowed]
        first = level == schema.levels[0]
        self.hidden_states = {} if first else config.hidden_states
        inputs = schema.first if first else len(schema.scalars)
        self._length_at = schema.index("context_length")
        self._network = _network(weights, config, allowed, inputs, list(self.hidden_states.values()))
        asked = mode.feature_levels[: mode.feature_levels.index(level) + 1]
        times, setting = profile.at_batch(mode.batch), (mode.temperature, mode.top_p)
        lengths_L, seconds_LA = times.table(space.actions, config.verifier, asked, setting)
        seconds_LK = _plain(seconds_LA[:, allowed].double())
        self._costs = Costs(_plain(lengths_L.double()), seconds_LK, mode.speed, mode.rho)
        self._no_states = np.zeros(0, np.float32)

    def tokens(self, features: dict[str, Tensor]) -> Array:
        """Predicted block efficiencies of `actions` at one root, float64 [K], of a regressor that sees scalars alone.
        InputError where one of them is not finite."""
        check_finite(features)
        outputs_H = _outputs(features[SCALARS_KEY].numpy(), self._no_states, self._network)
        tokens_K: Array = _tokens(outputs_H, self._network)
        return tokens_K

    def choose(self, features: dict[str, Tensor]) -> Choice:
        """The action at one root, from float32 tensors on the CPU; InputError where one of them is not finite."""
        states_D = self._no_states
        if self.hidden_states:
            states_D = np.concatenate([features[name].numpy() for name in self.hidden_states])
        best = _decide(features[SCALARS_KEY].numpy(), states_D, self._length_at, *self._network, *self._costs)
        if best == NOT_FINITE:
            check_finite(features)  # raises with the feature's name
        return self.actions[best]

    def choose_for_all(self, features: Sequence[dict[str, Tensor]]) -> Choice:
        """One action for several roots, by their mean block efficiencies and lengths. InputError as `tokens`."""
        tokens_K = np.mean([self.tokens(each) for each in features], axis=0)
        length = np.mean([each[SCALARS_KEY][self._length_at] for each in features])
        return self.actions[best_action(tokens_K, float(length), self._costs)]


def _network(
    weights: Mapping[str, Tensor], config: ArtefactConfig, allowed: list[int], inputs: int, widths: list[int]
) -> Network:
    """The network for some actions, from `inputs` scalars and hidden states of these widths."""
    body = "network.body." if config.regressor else "network."
    own = {name.removeprefix(body): weight for name, weight in weights.items() if name.startswith(body)}
    projections = [own[f"blocks.{i}.{part}"] for i in range(len(widths)) for part in PROJECTION]
    numbers = sorted({int(name.split(".")[1]) for name in own if name.startswith("mlp.")})
    layers = [(own[f"mlp.{i}.weight"], own[f"mlp.{i}.bias"]) for i in numbers]
    layers[0] = _first_layer(*layers[0], own["mean_F"], own["scale_F"], inputs, bool(widths))
    outputs: Tensor | list[int] = allowed
    factors_UH, sums_KU = torch.zeros(0, 0), torch.zeros(0, 0)
    if config.regressor:
        sums_SK = config.space.sums_SA[:, allowed]
        survivals = sums_SK.any(1)
        factors_HU = config.space.survival_factors()[:, survivals]
        outputs = factors_HU.any(1)
        factors_UH, sums_KU = factors_HU[outputs].T, sums_SK[survivals].T
    layers[-1] = layers[-1][0][outputs], layers[-1][1][outputs]
    parts = [*projections, *(part for layer in layers for part in layer)]
    return Network(
        ranges_3F=torch.stack([own[name][:inputs].float() for name in ("count_F", "low_F", "high_F")]).numpy(),
        widths=np.array(widths, np.int64),
        projected=len(projections[1]) if projections else 0,
        sizes=np.array([len(bias_O) for _, bias_O in layers]),
        numbers_N=torch.cat([part.flatten() for part in parts]).numpy(),
        factors_UH=_plain(factors_UH),
        sums_KU=_plain(sums_KU),
    )


def _first_layer(
    weight_OI: Tensor, bias_O: Tensor, mean_F: Tensor, scale_F: Tensor, inputs: int, hidden: bool
) -> tuple[Tensor, Tensor]:
    """The first layer for the first `inputs` scalars, including their scaling."""
    F = len(scale_F)
    scaled_OF = weight_OI[:, :inputs] / scale_F[:inputs]
    bias_O = bias_O - scaled_OF @ mean_F[:inputs]
    if inputs == F:
        bias_O = bias_O + weight_OI[:, F]  # the input that is 1 after the draft has passed the root
    hidden_OI = weight_OI[:, F + 1 :] if hidden else weight_OI[:, :0]
    return torch.cat([scaled_OF, hidden_OI], dim=-1), bias_O


def _plain(values: Tensor) -> Array:
    array: Array = np.ascontiguousarray(values.numpy())
    return array


@jit
def _decide(
    scalars_F: Array,
    states_D: Array,
    length_at: int,
    ranges_3F: Array,
    widths: Array,
    projected: int,
    sizes: Array,
    numbers_N: Array,
    factors_UH: Array,
    sums_KU: Array,
    lengths_L: Array,
    seconds_LK: Array,
    speed: float,
    rho: float,
) -> int:
    """The position of the chosen action; `NOT_FINITE` where a feature is not finite.

    It takes the fields of `Network` and `Costs` one by one, because Numba takes twice as long to read named tuples.
    """
    network = Network(ranges_3F, widths, projected, sizes, numbers_N, factors_UH, sums_KU)
    costs = Costs(lengths_L, seconds_LK, speed, rho)
    if not (np.isfinite(scalars_F).all() and np.isfinite(states_D).all()):
        return NOT_FINITE
    outputs_H = _outputs(scalars_F, states_D, network)
    if len(network.sums_KU) == 0:
        return int(np.argmax(outputs_H))
    return best_action(_tokens(outputs_H, network), float(scalars_F[length_at]), costs)


@jit
def _outputs(scalars_F: Array, states_D: Array, network: Network) -> Array:
    """The network's outputs, [H], from the first F scalars."""
    projected, numbers_N = network.projected, network.numbers_N
    counts_F, low_F, high_F = network.ranges_3F
    F = len(counts_F)
    values_I = np.empty(F + projected * len(network.widths), np.float32)
    for f in range(F):
        value = min(max(scalars_F[f], low_F[f]), high_F[f])
        values_I[f] = np.log1p(max(value, np.float32(0))) if counts_F[f] else value
    at, begin = 0, 0
    for i in range(len(network.widths)):
        state = states_D[begin : begin + network.widths[i]]
        block = values_I[F + i * projected : F + (i + 1) * projected]
        at = _linear(numbers_N, at, state, block)
        _normalise(block, numbers_N[at : at + projected], numbers_N[at + projected : at + 2 * projected])
        at, begin = at + 2 * projected, begin + network.widths[i]
    outputs_H = values_I
    for layer in range(len(network.sizes)):
        if layer > 0:
            for h in range(len(outputs_H)):
                value = outputs_H[h]
                outputs_H[h] = max(value, np.float32(0)) if len(network.sums_KU) else _gelu(value)
        outputs_O = np.empty(network.sizes[layer], np.float32)
        at = _linear(numbers_N, at, outputs_H, outputs_O)
        outputs_H = outputs_O
    return outputs_H


@jit
def _gelu(value: np.float32) -> np.float32:
    """The activation of a policy's network, with the hyperbolic tangent as in torch's `approximate="tanh"`."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (value + np.float32(0.044715) * value**3)
    return np.float32(0.5) * value * (np.float32(1) + np.tanh(inner))


@jit
def _normalise(values_O: Array, weights_O: Array, biases_O: Array) -> None:
    """Apply a layer norm, in loops, because array expressions take Numba seconds to compile."""
    number, total, squares = np.float32(len(values_O)), np.float32(0), np.float32(0)
    for value in values_O:
        total += value
    for value in values_O:
        squares += (value - total / number) ** 2
    scale = np.sqrt(squares / number + np.float32(EPSILON))
    for o in range(len(values_O)):
        values_O[o] = (values_O[o] - total / number) / scale * weights_O[o] + biases_O[o]


@jit
def _tokens(outputs_H: Array, network: Network) -> Array:
    """Block efficiencies of the actions that may be chosen, [K]: sums of survivals, which are products of the
    probabilities whose logits are the outputs (`selector.train.network.SurvivalNetwork`)."""
    # The logarithm of the logistic function in a form that does not overflow.
    log_accepted_H = np.minimum(outputs_H, np.float32(0)) - np.log1p(np.exp(-np.abs(outputs_H)))
    survivals_U = np.empty(len(network.factors_UH), np.float32)
    for u in range(len(survivals_U)):
        survivals_U[u] = np.exp(_dot(network.factors_UH[u], log_accepted_H))
    tokens_K = np.empty(len(network.sums_KU))
    for k in range(len(tokens_K)):
        tokens_K[k] = 1 + _dot(network.sums_KU[k], survivals_U)
    return tokens_K


@jit
def _linear(numbers_N: Array, at: int, values_I: Array, outputs_O: Array) -> int:
    """Applies a linear layer, whose weights [O, I] and biases begin at `at`; returns the position after them."""
    I, O = len(values_I), len(outputs_O)
    for o in range(O):
        outputs_O[o] = numbers_N[at + O * I + o] + _dot(numbers_N[at + o * I : at + (o + 1) * I], values_I)
    return at + O * I + O


@jit
def _dot(one_I: Array, other_I: Array) -> np.float32:
    total = np.float32(0)
    for i in range(len(one_I)):
        total += one_I[i] * other_I[i]
    return total
