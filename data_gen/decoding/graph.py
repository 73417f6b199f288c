"""Speculative decoding without host synchronisation inside a step: all work of a step is queued, then read once.

Tokens are drawn on the device from uniform numbers, trees have fixed slots (`data_gen.trees`), KV caches are
preallocated, and verification needs no host (`verification.on_slots`). At the end of a step one small tensor is read;
a selector that sees the draft's rows needs one more read. Up to rounding, equal seeds give the tokens of `Decoder`.

Legend: S slots of a tree, D its depth, V vocabulary, T tokens of the text, W tokens of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from data_gen.decoding.loop import Clock, Loop, Outcome, Text
from data_gen.features.root import Accepted
from data_gen.features.rows import LEAST_LOGIT
from data_gen.models.pair import ModelPair, ModelRow
from data_gen.models.preallocated import PreallocatedModel, Window, run_window, window
from data_gen.models.sampling import Sampling
from data_gen.trees import Layout, layout_of
from data_gen.verification import COPIED
from data_gen.verification.distributions import invert
from data_gen.verification.on_slots import check_on_slots, verify_slots
from selector.actions import EMPTY, Action, ActionSpace
from selector.schema import EARLY, LIGHT, MATCH, InputError

ROWS = 512  # a cache's rows are a multiple of this, so that texts of many lengths share memory and graphs
LEAST_RUN, LONGEST_RUN = 2, 32  # tokens of the draft's root pass; after a drafted step, one or two are new to it
ROOM = max(action.nodes for action in ActionSpace.with_lookups().actions) + 1  # slots of the largest tree
WARM = 1  # runs before work is recorded as a CUDA graph

run_of = cache(run_window)

Two = tuple[Tensor, Tensor]


@dataclass(eq=False)
class GraphDecoder(Loop):
    """As `Decoder`, for i.i.d. drafts, models on one device, and texts (prompt and new tokens) of up to `length`
    tokens.

    A CUDA graph runs all parts of a step at once. In `Step.seconds`, "draft" is then the root pass alone, and "commit"
    the rest of the step. Where `recorded`, the work of a step is recorded as CUDA graphs after a few runs.

    Raises ValueError (or InputError, which is one) for a verifier, a chooser, a sampling or models that it cannot take.
    """

    length: int
    recorded: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_on_slots(self.verifier)
        pair, levels = self.pair, self.chooser.feature_levels
        if set(levels) - {MATCH, EARLY, LIGHT}:
            raise InputError("the graph decoder has no hidden states; this selector asks for full features")
        if type(self.sampling) is not Sampling:
            raise InputError("the graph decoder needs distributions that follow from the logits alone")
        if len({weights.device for model in (pair.target, pair.draft) for weights in model.parameters()}) > 1:
            raise InputError("the graph decoder needs target and draft whole on one device")
        if pair.has_head:
            raise InputError("the graph decoder has no passes for a head")
        self.slow_steps = WARM + 1 if self.recorded and pair.device.type == "cuda" else 1
        self._memory_key = -(-self.length // ROWS) * ROWS + 2 * ROOM, self.recorded
        self._needs_rows, self._needs_entropies = LIGHT in levels, bool({EARLY, LIGHT} & set(levels))
        self._law = self.verifier.name, self.sampling, self._needs_rows, self._needs_entropies

    def _open(self, prompt: Sequence[int], generator: torch.Generator) -> _SlotText:
        if len(prompt) > self.length:
            raise InputError(f"a prompt of {len(prompt)} tokens; this decoder was made for texts of {self.length}")
        text = _SlotText(prompt, self.sampling, self.chooser.feature_levels, generator)
        spare = self.pair.spare.setdefault(self._memory_key, [])
        text.memory = spare.pop() if spare else Memory(self.pair, *self._memory_key)
        text.memory.fill(prompt)
        text.passed = text.known = len(prompt) - 1
        return text

    def _close(self, text: _SlotText) -> None:
        if text.finite:  # else the caches may hold NaN, which no mask hides
            self.pair.spare[self._memory_key].append(text.memory)

    def _show_root(self, text: _SlotText, clock: Clock) -> None:
        self._root(text, len(text.tokens) - text.known, shown=True)
        text.known = len(text.tokens)

    def _root(self, text: _SlotText, pending: int, shown: bool = False) -> None:
        memory, length = text.memory, len(text.tokens)
        most = min(LONGEST_RUN, 1 << (length.bit_length() - 1))
        while pending > 0:
            count = min(pending, most)
            run = min(most, max(LEAST_RUN, 1 << (count - 1).bit_length()))  # a power of two: few graphs
            pending -= count
            if pending:
                rows_WX = self._root_pass(memory, run, memory.base - pending, shown)
            else:
                key = "root", run, shown, self.draft_sampling
                rows_WX = memory.run(key, lambda: self._root_pass(memory, run, memory.base, shown))  # noqa: B023
            if text.knowledge is not None and shown:
                probs_WV, logits_WV = rows_WX[-count:].cpu().chunk(2, dim=-1)
                text.knowledge.passed(map(ModelRow, probs_WV, logits_WV, logits_WV[:, :0]))
        text.passed = length

    def _root_pass(self, memory: Memory, run: int, end: Tensor, shown: bool) -> Tensor:
        over, begin = run_of(run, ROOM, end.device), end - (run - 1)
        logits_WV = memory.draft.forward(memory.text_T.gather(0, begin + over.slots_W), begin, over)
        probs_WV = self.draft_sampling.probabilities(logits_WV if shown else logits_WV[-1:])
        memory.root_1V.copy_(probs_WV[-1:])
        return torch.cat([probs_WV, logits_WV.to(probs_WV.dtype)], dim=-1) if shown else probs_WV

    def _run(self, text: _SlotText, action: Action, clock: Clock) -> Outcome:
        length, memory = len(text.tokens), text.memory
        if length > self.length:
            raise InputError(f"the text has {length} tokens; this decoder was made for {self.length}")
        if action.distinct:
            raise InputError(
                f"{action}: the graph decoder drafts i.i.d. branches; pair.decoder=eager drafts all styles"
            )
        if action.copies:
            copied = text.proposal(action.L1)
            action = action if copied else EMPTY
            memory.copy_in(copied)
        if action.drafts and text.passed < length:
            self._root(text, length - text.passed)
        layout = layout_of(action, self.pair.device)
        # the draws of `Decoder` in its order: of each drafted token, the verifier's last node, the extra token
        known = 1 if action == EMPTY else layout.size - 1 if action.copies else 0
        memory.uniforms[known : layout.size + 1].uniform_(generator=text.generator)
        clock.lap("draft")
        laps = Clock(self.pair.device, waits=False) if memory.records else clock  # a recording may not wait
        parts = super()._run
        outcome = _outcome(memory.run((self._law, action), lambda: parts(text, action, laps)), layout)
        if outcome is None:
            text.finite = False
            raise InputError("a model gives numbers that are not finite (NaN or infinity)")
        if action.drafts:  # the draft has passed all but the leaves
            text.passed = length + min(len(outcome.tokens) - 1, layout.depth - 1)
        return outcome

    def _draft(self, text: _SlotText, action: Action, clock: Clock) -> Two:
        memory, passes = text.memory, passes_of(action, self.pair.device)
        layout = passes.layout
        tokens_S = torch.zeros(layout.size, dtype=torch.int64, device=self.pair.device)
        tokens_S[0] = memory.text_T.gather(0, memory.base.view(1))[0]
        q_SV = memory.root_1V.new_zeros(layout.size, self.pair.vocabulary)
        if action.copies:
            tokens_S[1:] = memory.copied[: action.L1]
            q_SV[:-1].scatter_(-1, tokens_S[1:].unsqueeze(-1), 1.0)
        elif action != EMPTY:
            q_SV[:1] = memory.root_1V
            _draw(layout, slice(0, 1), memory.uniforms, tokens_S, q_SV)
            for slots, over in passes.drafted:
                logits_WV = memory.draft.forward(tokens_S[slots], memory.base, over)
                q_SV[slots] = self.draft_sampling.probabilities(logits_WV)
                _draw(layout, slots, memory.uniforms, tokens_S, q_SV)
        return tokens_S, q_SV

    def _target(self, text: _SlotText, action: Action, drafted: Two) -> Two:
        over = passes_of(action, self.pair.device).target
        logits_SV = text.memory.target.forward(drafted[0], text.memory.base, over)
        return logits_SV, self.sampling.probabilities(logits_SV)

    def _verify(self, text: _SlotText, action: Action, drafted: Two, rows: Two) -> Two:
        layout = layout_of(action, self.pair.device)
        verifier = COPIED if action.copies else self.verifier
        ends_2 = text.memory.uniforms[layout.size - 1 : layout.size + 1]
        if layout.size == 1:
            return layout.order_S, invert(rows[1][0], ends_2[1:])
        return verify_slots(verifier, layout, drafted[0], rows[1], drafted[1], ends_2)

    def _commit(self, text: _SlotText, action: Action, drafted: Two, rows: Two, verdict: Two) -> Tensor:
        """The tensor for `_outcome`: tau, whether all numbers are finite, the tokens; where the chooser needs them, the
        target's entropies after root and path, and the tokens' probabilities."""
        memory, layout = text.memory, layout_of(action, self.pair.device)
        (tokens_S, q_SV), (logits_SV, p_SV), (slot, extra) = drafted, rows, verdict
        path_D, accepted = layout.paths_SD[slot][0], layout.depths_S[slot]
        at_D = torch.arange(layout.depth + 1, device=slot.device)
        new_D = torch.where(at_D < accepted, pad(tokens_S[path_D], (0, 1)), extra)
        if layout.K > 1:
            # a trunk is in its place; rows beyond the accepted path may hold anything, as they are written again
            for model in (memory.target, memory.draft):
                model.keep(path_D, memory.base)
        memory.text_T.index_copy_(0, memory.base + 1 + at_D, new_D)
        memory.base += accepted[0] + 1
        finite = logits_SV.amax(-1).isfinite().all() & q_SV.isfinite().all()
        result = [accepted, finite.view(1), new_D]
        from_D = pad(path_D, (1, 0))
        if self._needs_entropies:
            wide_DV = logits_SV[from_D].float().clamp(min=LEAST_LOGIT)
            result.append(cross_entropy(wide_DV, wide_DV.softmax(-1), reduction="none"))
        if self._needs_rows:
            result.append(p_SV[from_D].gather(-1, new_D.unsqueeze(-1))[:, 0])
        return torch.cat([part.double() for part in result])


class _Read(Accepted):
    def __init__(self, entropies: list[float], probs: list[float]) -> None:
        self._entropies, self._probs = entropies, probs

    def entropies(self) -> list[float]:
        return self._entropies

    def of_next(self, tokens: Sequence[int]) -> list[float]:
        return self._probs


def _outcome(result: Tensor, layout: Layout) -> Outcome | None:
    numbers = result.tolist()
    if not numbers[1]:
        return None
    count = int(numbers[0]) + 1
    parts = [numbers[begin : begin + count] for begin in range(2, len(numbers), layout.depth + 1)]
    tokens, entropies, probs = (*parts, [], [])[:3]
    return Outcome([int(token) for token in tokens], layout.size, _Read(entropies, probs))


def _draw(layout: Layout, slots: slice, uniforms: Tensor, tokens_S: Tensor, q_SV: Tensor) -> None:
    rows, first = slots.stop - slots.start, slots.stop  # the first slot below
    each = layout.K if first == layout.L1 + 1 and layout.L2 > 0 else 1  # tokens below a row
    end = first + rows * each
    tokens_S[first:end] = invert(q_SV[slots], uniforms[first - 1 : end - 1].view(rows, each)).flatten()


class _SlotText(Text):
    memory: Memory
    passed: int  # committed tokens that the draft has passed
    known: int  # committed tokens whose draft rows the text's knowledge has, or does not need
    finite = True  # whether all logits so far were


class Passes(NamedTuple):
    layout: Layout
    drafted: list[tuple[slice, Window]]  # the draft's after the root's, with their slots
    target: Window


@cache
def passes_of(action: Action, device: torch.device) -> Passes:
    layout = layout_of(action, device)
    trunk = [slice(n, n + 1) for n in range(1, layout.L1 + 1)]
    slots = [*trunk, *layout.levels[1:]][:-1] if layout.depth else []  # leaves need no pass
    drafted = [(each, window(layout, each.start, each.stop, ROOM)) for each in slots]
    return Passes(layout, drafted, window(layout, 0, layout.size, ROOM))


class Memory:
    """The tensors for decoding one text; other texts reuse them. `rows` is the length of the caches."""

    def __init__(self, pair: ModelPair, rows: int, recorded: bool) -> None:
        models = (PreallocatedModel(model, rows, ROOM) for model in (pair.target, pair.draft))
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
        # graphs run one after another, so they share what they need in between
        self._pool = torch.cuda.graph_pool_handle() if self.records else None

    def fill(self, prompt: Sequence[int]) -> None:
        text_T = torch.tensor(prompt, device=self.base.device)
        self.text_T[: len(prompt)] = text_T
        self.base.fill_(len(prompt) - 1)
        for model in (self.target, self.draft):
            model.fill(text_T[:-1])

    def copy_in(self, copied: list[int]) -> None:
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
            with torch.cuda.graph(graph, pool=self._pool):  # this does not run the work
                result = work()
            self._recorded[key] = graph, result
        graph, result = self._recorded[key]
        graph.replay()
        return result
