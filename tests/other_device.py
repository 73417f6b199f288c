"""A device of its own whose numbers lie in the CPU's memory: it takes the place of a GPU where there is none.

    .venv/bin/python -m tests.other_device FILE

This decodes, writes and labels texts with a tiny pair, on the CPU and then on the device, and
writes the outcomes as JSON.

Tensors of the device and of the CPU mix as little as on a GPU: an operator that gets both raises an error, and so does
NumPy. So a tensor that was left on the CPU is found. Streams, CUDA graphs and kernels are not simulated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which looks at `torch.Generator` when it is imported
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
TRANSFERS = ("aten._to_copy.default", "aten.copy_.default")  # may take tensors of both
INDEXING = ("aten.index.Tensor", "aten.index_put")  # `x[i]`, for which alone a GPU takes indices of the CPU
INDICES = (torch.int64, torch.bool)


class OnDevice(Tensor):
    """A tensor of the device; `own` has its numbers. To torch's C++ code, which has no GPU, it is a meta tensor."""

    own: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, own.shape, strides=own.stride(), storage_offset=own.storage_offset(), dtype=own.dtype, device="meta"
        )
        made.own = own
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.own.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a tensor of the device has no NumPy array")

    def data_ptr(self) -> int:
        return self.own.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = OnDevice(self.own.clone())
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied


def dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operator's work on the CPU. Its result is on the device that it names, else on that of its tensors."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    here = {id(each.own): each for each in tensors if isinstance(each, OnDevice)}
    name, device = str(func), kwargs.get("device")
    if here and name not in TRANSFERS:
        for each in tensors:
            indexes = name.startswith(INDEXING) and each.dtype in INDICES
            if not isinstance(each, OnDevice) and each.dim() > 0 and not indexes:
                raise RuntimeError(f"{name}: a tensor of the CPU, {tuple(each.shape)}, among those of the device")
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    args, kwargs = tree_map(lambda each: each.own if isinstance(each, OnDevice) else each, (args, kwargs))
    result = func(*args, **kwargs)
    goes = bool(here) if device is None else torch.device(device).type != "cpu"
    if name == "aten.copy_.default":
        goes = id(args[0]) in here

    def wrapped(each: Any) -> Any:
        if id(each) in here:
            return here[id(each)]
        return OnDevice(each) if goes and isinstance(each, Tensor) else each

    return tree_map(wrapped, result)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What would ask C++ for a GPU: transfers to the device, tensors from Python's numbers, indexing with lists."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.cuda):
            named = [*args[1:], *kwargs.values()]
            if func is Tensor.cuda or any(map(_is_the_device, named)):
                own = args[0].own if isinstance(args[0], OnDevice) else args[0].detach()
                dtype = next((each for each in named if isinstance(each, torch.dtype)), own.dtype)
                same = isinstance(args[0], OnDevice) and dtype == own.dtype
                return args[0] if same else OnDevice(own.to(dtype, copy=True))
        if func in (torch.tensor, torch.as_tensor) and _is_the_device(kwargs.get("device")):
            return OnDevice(func(*args, **{**kwargs, "device": "cpu"}).clone())
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], OnDevice):
            args = (args[0], _listed(args[1]), *args[2:])
        return func(*args, **kwargs)


def _is_the_device(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cuda"


def _listed(index: Any) -> Any:
    """Lists and ranges as tensors of the CPU."""
    if isinstance(index, tuple):
        return tuple(map(_listed, index))
    return torch.tensor(list(index), dtype=torch.int64) if isinstance(index, list | range) else index


def enter() -> None:
    """From now on "cuda" is the device. There is no way back, so this is for a process of its own."""
    generator = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, generator)

        def __call__(cls, device: object = "cpu") -> torch.Generator:
            return generator("cpu")

    class Generator(metaclass=Kind):
        pass

    torch.Generator = Generator  # type: ignore[assignment, misc]
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_name = lambda *_: "the CPU in place of a GPU"
    cuda._lazy_init = lambda: None
    cuda.synchronize = cuda.empty_cache = cuda.manual_seed = cuda.manual_seed_all = lambda *_: None
    cuda.get_rng_state, cuda.set_rng_state = lambda *_: torch.get_rng_state(), lambda *_: None
    _Functions().__enter__()
    _Operators().__enter__()


def outcomes(device: str) -> dict[str, Any]:
    """Texts that are decoded with every verifier, and what a shard of labelled texts holds."""
    from data_gen.decoding.decoder import Decoder
    from data_gen.decoding.loop import Random
    from data_gen.models.pair import ModelPair
    from data_gen.models.sampling import Sampling
    from data_gen.texts.labelled import BEHAVIOUR, Work, make_shard
    from data_gen.texts.prompts import Prompt
    from data_gen.verification import VERIFIERS, get_verifier
    from pipelines.config import load_config
    from pipelines.pair.loading import recipe
    from selector.actions import EMPTY, Lookup
    from tests.pipelines.runs import ROOT
    from tests.tiny import small_pair

    pair = ModelPair.load(*small_pair(), device=device)
    text = "def area(width, height):\n    return width * height\n\n\ndef area("
    tokens, actions = pair.tokenizer(text).input_ids, [*BEHAVIOUR, EMPTY, Lookup(4)]
    found: dict[str, Any] = {}
    for name in VERIFIERS:
        decoder = Decoder(pair, Sampling(1.0), get_verifier(name), Random(actions, torch.Generator().manual_seed(3)))
        found[name] = decoder.decode(tokens, 12, torch.Generator(device=device).manual_seed(1)).tokens
    config = load_config(ROOT / "configs" / "demo.yaml", ["data.tokens=4", "data.features=full", "data.stride=1"])
    prompts = ((Prompt("a", text, "code", "a"), 0), (Prompt("b", text[30:], "code", "b"), 1))
    for way in ("written", "decoded"):
        work = Work("train", Sampling(0.6, 0.9), prompts, decoded=way == "decoded")
        found[way] = make_shard(pair, recipe(config), work).table.to_pydict()
    return found


def mixes() -> bool:
    """Whether an operator takes tensors of both."""
    try:
        torch.ones(2, device="cuda") + torch.ones(2)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment, misc, return-value]
    found: dict[str, Any] = {"cpu": outcomes("cpu")}
    enter()
    found |= {"mixes": mixes(), "cuda": outcomes("cuda")}
    Path(sys.argv[1]).write_text(json.dumps(found))
