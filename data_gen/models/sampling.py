"""From logits to the sampled distribution: temperature, top-k, nucleus and min-p, in transformers'
order.

Legend: N distributions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selector.sampling import Sampling

__all__ = ["Sampling", "generation_arguments", "probabilities"]
# logits that are filtered at once; the sort of a nucleus takes forty bytes for each
ELEMENTS = 1 << 22


def generation_arguments(sampling: Sampling) -> dict[str, float | bool | None]:
    """The same setting as keyword arguments of transformers' `GenerationConfig`."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    kept = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
    return {"do_sample": True, "temperature": sampling.temperature, **kept}


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Distributions [..., V] of logits [..., V], on their device; float64 for float64 logits,
    else float32.

    Apart from the result, memory does not grow with the number of rows.
    """
    dtype = torch.promote_types(logits_V.dtype, torch.float32)
    if sampling.temperature == 0:
        likeliest_1 = logits_V.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_V, dtype=dtype).scatter_(-1, likeliest_1, 1.0)
    if sampling.cuts_nothing:
        if sampling.temperature != 1:
            logits_V = logits_V.to(dtype) / sampling.temperature
        return logits_V.softmax(-1, dtype)
    probs_V = torch.empty(logits_V.shape, dtype=dtype, device=logits_V.device)
    vocabulary = logits_V.shape[-1]
    rows = max(1, ELEMENTS // vocabulary)
    logits_blocks = logits_V.reshape(-1, vocabulary).split(rows)
    probs_blocks = probs_V.reshape(-1, vocabulary).split(rows)
    for logits_NV, probs_NV in zip(logits_blocks, probs_blocks, strict=True):
        probs_NV.copy_(_filtered(logits_NV.to(dtype), sampling))
    return probs_V


def _filtered(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature != 1:
        logits_NV = logits_NV / sampling.temperature
    if sampling.top_k > 0:
        least_N1 = logits_NV.topk(min(sampling.top_k, logits_NV.shape[-1])).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
    probs_NV = logits_NV.softmax(-1)
    if sampling.top_p < 1:
        sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
        before_NV = sorted_NV.cumsum(-1, dtype=torch.float64) - sorted_NV
        kept_NV = torch.where(before_NV < sampling.top_p, sorted_NV, 0.0)
        kept_NV = kept_NV / kept_NV.sum(-1, keepdim=True)
        probs_NV = torch.zeros_like(probs_NV).scatter_(-1, order_NV, kept_NV)
    if sampling.min_p > 0:
        least_N1 = sampling.min_p * probs_NV.amax(-1, keepdim=True)
        probs_NV = probs_NV * (probs_NV >= least_N1)
        probs_NV = probs_NV / probs_NV.sum(-1, keepdim=True)
    return probs_NV
