"""The paper's network: features of a root in, one number per action out (DDTE, appendix E); and what a regressor adds.

A regressor of several verifiers predicts *options*: every action with the first verifier, with the second, and so on.

Legend: B roots, D hidden width of a model, F scalar features, A actions, O options, I increments, T trunk tokens.
"""

# No postponed annotations here: TorchScript reads the annotations of a module's attributes as objects.

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from selector.actions import Action, ActionSpace
from selector.schema import HIDDEN_STATES

NEVER = 1e9  # the cost, in tokens, of what cannot be drafted any more


class SelectorNetwork(nn.Module):
    """Each hidden state to `width` by a linear map and layer norm, joined with the scalars, then an MLP.

    Standardisation is part of the module: `standardise` sets it from the training split.

    Args:
        hidden_widths: D of each hidden state, in the order of `HIDDEN_STATES`.
        used_scalars: positions of the scalar features that the network may see.
        outputs: A.
    """

    used_F: Tensor
    scalar_mean_F: Tensor
    scalar_scale_F: Tensor
    output_mean_A: Tensor

    def __init__(
        self,
        hidden_widths: Sequence[int],
        used_scalars: Sequence[int],
        outputs: int,
        width: int = 128,
        hidden: Sequence[int] = (512, 32),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, width), nn.LayerNorm(width)) for d in hidden_widths)
        sizes = [width * len(hidden_widths) + len(used_scalars), *hidden]
        layers: list[nn.Module] = []
        for inputs, size in pairwise(sizes):
            layers += [nn.Linear(inputs, size), nn.GELU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
        self.register_buffer("used_F", torch.tensor(list(used_scalars)))
        self.register_buffer("scalar_mean_F", torch.zeros(len(used_scalars)))
        self.register_buffer("scalar_scale_F", torch.ones(len(used_scalars)))
        self.register_buffer("output_mean_A", torch.zeros(outputs))

    def standardise(self, scalars_BF: Tensor) -> None:
        """Fit the scaling of inputs on the training split."""
        used = scalars_BF[:, self.used_F]
        self.scalar_mean_F.copy_(used.mean(0))
        self.scalar_scale_F.copy_(_scale(used))

    def forward(self, hidden_states: list[Tensor], scalars_BF: Tensor) -> Tensor:
        """Args:
            hidden_states: float32 [B, D] each, in the order of `HIDDEN_STATES`.
            scalars_BF: all scalar features, in the order of the schema.

        Returns:
            float32 [B, A].
        """
        parts = [(scalars_BF[:, self.used_F] - self.scalar_mean_F) / self.scalar_scale_F]
        for i, block in enumerate(self.blocks):
            parts.append(block(hidden_states[i]))
        return self.mlp(torch.cat(parts, dim=-1)) + self.output_mean_A

    @torch.jit.export
    def some(self, hidden_states: list[Tensor], scalars_BF: Tensor, needed_I: Tensor, sums_AI: Tensor) -> Tensor:
        """All outputs at one root, [A]; for `IncrementNetwork.some`, whose other arguments have no meaning here."""
        return self.forward(hidden_states, scalars_BF)[0]


class IncrementNetwork(nn.Module):
    """What every option yields beyond the tokens that are drafted already, as a running sum that never falls.

    Block efficiency is one plus the sum of what each level adds, along the trunk and then along the branches. The body
    gives the increments; a matrix of zeros and ones adds them up for each option.

    Args:
        body: with as many outputs as `increment_matrix` has rows.
    """

    sums_IO: Tensor

    def __init__(self, body: SelectorNetwork, sums_IO: Tensor) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("sums_IO", sums_IO)

    def standardise(self, scalars_BF: Tensor, mean_increments_I: Tensor) -> None:
        """Fit the scaling of inputs on the training split, and begin at its mean increments."""
        self.body.standardise(scalars_BF)
        self.body.output_mean_A.copy_(_inverse_softplus(mean_increments_I))

    def forward(self, hidden_states: list[Tensor], scalars_BF: Tensor) -> Tensor:
        """As in `SelectorNetwork`; [B, O] tokens."""
        return nn.functional.softplus(self.body(hidden_states, scalars_BF)) @ self.sums_IO

    @torch.jit.export
    def some(self, hidden_states: list[Tensor], scalars_BF: Tensor, needed_I: Tensor, sums_AI: Tensor) -> Tensor:
        """What some options yield at one root, [A], from the increments that they need and the matrix between both."""
        increments_I = nn.functional.softplus(self.body(hidden_states, scalars_BF)[0, needed_I])
        return torch.mv(sums_AI, increments_I)


class TrunkBody(nn.Module):
    """What is known at a token of a trunk that is being drafted, as a vector that a head reads.

    It is asked between two draft passes, so it is as small as it can be: one MLP on the draft's hidden state and the
    scalars, whose layers take one token at a time once they are `folded`.

    Args:
        inputs: D + F.
    """

    mean_F: Tensor
    scale_F: Tensor

    def __init__(self, inputs: int, hidden: Sequence[int] = (64, 32), dropout: float = 0.1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, size in pairwise([inputs, *hidden]):
            layers += [nn.Linear(before, size), nn.ReLU(), nn.Dropout(dropout)]  # the cheapest there is
        self.body = nn.Sequential(*layers)
        self.register_buffer("mean_F", torch.zeros(inputs))
        self.register_buffer("scale_F", torch.ones(inputs))

    @torch.no_grad()
    def standardise_inputs(self, hidden_BD: Tensor, scalars_BF: Tensor) -> None:
        """Fit the scaling of inputs on the training split."""
        inputs_BF = torch.cat([hidden_BD, scalars_BF], dim=-1)
        self.mean_F.copy_(inputs_BF.mean(0))
        self.scale_F.copy_(_scale(inputs_BF))

    def encoded(self, hidden_BD: Tensor, scalars_BF: Tensor) -> Tensor:
        """The last hidden layer, [B, H]; arguments as in the networks' `forward`."""
        return self.body((torch.cat([hidden_BD, scalars_BF], dim=-1) - self.mean_F) / self.scale_F)

    @torch.no_grad()
    def folded(self) -> nn.ModuleList:
        """The body's layers for one token at a time, with the scaling of inputs inside the first."""
        scale_F, mean_F = self.scale_F, self.mean_F
        layers = []
        for linear in (module for module in self.body if isinstance(module, nn.Linear)):
            weight = linear.weight / scale_F
            layers.append(VectorLayer(weight, linear.bias - weight @ mean_F))
            scale_F, mean_F = torch.ones(len(weight)), torch.zeros(len(weight))
        return nn.ModuleList(layers)


class TrunkNetwork(TrunkBody):
    """What is known at a token of a trunk that is being drafted in, what each further action adds out.

    Its last layer stands apart, because an engine needs only the increments of actions that are ever chosen.

    Args:
        inputs: D + F.
        sums_IO: as from `increment_matrix`.
    """

    sums_IO: Tensor

    def __init__(self, inputs: int, sums_IO: Tensor, hidden: Sequence[int] = (64, 32), dropout: float = 0.1) -> None:
        super().__init__(inputs, hidden, dropout)
        self.head = nn.Linear(hidden[-1], len(sums_IO))
        self.register_buffer("sums_IO", sums_IO)

    @torch.no_grad()
    def standardise(self, hidden_BD: Tensor, scalars_BF: Tensor, mean_increments_I: Tensor) -> None:
        """Fit the scaling of inputs on the training split, and begin at its mean increments."""
        self.standardise_inputs(hidden_BD, scalars_BF)
        self.head.bias.copy_(_inverse_softplus(mean_increments_I))

    def forward(self, hidden_BD: Tensor, scalars_BF: Tensor) -> Tensor:
        """Args:
            hidden_BD: `TRUNK_STATE`, float32.
            scalars_BF: `TRUNK_SCALARS`, float32.

        Returns:
            tokens, [B, O].
        """
        return nn.functional.softplus(self.head(self.encoded(hidden_BD, scalars_BF))) @ self.sums_IO


class VectorLayer(nn.Module):
    """A linear layer and ReLU on a vector: two calls of torch, where a call takes longer than its arithmetic."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone())
        self.register_buffer("bias", bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.addmv(self.bias, self.weight, inputs).relu_()


def _inverse_softplus(values: Tensor) -> Tensor:
    floored = values.clamp(min=1e-3)
    return floored + torch.log(-torch.expm1(-floored))


def increment_matrix(space: ActionSpace, verifiers: int = 1) -> Tensor:
    """Which increments an option is the sum of, float32 [I, O]: each depth of a chain, on which all verifiers are one,
    and each depth of the branches for every verifier, number of branches and trunk depth."""
    length = space.max_L1 + space.max_L2
    branching = (space.max_K - 1) * (space.max_L1 + 1) * space.max_L2
    sums_IO = torch.zeros(length + verifiers * branching, verifiers * len(space))
    for v in range(verifiers):
        for a, (K, L1, L2) in enumerate(space, v * len(space)):
            sums_IO[: L1 + L2 if K == 1 else L1, a] = 1
            if K > 1:
                start = length + v * branching + ((K - 2) * (space.max_L1 + 1) + L1) * space.max_L2
                sums_IO[start : start + L2, a] = 1
    return sums_IO


def increments_of(values_O: Tensor, sums_IO: Tensor) -> Tensor:
    """The increments of which the given sums consist, [I]: the inverse of `increment_matrix`."""
    return torch.linalg.lstsq(sums_IO.T.double(), values_O.double().unsqueeze(-1)).solution[:, 0].float()


def picked(values_O: Tensor, verifier_A: Tensor) -> Tensor:
    """Of the options [.., O], every action with one verifier, by its position in `verifier_A` [.., A]."""
    values_UA = values_O.unflatten(-1, (-1, verifier_A.shape[-1]))
    return values_UA.gather(-2, verifier_A.unsqueeze(-2).expand(*values_UA.shape[:-2], 1, -1)).squeeze(-2)


def further_actions(space: ActionSpace) -> Tensor:
    """What an action is once `t` trunk tokens are drafted already: index of the whole, -1 where none; int64 [T, A]."""
    index_TA = torch.full((space.decisions + 1, len(space)), -1)
    for t in range(space.decisions + 1):
        for a, (K, L1, L2) in enumerate(space):
            if K == 1 and t + L1 + L2 <= space.max_L1 + space.max_L2:
                index_TA[t, a] = space.index(space.chain(t + L1 + L2))
            elif K > 1 and t + L1 <= space.max_L1:
                index_TA[t, a] = space.index(Action(K, t + L1, L2))
    return index_TA


def further_cost(cost_BA: Tensor, space: ActionSpace) -> Tensor:
    """What each further action costs once `t` trunk tokens are drafted, [B, T, A], in the unit of `cost_BA`."""
    whole_TA = further_actions(space).to(cost_BA.device)
    chains_T = torch.tensor([space.index(space.chain(t)) for t in range(len(whole_TA))])
    further_BTA = cost_BA[:, whole_TA.clamp(min=0)] - cost_BA[:, chains_T].unsqueeze(-1)
    return further_BTA.masked_fill(whole_TA < 0, NEVER)


def _scale(values_BF: Tensor) -> Tensor:
    """Standard deviations; 1 for what does not vary, so that a constant feature stays at 0."""
    deviation = values_BF.std(0, unbiased=False)
    return torch.where(deviation > 1e-6 * (1 + values_BF.mean(0).abs()), deviation, 1.0)


def split_features(features: dict[str, Tensor], scalars_key: str) -> tuple[list[Tensor], Tensor]:
    """A feature dictionary as the network's two arguments."""
    return [features[name] for name in HIDDEN_STATES], features[scalars_key]
