"""Verifiers with faults that were shipped or published, and a right one that only draws."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from data_gen.trees import DraftTree


def recursive(
    tree: DraftTree,
    p_NV: Tensor,
    q_NV: Tensor,
    generator: torch.Generator,
    normalised: bool = True,
    by_ratio: bool = False,
) -> tuple[int, int]:
    """Recursive rejection of the children, one after another, `min(1, p/q)` each: right where they
    were drawn."""
    node = 0
    while True:
        p_V, q_V = p_NV[node], q_NV[node]
        children = tree.children(node)
        if by_ratio:
            children = sorted(children, key=lambda child: -float(p_NV[node, tree.token(child)]))
        for child in children:
            token = tree.token(child)
            if float(torch.rand((), generator=generator)) < float(p_V[token] / q_V[token]):
                node = child
                break
            p_V = (p_V - q_V).clamp(min=0)
            p_V = p_V / p_V.sum() if normalised and p_V.sum() > 0 else p_V
        else:
            last_V = p_V if p_V.sum() > 0 else p_NV[node]
            return node, int(torch.multinomial(last_V, 1, generator=generator))


right = recursive
min_ratio_on_top_k = recursive  # as if the k most likely tokens had been drawn
residual_not_renormalised = partial(recursive, normalised=False)
siblings_out_of_order = partial(recursive, by_ratio=True)


def block_without_minimum(tree: DraftTree, p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """The law of Block Verification on the first path whose weights are `min(1, product)`, not
    running minima."""
    nodes, products = [0], [1.0]
    while children := tree.children(nodes[-1]):
        token = tree.token(children[0])
        products.append(products[-1] * float(p_NV[nodes[-1], token] / q_NV[nodes[-1], token]))
        nodes.append(children[0])
    law_NV, left = torch.zeros_like(p_NV), 1.0
    for node, product in reversed(list(zip(nodes, products, strict=True))):
        weight, extra_V = min(1.0, product), p_NV[node]
        if node != nodes[-1]:
            extra_V = (weight * p_NV[node] - q_NV[node]).clamp(min=0)
            mass = float(extra_V.sum())
            weight = mass / (mass + 1 - weight) if weight < 1 else 1.0
        if left * weight > 0 and extra_V.sum() > 0:
            law_NV[node] = left * weight * extra_V / extra_V.sum()
        left *= 1 - weight
    return law_NV
