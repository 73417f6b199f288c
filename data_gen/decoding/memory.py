"""The graph decoder's device memory: preallocated tensors, the passes of each action, recorded CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_gen.models.pair import ModelPair
from data_gen.models.preallocated import PreallocatedModel, Window, run_window, window
from data_gen.slots import Layout, layout_of
from selector.actions import Action, ActionSpace

ROOM = max(action.nodes for action in ActionSpace.with_lookups().actions) + 1  # slots of the largest tree
WIDTHS = 1, 2, 3, 4, 5, 7, 9, 11, 13, 17, 21, 25, 33, 41  # of target passes; each is compiled once
WARM = 2  # runs before work is recorded as a CUDA graph

run_of = cache(run_window)


class Passes(NamedTuple):
    """The passes of a step with one action."""

    layout: Layout
    drafted: list[tuple[slice, Window]]  # the draft's after the root's, with their slots
    target: Window


@cache
def passes_of(action: Action, device: torch.device) -> Passes:
    layout = layout_of(action, device)
    trunk = [slice(n, n + 1) for n in range(1, layout.L1 + 1)]
    slots = [*trunk, *layout.levels[1:]][:-1] if layout.depth else []  # leaves need no pass
    drafted = [(each, window(layout, each.start, each.stop, ROOM)) for each in slots]
    width = next((width for width in WIDTHS if width >= layout.size), layout.size)
    return Passes(layout, drafted, window(layout, 0, layout.size, ROOM, width))


class Memory:
    """The tensors for decoding one text; other texts reuse them. `rows` is the length of the caches."""

    def __init__(self, pair: ModelPair, rows: int, compiled: bool, backend: Any, recorded: bool) -> None:
        models = (PreallocatedModel(model, rows, ROOM, compiled, backend) for model in (pair.target, pair.draft))
        self.target, self.draft = models
        self.text_T = torch.zeros(rows, dtype=torch.int64, device=pair.device)
        self.base = torch.zeros((), dtype=torch.int64, device=pair.device)  # the root's row, which is its position
        self.uniforms = torch.zeros(ROOM + 2, dtype=torch.float64, device=pair.device)
        self.copied = torch.zeros(ROOM, dtype=torch.int64, device=pair.device)  # a lookup's tokens
        dtype = torch.promote_types(pair.draft.dtype, torch.float32)
        self.root_1V = torch.zeros(1, pair.vocabulary, dtype=dtype, device=pair.device)  # the draft's distribution
        self.records = recorded and pair.device.type == "cuda"
        self._calls: dict[object, int] = {}
        self._recorded: dict[object, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def fill(self, prompt: Sequence[int]) -> None:
        text_T = torch.tensor(prompt, device=self.base.device)
        self.text_T[: len(prompt)] = text_T
        self.base.fill_(len(prompt) - 1)
        for model in (self.target, self.draft):
            model.fill(text_T[:-1])

    def copy_in(self, copied: list[int]) -> None:
        """Bring a lookup's tokens to the device."""
        host = torch.tensor(copied, dtype=torch.int64)
        if self.copied.is_cuda:
            host = host.pin_memory()  # else the copy would wait
        self.copied[: len(copied)].copy_(host, non_blocking=True)

    def run(self, key: object, work: Callable[[], Tensor]) -> Tensor:
        """Do some work. After `WARM` runs on a GPU it is recorded as a CUDA graph and then replayed."""
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if not self.records or calls <= WARM:
            return work()
        if key not in self._recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # this does not run the work
                result = work()
            self._recorded[key] = graph, result
        graph, result = self._recorded[key]
        graph.replay()
        return result
