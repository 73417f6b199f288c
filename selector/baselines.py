"""Static actions tuned on training data: what a selector has to beat."""

from __future__ import annotations

from torch import Tensor


def best_static(efficiency_BA: Tensor, seconds_BA: Tensor, allowed_A: Tensor | None = None) -> int:
    """Index of the action with the most total tokens over total time.

    Args:
        efficiency_BA: block efficiencies of the roots of one sampling setting, in tokens.
        seconds_BA: predicted step times.
        allowed_A: bool; which actions may be taken. All of them if None.
    """
    speed_A = efficiency_BA.double().sum(0) / seconds_BA.double().sum(0)
    if allowed_A is not None:
        speed_A = speed_A.where(allowed_A, -1.0)
    return int(speed_A.argmax())
