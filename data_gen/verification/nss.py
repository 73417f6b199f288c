"""NSS, naive speculation by sampling: the target's own draw, which may happen to be a drafted token (SpecInfer).

At each node, from the root down:

    Y ~ p;  if Y is a child, go there;  else stop, Y is the extra token
"""

from __future__ import annotations

from torch import Tensor

from data_gen.verification.base import STYLES, TopDown
from data_gen.verification.profile import NodeDistributions, is_copy


class NSS(TopDown):
    """`Y ~ p`, whatever was drafted: lossless for every draft, and the floor for all others."""

    name = "nss"
    styles = STYLES

    def accept(self, p: Tensor, q: Tensor) -> Tensor:
        return p

    def branching(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return profile.at(entries_Mk)[0].masked_fill(is_copy(entries_Mk), 0.0)

    def leftover(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return profile.residual(profile.ones(), 0 * profile.ones()).scatter_(-1, entries_Mk, 0.0)
