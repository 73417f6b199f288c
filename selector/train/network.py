"""The networks: features of a root in; the survivals of all actions, or the policy objective's
logits, out.

Legend: B roots, D hidden width of a model, F scalar features, A actions, S survivals.
"""

# No postponed annotations here: TorchScript reads the annotations of a module's attributes as
# objects.

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from selector.actions import ActionSpace
from selector.schema import Schema

DROPOUT = 0.1  # of the hidden layers under the policy objective; the paper gives no rate


class RootNetwork(nn.Module):
    """An MLP over the scalars and the hidden states, each after a linear map and a layer norm
    (DDTE, appendix E).

    It clamps all scalars to their range at the training roots, so that it never extrapolates,
    replaces a count c by log(1 + c), and standardises. Scalars that it does not see are 0.

    It may be asked before the draft's forward pass over the root: later scalars are then at their
    means and hidden states at 0, and one more input says so.

    Args:
        hidden_widths: D of each hidden state; none for a light selector.
        width: of each projected hidden state.
        hidden: widths of the MLP's layers.
        policy: whether, as in DDTE, GELU and dropout replace ReLU, and the network sees the context
            length.
    """

    count_F: Tensor
    low_F: Tensor
    high_F: Tensor
    mean_F: Tensor
    scale_F: Tensor

    def __init__(
        self,
        schema: Schema,
        hidden_widths: Sequence[int],
        outputs: int,
        width: int = 32,
        hidden: Sequence[int] = (64, 32),
        policy: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(d, width), nn.LayerNorm(width)) for d in hidden_widths
        )
        F = len(schema.scalars)
        sizes = [F + 1 + width * len(hidden_widths), *hidden]
        layers: list[nn.Module] = []
        for inputs, size in pairwise(sizes):
            layers.append(nn.Linear(inputs, size))
            if policy:
                layers += [nn.GELU(approximate="tanh"), nn.Dropout(DROPOUT)]
            else:
                layers.append(nn.ReLU())
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
        if policy:
            unseen = ["batch"]
        else:
            unseen = [scalar.name for scalar in schema.scalars if not scalar.learned]
        self.early = schema.first
        self.unseen = [schema.index(name) for name in unseen]
        counts = [scalar.unit in ("tokens", "times") for scalar in schema.scalars]
        self.register_buffer("count_F", torch.tensor(counts))
        self.register_buffer("low_F", torch.full((F,), -torch.inf))
        self.register_buffer("high_F", torch.full((F,), torch.inf))
        self.register_buffer("mean_F", torch.full((F,), 0.0))
        self.register_buffer("scale_F", torch.full((F,), 1.0))
        self.scale_F[self.unseen] = torch.inf

    @torch.no_grad()
    def standardise(self, scalars_BF: Tensor) -> None:
        """Fit the ranges and the scaling of the scalars on training roots; a constant scalar
        becomes 0."""
        self.low_F.copy_(scalars_BF.amin(0))
        self.high_F.copy_(scalars_BF.amax(0))
        scalars_BF = self._logarithmic(scalars_BF)
        deviation_F = scalars_BF.std(0, unbiased=False)
        varies_F = deviation_F > 1e-6 * (1 + scalars_BF.mean(0).abs())
        self.mean_F.copy_(scalars_BF.mean(0))
        self.scale_F.copy_(torch.where(varies_F, deviation_F, 1.0))
        self.scale_F[self.unseen] = torch.inf

    def _logarithmic(self, scalars_BF: Tensor) -> Tensor:
        return torch.where(self.count_F, scalars_BF.clamp(min=0).log1p(), scalars_BF)

    def forward(self, scalars_BF: Tensor, hidden_states: list[Tensor], passed_B1: Tensor) -> Tensor:
        """Outputs, float32 [B, outputs], of scalars and hidden states, float32 [B, D] each, in the
        order of the schema; `passed_B1` is 1 where all features are known, 0 where only the early
        scalars are."""
        clamped_BF = scalars_BF.clamp(self.low_F, self.high_F)
        scaled_BF = (self._logarithmic(clamped_BF) - self.mean_F) / self.scale_F
        parts = [scaled_BF[:, : self.early], scaled_BF[:, self.early :] * passed_B1, passed_B1]
        for i, block in enumerate(self.blocks):
            parts.append(block(hidden_states[i]) * passed_B1)
        return self.mlp(torch.cat(parts, dim=-1))


class SurvivalNetwork(nn.Module):
    """Survivals `P(tau >= t)` of all actions, as products of the probabilities that one more token
    is accepted.

    So survivals never rise along a path. The body's outputs are the logits of those probabilities.
    """

    factors_SS: Tensor

    def __init__(self, body: RootNetwork, space: ActionSpace) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("factors_SS", space.survival_factors())

    @torch.no_grad()
    def begin_at(self, mean_S: Tensor) -> None:
        """Set the biases so that training begins at the mean survivals of the training roots."""
        log_S = mean_S.double().clamp(1e-4, 1 - 1e-6).log()
        log_factor_S = torch.linalg.solve(self.factors_SS.double().T, log_S).clamp(-9, -1e-4)
        last = self.body.mlp[-1]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(0.1)
        # the logit of exp(log_factor)
        last.bias.copy_(log_factor_S - torch.log(-torch.expm1(log_factor_S)))

    def forward(self, scalars_BF: Tensor, hidden_states: list[Tensor], passed_B1: Tensor) -> Tensor:
        """Log survivals, float32 [B, S]; arguments as `RootNetwork`'s."""
        return (
            nn.functional.logsigmoid(self.body(scalars_BF, hidden_states, passed_B1))
            @ self.factors_SS
        )
