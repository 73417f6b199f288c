"""Speed over whole texts, from roots that another decoder's steps came to.

A mean over steps takes the next root for independent of this one. But hard text stays hard for a while: a decoder that
drafts little there, or a long tree that gains little there, takes more steps through it than those that wrote the
traces, and fewer through easy text. What all of them have in common is the text, not the steps. So tokens and seconds
are summed text by text, and the texts' times per token are averaged, as if each went on like its few recorded roots.

Legend: B roots, P texts (of a prompt under one sampling setting), X anything that is compared.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_text(values_BX: Tensor, text_B: Tensor) -> Tensor:
    """Sums over each text's roots, float64 [P, X], in the order of the texts' numbers."""
    texts_P, group_B = text_B.unique(return_inverse=True)
    sums_PX = torch.zeros(len(texts_P), *values_BX.shape[1:], dtype=torch.float64)
    return sums_PX.index_add_(0, group_B, values_BX.double())


def over_texts(tokens_PX: Tensor, seconds_PX: Tensor) -> Tensor:
    """Tokens per second when every text is as long, [X]; with numbers of steps as seconds, tokens per step."""
    return 1 / (seconds_PX / tokens_PX).mean(0)
