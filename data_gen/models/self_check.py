"""Checks that a model's logits on a token tree equal those of plain forward passes over its paths.

The check runs the model over the largest tree after a context, commits a part of one branch and
runs it over two more tokens. Contexts end shortly before and after every length at which the config
says that the model changes: attention windows and scaled rotary positions. It is made strictly with
a float32 copy of a few layers, because rounding in bfloat16 can hide a wrong mask, and loosely with
the model itself.

Legend: N nodes, T tokens, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from data_gen.models.masks import check_attention
from data_gen.models.pair import CachedModel, scored
from data_gen.models.prepack import PrepackedLinear
from data_gen.models.remembered import recall, remember
from data_gen.trees import DraftTree
from selector.actions import ActionSpace
from selector.files import first_line
from selector.schema import InputError

# config keys whose values are lengths at which a model changes; rotary positions at the last two
CHANGES = (
    "sliding_window",
    "window_size",
    "attention_window",
    "attention_chunk_size",
    "original_max_position_embeddings",
    "max_position_embeddings",
)
SPACE = ActionSpace.default()  # its largest tree is checked
SHORT = 6  # tokens of the shortest context
AROUND = 3  # tokens between a context's end and a length at which the model changes
FURTHER = 2  # tokens after a commit
# the largest difference, as a share of the logits' standard deviation: of the copy, and of the
# model by its dtype
STRICT = 1e-4
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 1.0}
TOKENS = 256  # of the copy's vocabulary, or fewer
CHECKED = "checked"  # the length that a model has passed, as it is remembered
OFFSET = 2  # rows that a table of positions may have before the first position


def check_model(model: Any, name: str, longest: int) -> float:
    """The largest difference of the model's logits, as a share of their standard deviation, in
    texts of up to `longest` tokens, those of the tree included. InputError, which names the model
    and the place, where its layers or its attention cannot process token trees, where its table of
    positions is shorter, or a difference exceeds rounding."""
    check_attention(model.config, name)
    rows = table_of_positions(model)
    if rows is not None and longest > rows:
        raise InputError(
            f"{name}: texts and their trees take up to {longest} positions; the model has {rows}"
        )
    few = few_layers(model)
    tolerance = TOLERANCES.get(model.dtype, TOLERANCES[torch.float32])
    worst = 0.0
    for length in lengths(model.config, longest):
        _check(few, name, length, STRICT)
        worst = max(worst, _check(model, name, length, tolerance))
    return worst


def check_once(model: Any, name: str, longest: int) -> None:
    """`check_model`, unless the model has passed it, in an earlier process, too, for texts of this
    length or longer."""
    if (recall(model, CHECKED) or 0) < longest:
        check_model(model, name, longest)
        remember(model, CHECKED, longest)


def _check(model: Any, name: str, length: int, tolerance: float) -> float:
    try:
        differences = list(_differences(model, length))
    except InputError:
        raise
    except Exception as error:  # a model without such a cache or mask may raise anything
        raise InputError(
            f"{name}: cannot pass token trees: {type(error).__name__}: {first_line(error)}"
        ) from error
    for where, difference in differences:
        if not difference <= tolerance:  # also where it is NaN
            raise InputError(
                f"{name}: a pass over a token tree is not what plain passes give: behind "
                f"{length} tokens the logits {where} differ by {difference:.2g} of their standard "
                "deviation; it cannot be decoded here"
            )
    return max(difference for _, difference in differences)


def few_layers(model: Any) -> Any:
    """A float32 copy of the model's first two layers, the first layer of each other kind, and some
    of its tokens. Random weights take the place of quantised ones, because masks and positions do
    not depend on them."""
    text_config = model.config.get_text_config()
    kinds = list(getattr(text_config, "layer_types", None) or ())
    chosen = sorted({0, min(1, text_config.num_hidden_layers - 1), *map(kinds.index, kinds)})
    copies: dict[int, Any] = {}  # what stands in the copy for an object, by its id
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == text_config.num_hidden_layers:
            copies[id(module)] = _chosen_layers(module, chosen, copies)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        for module in table.modules():
            if isinstance(module, PrepackedLinear):
                copies[id(module)] = module.plain(TOKENS)
            for original in module._parameters.values():
                if original is not None:
                    rows = original[:TOKENS].detach().clone()
                    copies[id(original)] = torch.nn.Parameter(rows, requires_grad=False)
    copied = deepcopy(model, copies).float()
    if kinds:
        copied.config.get_text_config().layer_types = [kinds[number] for number in chosen]
    copied.get_input_embeddings().padding_idx = None  # it may lie beyond the tokens that are left
    return copied


def _chosen_layers(
    layers: torch.nn.ModuleList, chosen: list[int], copies: dict[int, Any]
) -> torch.nn.ModuleList:
    """Copies of some layers, which are entered in `copies`."""
    for number in chosen:
        for original in layers[number].modules():
            if _is_quantised(original):
                copies[id(original)] = _random(original)
    return torch.nn.ModuleList([deepcopy(layers[number], copies) for number in chosen])


def _is_quantised(module: Any) -> bool:
    if not isinstance(getattr(module, "in_features", None), int):
        return False
    if not isinstance(module.out_features, int):
        return False
    weight = getattr(module, "weight", None)
    return not (isinstance(weight, Tensor) and weight.is_floating_point())


def _random(module: Any) -> torch.nn.Linear:
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    inputs, outputs = module.in_features, module.out_features
    has_bias = getattr(module, "bias", None) is not None
    generator = torch.Generator().manual_seed(inputs)
    layer = torch.nn.Linear(inputs, outputs, has_bias, dtype=torch.float32)
    layer.requires_grad_(False)
    for weights in layer.parameters():
        weights.normal_(std=inputs**-0.5, generator=generator)
    return layer.to(device)


def table_of_positions(model: Any) -> int | None:
    """The positions that a model can look up, where it learned a vector for each; None where it
    computes them."""
    rows = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if rows is None:
        return None
    for name, table in (*model.named_parameters(), *model.named_buffers()):
        is_table = table.dim() == 2 and re.search("position|wpe", name)
        if is_table and rows <= len(table) <= rows + OFFSET:
            return rows
    return None


def lengths(config: Any, longest: int) -> list[int]:
    """Lengths of the checked contexts, ascending. No tree after a context reaches beyond
    `longest`."""
    longest_context = longest - SPACE.depth
    # of the KV cache with the longest text
    rows = longest_context + SPACE.max_L1 + SPACE.max_K * SPACE.max_L2
    contexts = {SHORT}
    for change in _changes(config.to_dict()):
        if change < rows:
            for length in (change - AROUND, change + AROUND):
                contexts.add(max(SHORT, min(length, longest_context)))
    return sorted(contexts)


def _changes(values: dict[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _changes(value)
        elif key in CHANGES and isinstance(value, int) and value > 0:
            yield value


@torch.inference_mode()
def _differences(model: Any, length: int) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(length)
    sizes = [length, SPACE.max_L1, *[SPACE.max_L2] * SPACE.max_K, FURTHER]
    vocabulary = min(scored(model), len(model.get_input_embeddings().weight))
    drawn = torch.randint(vocabulary, (sum(sizes),), generator=generator)
    context, trunk, *branches, further = (part.tolist() for part in drawn.split(sizes))
    tree = DraftTree.from_paths(trunk, branches)
    cached = CachedModel(model)
    cached.fill(context[:-1])
    tokens_N = tree.tokens_N.clone()
    tokens_N[0] = context[-1]
    tree_pass = cached.forward(tokens_N, tree.depths_N, tree.ancestors_NN())
    cached.check()
    for branch in branches:
        nodes = [0, *tree.path_to(tree.node_of([*trunk, *branch]))]
        plain_NV = _plain(model, [*context, *trunk, *branch], len(nodes))
        for depth, node in enumerate(nodes):
            difference = _apart(tree_pass.logits_WV[node], plain_NV[depth])
            yield f"after {depth} drafted tokens", difference
    accepted = [*trunk, *branches[1][:2]]
    cached.keep([0, *tree.path_to(tree.node_of(accepted))])
    further_pass = cached.extend(further)
    plain_NV = _plain(model, [*context, *accepted, *further], FURTHER)
    for logits_V, plain_V in zip(further_pass.logits_WV, plain_NV, strict=True):
        yield "after a branch was committed", _apart(logits_V, plain_V)


def _plain(model: Any, text: list[int], last: int) -> Tensor:
    text_1T = torch.tensor([text], device=model.device)
    logits_TV: Tensor = model(text_1T, use_cache=False, logits_to_keep=last).logits[0]
    return logits_TV


def _apart(found_V: Tensor, expected_V: Tensor) -> float:
    found_V = found_V.float().to(expected_V.device)
    expected_V = expected_V.float()
    finite_V = expected_V.isfinite()  # tokens beyond the vocabulary are minus infinity in both
    difference = (found_V[finite_V] - expected_V[finite_V]).abs().amax()
    return float(difference / expected_V[finite_V].std().clamp(min=1e-6))
