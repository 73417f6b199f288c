"""Static actions tuned on training data: what a selector has to beat; and the verifier that is worth most with each.

Legend: A actions, U verifiers.
"""

from __future__ import annotations

from torch import Tensor


def best_static(speed_A: Tensor, allowed_A: Tensor | None = None) -> int:
    """Index of the fastest action.

    Args:
        speed_A: tokens per second under one sampling setting (`speed.over_texts`).
        allowed_A: bool; which actions may be taken. All of them if None.
    """
    if allowed_A is not None:
        speed_A = speed_A.where(allowed_A, -1.0)
    return int(speed_A.argmax())


def worth_most(tokens_UA: Tensor, seconds_UA: Tensor) -> tuple[int, ...]:
    """For every action the position of the verifier with which it is worth most; the first one where all are alike.

    Time is charged at the speed of the fastest of all trees.

    Args:
        tokens_UA, seconds_UA: of a step with each verifier, under one sampling setting.
    """
    speed = (tokens_UA / seconds_UA).max()
    return tuple((tokens_UA - speed * seconds_UA).argmax(0).tolist())
