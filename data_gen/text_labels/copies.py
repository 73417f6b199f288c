"""Lookups along a text: a copy is accepted as long as it is the text, whatever the verifier and the
temperature, so its label needs no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_gen.drafting.lookup import LookupIndex


def lookup_lengths(tokens: Sequence[int], start: int, roots: int, most: int) -> Tensor:
    """How many tokens of a lookup are right, at most `most`, at each root of a text from `start`
    on; uint8 [roots]."""
    index = LookupIndex(tokens[: start + 1])
    lengths = []
    for position in range(start + 1, start + 1 + roots):
        lengths.append(index.agreement(tokens[position : position + most]))
        index.extend(tokens[position : position + 1])
    return torch.tensor(lengths, dtype=torch.uint8)
