"""What a selector may know at a root, before anything is drafted (DDTE, appendix E), and while a trunk is drafted.

Names in `selector.schema`.

Legend: V vocabulary, D hidden width, F scalars. Leading axes, where there are any, are roots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.sampling import Sampling
from selector.runtime import LatencyProfile
from selector.schema import SCALARS_KEY

FLOOR = 1e-10


@dataclass(frozen=True)
class Row:
    """One model at one token: its last hidden state, and its distribution after the token."""

    probs_V: Tensor
    hidden_D: Tensor


def root_features(
    target_prev: Row,
    draft_prev: Row,
    draft_root: Row,
    length: int,
    sampling: Sampling,
    latency: LatencyProfile | None,
) -> dict[str, Tensor]:
    """The features of one root.

    Args:
        target_prev, draft_prev: at the token before the root token.
        draft_root: at the root token. The target has not seen that token yet.
        length: committed tokens, the root token included.
        latency: where the pass times come from; these two scalars are 0 without it.

    Returns:
        the three hidden states as float32 [D] and the scalars as float32 [F], by the names of the schema.
    """
    p_V, q_V = target_prev.probs_V, draft_prev.probs_V
    log_p_V, log_q_V = (probs.clamp(min=FLOOR).log() for probs in (p_V, q_V))
    root_V = draft_root.probs_V
    measured = torch.stack(
        [
            -(p_V @ log_p_V),
            -(q_V @ log_q_V),
            -(root_V @ root_V.clamp(min=FLOOR).log()),
            p_V @ (log_p_V - log_q_V),
            q_V @ (log_q_V - log_p_V),
            (p_V - q_V).abs().sum(),
        ]
    )
    known = [
        length,
        sampling.temperature,
        sampling.top_p,
        *((0.0, 0.0) if latency is None else latency.pass_seconds(length)),
    ]
    return {
        "target_hidden_prev": target_prev.hidden_D.float(),
        "draft_hidden_prev": draft_prev.hidden_D.float(),
        "draft_hidden_root": draft_root.hidden_D.float(),
        SCALARS_KEY: torch.cat([measured.float(), torch.tensor(known, dtype=torch.float32, device=measured.device)]),
    }


class TrunkFeatures:
    """`TRUNK_SCALARS` along one trunk, token by token: the draft's own numbers, and what was known at the root."""

    def __init__(self, length: int, sampling: Sampling) -> None:
        self.known = [float(length), float(sampling.temperature), float(sampling.top_p)]
        self.drafted = self.token_logprob = self.path_logprob = 0.0

    def drawn(self, token: int, probs_V: Tensor) -> None:
        """A token has been drawn from a distribution."""
        self.token_logprob = math.log(float(probs_V[token]))
        self.path_logprob += self.token_logprob
        self.drafted += 1

    def scalars(self) -> Tensor:
        """What is known then, float32 [F] on the CPU."""
        return torch.tensor([self.drafted, self.token_logprob, self.path_logprob, *self.known])
