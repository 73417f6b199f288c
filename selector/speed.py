"""Speed over whole texts, from roots that a decoder's steps came to.

What all ways of decoding share is the text, not the steps: each writes as many tokens for a prompt, in more steps where
that text is hard. A mean over the steps that other trees' decoding took would count hard prompts too little for a tree
that stays ahead in easy text, the more so the longer it is. So tokens and seconds are summed prompt by prompt, and the
prompts' times per token are averaged.

Legend: B roots, P prompts, X anything that is compared.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_prompt(values_BX: Tensor, prompt_B: Tensor) -> Tensor:
    """Sums over each prompt's roots, float64 [P, X], in the order of the prompts' numbers."""
    prompts_P, group_B = prompt_B.unique(return_inverse=True)
    sums_PX = torch.zeros(len(prompts_P), *values_BX.shape[1:], dtype=torch.float64)
    return sums_PX.index_add_(0, group_B, values_BX.double())


def over_texts(tokens_PX: Tensor, seconds_PX: Tensor) -> Tensor:
    """Tokens per second when every prompt is continued by equally many tokens, [X]; tokens per step for steps in place
    of seconds."""
    return 1 / (seconds_PX / tokens_PX).mean(0)
