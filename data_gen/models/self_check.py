"""Checks that a model's logits on a token tree equal those of plain passes over its paths.

A model that ignores the mask or the positions of a tree pass decodes wrong text without an error. The check passes a
tree of two branches behind a context, commits one branch and passes two more tokens. Contexts end shortly before and
after every length at which the config says that the model changes: attention windows and scaled rotary positions.

Legend: B texts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from data_gen.models.masks import check_attention
from data_gen.models.pair import CachedModel
from data_gen.models.vocabulary import scored
from selector.schema import InputError

CHANGES = (  # config keys whose values are lengths at which a model changes
    "sliding_window",
    "window_size",
    "attention_window",
    "attention_chunk_size",
    "original_max_position_embeddings",
)
PARENTS = (-1, 0, 1, 1, 2, 3)  # a root, a token, and two branches of two tokens
KEPT = (0, 1, 3)  # the second branch's first token is accepted
SHORT = 6  # tokens of the shortest context
AROUND = 3  # tokens between a context's end and a length at which the model changes
ROOM = 8  # tokens behind a context: the tree and the two further tokens
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}  # of the logits' standard deviation


def check_model(model: Any, name: str, longest: int) -> float:
    """The largest difference of logits, as a share of their standard deviation.

    Args:
        longest: tokens of the longest text; changes beyond it are not checked.

    Raises:
        InputError: the model's layers or its attention cannot pass token trees, or a difference is larger than rounding
            explains; names the model and the place.
    """
    check_attention(model.config, name)
    worst, tolerance = 0.0, TOLERANCES.get(model.dtype, 1e-3)
    for length in lengths(model.config, longest):
        try:
            differences = list(_differences(model, length))
        except Exception as error:  # a model without such a cache or mask may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"{name}: cannot pass token trees: {type(error).__name__}: {reason}") from error
        for where, difference in differences:
            worst = max(worst, difference)
            if not difference <= tolerance:  # also where it is NaN
                raise InputError(
                    f"{name}: a pass over a token tree is not what plain passes give: behind {length} tokens the "
                    f"logits {where} differ by {difference:.2g} of their standard deviation; it cannot be decoded here"
                )
    return worst


def lengths(config: Any, longest: int) -> list[int]:
    """Lengths of the checked contexts, ascending."""
    changes = {change for change in _changes(config.to_dict()) if change + AROUND + ROOM <= longest}
    near = {change + side * AROUND for change in changes for side in (-1, 1)}
    return sorted({SHORT, *(length for length in near if length > SHORT)})


def _changes(values: dict[str, Any]) -> Iterator[int]:
    """The values of all keys in `CHANGES`, also in nested sections."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _changes(value)
        elif key in CHANGES and isinstance(value, int) and value > 0:
            yield value


@torch.inference_mode()
def _differences(model: Any, length: int) -> Iterator[tuple[str, float]]:
    """Where logits were compared, and their difference."""
    generator, size = torch.Generator().manual_seed(length), scored(model)
    context = torch.randint(size, (length,), generator=generator).tolist()
    drafted = torch.randint(size, (len(PARENTS),), generator=generator).tolist()
    tokens = [context[-1], *drafted[1:]]
    paths: list[list[int]] = []  # for each node, the nodes from the root to it
    for node, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    cached = CachedModel(model)
    cached.fill(context[:-1])
    visible = torch.tensor([[node in path for node in range(len(PARENTS))] for path in paths])
    offsets = torch.tensor([len(path) - 1 for path in paths], device=model.device)
    passed = cached.forward(torch.tensor([tokens], device=model.device), offsets, visible)
    for node, path in enumerate(paths):
        text = context[:-1] + [tokens[each] for each in path]
        yield f"after {len(path) - 1} drafted tokens", _apart(passed.logits_BWV[0, node], _plain(model, text))
    cached.keep(KEPT)
    text = context[:-1] + [tokens[node] for node in KEPT]
    further = torch.randint(size, (2,), generator=generator).tolist()
    output = cached.extend(further)
    for number in range(len(further)):
        plain_V = _plain(model, text + further[: number + 1])
        yield "after a branch was committed", _apart(output.logits_BWV[0, number], plain_V)


def _plain(model: Any, text: list[int]) -> Tensor:
    """The logits [V] after a text, by one pass without a cache."""
    return model(torch.tensor([text], device=model.device), use_cache=False, logits_to_keep=1).logits[0, -1]


def _apart(found_V: Tensor, expected_V: Tensor) -> float:
    found_V, expected_V = found_V.float().to(expected_V.device), expected_V.float()
    finite_V = expected_V.isfinite()  # tokens beyond the vocabulary are minus infinity in both
    difference = (found_V[finite_V] - expected_V[finite_V]).abs().amax()
    return float(difference / expected_V[finite_V].std().clamp(min=1e-6))
