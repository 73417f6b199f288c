"""Static actions tuned on training data: what a selector has to beat."""

from __future__ import annotations

from torch import Tensor


def best_static(tokens_A: Tensor, seconds_A: Tensor, allowed_A: Tensor | None = None) -> int:
    """Index of the action with the most total tokens over total time.

    Args:
        tokens_A, seconds_A: what each action would yield and take, summed over the steps of one sampling setting.
        allowed_A: bool; which actions may be taken. All of them if None.
    """
    speed_A = tokens_A / seconds_A
    if allowed_A is not None:
        speed_A = speed_A.where(allowed_A, -1.0)
    return int(speed_A.argmax())
