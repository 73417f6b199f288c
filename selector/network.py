"""The paper's network: features of a root in, one number per action out (DDTE, appendix E).

Legend: B roots, D hidden width of a model, F scalar features, A actions.
"""

# No postponed annotations here: TorchScript reads the annotations of a module's attributes as objects.

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from selector.schema import HIDDEN_STATES


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
    output_scale_A: Tensor

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
        self.register_buffer("output_scale_A", torch.ones(outputs))

    def standardise(self, scalars_BF: Tensor, targets_BA: Tensor | None = None) -> None:
        """Fit the scaling of inputs, and of outputs where these predict `targets_BA`, on the training split."""
        used = scalars_BF[:, self.used_F]
        self.scalar_mean_F.copy_(used.mean(0))
        self.scalar_scale_F.copy_(_scale(used))
        if targets_BA is not None:
            self.output_mean_A.copy_(targets_BA.mean(0))
            self.output_scale_A.copy_(_scale(targets_BA))

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
        return self.mlp(torch.cat(parts, dim=-1)) * self.output_scale_A + self.output_mean_A


def _scale(values_BF: Tensor) -> Tensor:
    """Standard deviations; 1 for what does not vary, so that a constant feature stays at 0."""
    deviation = values_BF.std(0, unbiased=False)
    return torch.where(deviation > 1e-6 * (1 + values_BF.mean(0).abs()), deviation, 1.0)


def split_features(features: dict[str, Tensor], scalars_key: str) -> tuple[list[Tensor], Tensor]:
    """A feature dictionary as the network's two arguments."""
    return [features[name] for name in HIDDEN_STATES], features[scalars_key]
