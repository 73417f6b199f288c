"""What every fixed length yields, without any clock."""

from __future__ import annotations

from typing import Any

import torch

from pipelines.logs.texts import VERIFIER
from selector.actions import ActionSpace
from selector.train.data import Texts
from selector.train.module import SelectorModule
from selector.train.replay import replay

LENGTH = 8  # tokens of the chain whose predictions are compared with what was accepted
SPLITS = ("train", "test")  # the gap between them is what is new in held-out texts


def fixed_lengths(data: dict[str, Texts], space: ActionSpace) -> list[dict[str, Any]]:
    """For each length of the drafter's chains: tokens of a step, and which share of the drafted tokens was accepted, on
    the training texts and on held-out ones."""
    return [
        {"length": length, **{split: _yield(data[split], space, length) for split in SPLITS}}
        for length in range(space.depth + 1)
    ]


def _yield(texts: Texts, space: ActionSpace, length: int) -> dict[str, float | None]:
    survivals_RS = texts.labels(VERIFIER, slice(None), space)
    action_R = torch.full((len(survivals_RS),), space.index(space.chain(length)))
    found = replay(survivals_RS, action_R, torch.ones(len(survivals_RS)), texts.size_X, space)
    accepted = found.block_efficiency - 1
    return {"tokens_per_step": found.block_efficiency, "accepted": accepted / length if length else None}


def accepted(module: SelectorModule, texts: Texts, space: ActionSpace) -> dict[str, float]:
    """How far a chain of `LENGTH` tokens is accepted, in tokens: by the labels that are known, and by the network."""
    length = min(LENGTH, space.depth)
    labels_RD = texts.survivals[VERIFIER][:, :length].float()
    known_R = ~labels_RD.isnan().any(1)
    predicted_R = module.scores(texts)[:, space.index(space.chain(length))] - 1
    return {
        "length": length,
        "labelled": float(labels_RD[known_R].sum(-1).mean()),
        "predicted": float(predicted_R[known_R].mean()),
    }
