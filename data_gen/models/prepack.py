"""On a CPU: linear layers whose weights are laid out once, at loading, as oneDNN's kernels read
them.

A decoding step multiplies the weights by a few rows: one in plain decoding, two to seventeen where
drafted tokens are verified. Reading the weights from memory takes most of the time, whatever the
number of rows. But `linear` gets plain rows of weights, and on many processors its float32 kernel
takes up to twice as long for 2 to 16 rows as for one. With the weights in oneDNN's own blocks it
takes 1.1 to 1.3 times as long, and less than `linear` at every size, so a draft costs what memory
says (`espalier latency` prints both on the machine at hand).

torch has operators for such weights, which its compiler calls and its documentation leaves out. So
each layer is compared with `linear` when it is laid out, and stays as it was where they differ or
an operator is missing. The public ways serve less: `torch.utils.mkldnn.to_mkldnn` also converts
every input and every output, and `torch.compile` with `freezing`, which arrives at the same
operators, needs a C++ compiler and compiles anew for other shapes of a tree.

Weights that serve a lookup of embeddings, too, are kept for that; all others are given up, so that
memory is not doubled. Fingerprints, self-checks, training and files are of the plain weights, which
`named_weights` gives back.

Legend: N rows, I inputs, O outputs of a layer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

ROWS = 16  # the layout is made for so many rows; it was faster than that for one row at every size
CHECKED = 3  # rows on which a layer is compared with `linear`
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # shares of the outputs' standard deviation


class PrepackedLinear(torch.nn.Module):
    """A linear layer with a weight in oneDNN's layout. A deep copy of it is a plain layer, which
    can be changed.

    Args:
        plain: the layer, on a CPU; its dtype is float32 or bfloat16.
        is_tied: whether its weight is another module's, too, which keeps it.
    """

    def __init__(self, plain: torch.nn.Linear, is_tied: bool) -> None:
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.is_tied = is_tied
        self.dtype = plain.weight.dtype
        self.bias = plain.bias
        self.changes = 0  # of the plain weight, in place
        if not plain.weight.is_inference():
            self.changes = plain.weight._version
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), ROWS)

    @property
    def weight(self) -> Tensor:
        """The plain weight [O, I], made anew at each access."""
        return self._packed.to_dense()

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self._packed, self.bias, "none", [], ""
        )
        return result

    def plain(self, outputs: int | None = None) -> torch.nn.Linear:
        """A layer with the plain weight, which needs no gradient; or with its first rows, for so
        many outputs."""
        layer = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = torch.nn.Parameter(self.weight[:outputs].clone(), requires_grad=False)
        if self.bias is not None:
            bias = self.bias[:outputs].detach().clone()
            layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        return layer

    def __deepcopy__(self, copied: dict[int, Any]) -> torch.nn.Module:
        return self.plain()


def prepack(model: Any) -> None:
    """Lay out the weights of a model's linear layers, in place, if the model computes on a CPU in a
    dtype that the processor has; other layers than `torch.nn.Linear` stay as they are. A line on
    the standard error says if one of these does, and why. Neither training nor `Module.to` is
    possible afterwards."""
    modules = list(model.modules())
    linear_weights = Counter(id(module.weight) for module in modules if _is_plain(module))
    other_weights: set[int] = set()
    for module in modules:
        if not _is_plain(module):
            other_weights.update(id(weight) for weight in module._parameters.values())
    failures: list[str] = []
    for module in modules:
        for name, layer in list(module.named_children()):
            if not _is_plain(layer):
                continue
            # where several layers share a weight, none could give it up
            is_shared = linear_weights[id(layer.weight)] > 1
            if is_shared or not can_be_prepacked(layer.weight):
                continue
            try:
                setattr(module, name, _checked(layer, id(layer.weight) in other_weights))
            except RuntimeError as error:  # ours, or whatever an undocumented operator raises
                failures.append(str(error).splitlines()[0])
    if failures:
        what = f"{len(failures)} linear layers of {getattr(model, 'name_or_path', 'a model')}"
        print(
            f"espalier: {what} stay as they are, and steps take longer: {failures[0]}",
            file=sys.stderr,
        )


def _is_plain(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear


def can_be_prepacked(weight: Tensor) -> bool:
    """Whether oneDNN computes with weights of this dtype on this device, at the speed of the
    processor."""
    if weight.device.type != "cpu" or weight.dtype not in TOLERANCES or not _has_operators():
        return False
    return weight.dtype != torch.bfloat16 or computes_in_bfloat16()


@cache
def computes_in_bfloat16() -> bool:
    """Whether this processor multiplies matrices in bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


@cache
def _has_operators() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(torch.ops.mkldnn, name) for name in names)


@torch.inference_mode()
def _checked(layer: torch.nn.Linear, is_tied: bool) -> PrepackedLinear:
    """The layer prepacked; RuntimeError where it then computes something else."""
    generator = torch.Generator().manual_seed(layer.in_features)
    values_NI = torch.randn(CHECKED, layer.in_features, generator=generator).to(layer.weight.dtype)
    expected_NO = linear(values_NI, layer.weight, layer.bias).float()
    packed = PrepackedLinear(layer, is_tied)
    difference = float((packed(values_NI).float() - expected_NO).abs().amax())
    if not difference <= TOLERANCES[layer.weight.dtype] * float(expected_NO.std()):
        raise RuntimeError(
            f"laid out, one would compute something else (a difference of {difference:.2g})"
        )
    if not torch.equal(packed.weight, layer.weight):
        raise RuntimeError("laid out, the weights of one cannot be read back")
    return packed


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters and stored buffers by name, each once, as before `prepack`: the weights
    of prepacked layers are made anew."""
    yield from model.named_parameters()
    stored = model.state_dict().keys()  # other buffers are computed
    for name, buffer in model.named_buffers():
        if name in stored:
            yield name, buffer
    for name, module in model.named_modules():
        if isinstance(module, PrepackedLinear) and not module.is_tied:
            yield f"{name}.weight", module.weight
