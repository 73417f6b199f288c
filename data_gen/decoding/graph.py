"""Speculative decoding without host synchronisation inside a step: all work of a step is queued, then read once.

Tokens are drawn on the device from uniform numbers, trees have fixed slots (`data_gen.trees`), KV caches are
preallocated, and verification needs no host (`verification.on_slots`). At the end of a step one small tensor is read;
a selector that sees the draft's distributions needs one more read. Up to rounding, equal seeds give `Decoder`'s tokens.

The `base` is the number of cache rows before the root's; it stays on the device. A forward pass writes slot `s` of a
tree to row `base + s`, and the mask hides all rows from `base` on that do not belong to the tree.

Legend: S slots of a tree, D its depth, V vocabulary, T tokens of the text, W tokens of one forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from data_gen.decoding.loop import Clock, Loop, Outcome, Text
from data_gen.features.root import LEAST_LOGIT, Accepted
from data_gen.models.masks import TreeMasks
from data_gen.models.pair import ModelPair, ModelRow
from data_gen.models.sampling import Sampling
from data_gen.trees import Layout, layout_of
from data_gen.verification import COPIED
from data_gen.verification.on_slots import check_on_slots, compiled, drawn, verify_slots
from selector.actions import EMPTY, Action, ActionSpace
from selector.schema import EARLY, LIGHT, MATCH, InputError

FILL = 512  # tokens of a forward pass over a prompt
ROWS = 512  # a cache's rows are a multiple of this, so that texts of many lengths share memory and graphs
LEAST_RUN, LONGEST_RUN = 2, 32  # tokens of the draft's forward pass up to the root; mostly one or two are new
ROOM = max(action.nodes for action in ActionSpace.with_lookups().actions) + 1  # slots of the largest tree
SPARE = -(-2 * ROOM // 64) * 64  # rows beyond the text, for two trees; kernels like multiples of 64
WARM = 1  # runs before work is recorded as a CUDA graph

Two = tuple[Tensor, Tensor]


@dataclass(eq=False)
class GraphDecoder(Loop["_SlotText"]):
    """As `Decoder`, for i.i.d. drafts, models on one device, and texts (prompt and new tokens) of up to `length`
    tokens.

    On a GPU the work of a step is recorded as CUDA graphs after a few runs, which then run all its parts at once. In
    `Step.seconds`, "draft" is then the draft's pass over the root alone, and "commit" the rest of the step.

    Raises ValueError (or InputError, which is one) for a verifier, a chooser, a sampling or models that it cannot take.
    """

    length: int

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
        self.slow_steps = WARM + 1 if pair.device.type == "cuda" else 1
        self._rows = -(-self.length // ROWS) * ROWS + SPARE
        self._needs_rows, self._needs_entropies = LIGHT in levels, bool({EARLY, LIGHT} & set(levels))
        self._law = self.verifier.name, self.sampling, self._needs_rows, self._needs_entropies

    def _open(self, prompt: Sequence[int], generator: torch.Generator) -> _SlotText:
        if len(prompt) > self.length:
            raise InputError(f"a prompt of {len(prompt)} tokens; this decoder was made for texts of {self.length}")
        text = _SlotText(prompt, self.sampling, self.chooser.feature_levels, generator)
        spare = self.pair.spare.setdefault(self._rows, [])
        text.memory = spare.pop() if spare else Memory(self.pair, self._rows)
        text.memory.fill(prompt)
        text.passed = text.known = len(prompt) - 1
        return text

    def _close(self, text: _SlotText) -> None:
        if text.finite:  # else the caches may hold NaN, which no mask hides
            self.pair.spare[self._rows].append(text.memory)

    def _forward_root(self, text: _SlotText, clock: Clock) -> None:
        self._catch_up(text, len(text.tokens) - text.known, shown=True)
        text.known = len(text.tokens)

    def _catch_up(self, text: _SlotText, pending: int, shown: bool = False) -> None:
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
        over, begin = run_of(run, end.device), end - (run - 1)
        logits_WV = memory.draft.forward(memory.text_T.gather(0, begin + over.slots_W), begin, over)
        probs_WV = self.draft_sampling.probabilities(logits_WV if shown else logits_WV[-1:])
        memory.root_1V.copy_(probs_WV[-1:])
        return torch.cat([probs_WV, logits_WV.to(probs_WV.dtype)], dim=-1) if shown else probs_WV

    def _run(self, text: _SlotText, action: Action, clock: Clock) -> Outcome:
        length, memory = len(text.tokens), text.memory
        if length > self.length:
            raise InputError(f"the text has {length} tokens; this decoder was made for {self.length}")
        if action.distinct:
            raise InputError(f"{action}: the graph decoder drafts i.i.d. branches; pair.decoder=eager takes all styles")
        if action.copies:
            copied = text.proposal(action.L1)
            action = action if copied else EMPTY
            memory.copy_in(copied)
        if action.drafts and text.passed < length:
            self._catch_up(text, length - text.passed)
        layout = layout_of(action, self.pair.device)
        # the draws of `Decoder` in its order: of each drafted token, the verifier's last node, the extra token
        known = 1 if action == EMPTY else layout.size - 1 if action.copies else 0
        memory.uniforms[known : layout.size + 1].uniform_(generator=text.generator)
        clock.lap("draft")
        laps = Clock(self.pair.device, waits=False) if memory.records else clock  # a recording may not wait
        outcome = _outcome(memory.run((self._law, action), lambda: self._work(text, action, laps)), layout)
        if outcome is None:
            text.finite = False
            raise InputError("a model gives numbers that are not finite (NaN or infinity)")
        if action.drafts:  # the draft's cache has all nodes but the leaves
            text.passed = length + min(len(outcome.tokens) - 1, layout.depth - 1)
        return outcome

    def _work(self, text: _SlotText, action: Action, clock: Clock) -> Tensor:
        drafted = self._draft(text, action)
        clock.lap("draft")
        rows = self._target(text, action, drafted)
        clock.lap("target")
        verdict = self._verify(text, action, drafted, rows)
        clock.lap("verify")
        return self._commit(text, action, drafted, rows, verdict)

    def _draft(self, text: _SlotText, action: Action) -> Two:
        memory, layout = text.memory, layout_of(action, self.pair.device)
        tokens_S = torch.zeros(layout.size, dtype=torch.int64, device=self.pair.device)
        tokens_S[:1] = memory.text_T.gather(0, memory.base.view(1))
        q_SV = memory.root_1V.new_zeros(layout.size, self.pair.vocabulary)
        if action.copies:
            tokens_S[1:] = memory.copied[: action.L1]
            q_SV[:-1].scatter_(-1, tokens_S[1:].unsqueeze(-1), 1.0)
        elif action != EMPTY:
            q_SV[:1] = memory.root_1V
            _draw(layout, slice(0, 1), memory.uniforms, tokens_S, q_SV)
            for slots, over in passes_of(action, self.pair.device).drafted:
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
            return layout.order_S, drawn(rows[1][0], ends_2[1:])
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
            # a trunk is in its place; rows beyond the accepted path may hold anything, as they are overwritten
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
    rows, first = slots.stop - slots.start, slots.stop  # the slot of their first child
    each = layout.K if first == layout.L1 + 1 and layout.L2 > 0 else 1  # children of a slot
    end = first + rows * each
    tokens_S[first:end] = drawn(q_SV[slots], uniforms[first - 1 : end - 1].view(rows, each)).flatten()


class _SlotText(Text):
    memory: Memory
    passed: int  # committed tokens in the draft's cache
    known: int  # committed tokens after which `knowledge` has the draft's distributions, or does not need them
    finite = True  # whether all logits so far were


class Window(NamedTuple):
    """The slots that a forward pass covers, and what they attend to; S is `ROOM` in all windows over a tree."""

    slots_W: Tensor  # counted from the base; int64
    visible_WS: Tensor  # bool
    depths_S: Tensor  # positions of all slots, counted from the base; int64


def run_window(count: int, device: torch.device) -> Window:
    """The window over `count` consecutive tokens of a text."""
    room = max(ROOM, count)
    visible_WS = pad(torch.ones(count, count, dtype=torch.bool, device=device).tril_(), (0, room - count))
    return Window(torch.arange(count, device=device), visible_WS, torch.arange(room, device=device))


run_of = cache(run_window)


class _Layer(StaticLayer):
    """Writes to the rows in `place`; transformers' own layer appends."""

    def __init__(self, rows: int, place: dict[str, Tensor]) -> None:
        super().__init__(max_cache_len=rows)
        self._place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.max_cache_len, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        for states, new in zip((self.keys, self.values), (key_states, value_states), strict=True):
            states.index_copy_(2, self._place["rows_W"], new)
        return self.keys, self.values


class PreallocatedModel:
    """A causal language model over one text at a time; its KV cache has `rows` rows, for the text and a tree."""

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        self.model, self.rows = model, rows
        self._place: dict[str, Tensor] = {}
        self._layers = [_Layer(rows, self._place) for _ in range(model.config.get_text_config().num_hidden_layers)]
        self._cache = Cache(layers=[*self._layers])  # layers with a sliding window keep all rows: the mask hides them
        self._masks = TreeMasks(model.config)
        self.fill(torch.zeros(1, dtype=torch.int64, device=model.device))  # allocates the caches
        self._states = self._stacked()

    @torch.inference_mode()
    def fill(self, tokens_T: Tensor) -> None:
        """Start a text with these tokens, int64 on the device."""
        for begin in range(0, len(tokens_T), FILL):
            part_W = tokens_T[begin : begin + FILL]
            base, over = torch.tensor(begin, device=part_W.device), run_window(len(part_W), part_W.device)
            self._forward(part_W, base, over, last=1)

    def forward(self, tokens_W: Tensor, base: Tensor, over: Window) -> Tensor:
        """Logits [W, V] of a window's tokens, which are written to the cache. `base` is int64 [], on the device."""
        if not tokens_W.is_cuda:
            return self._forward(tokens_W, base, over)
        if len(tokens_W) > 1:  # compiled once for one token, and once for several
            for tensor in (tokens_W, over.slots_W, over.visible_WS):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(PreallocatedModel._forward)(self, tokens_W, base, over)

    def _forward(self, tokens_W: Tensor, base: Tensor, over: Window, last: int = 0) -> Tensor:
        self._place["rows_W"] = base + over.slots_W
        offsets_W = over.depths_S[over.slots_W]
        masks = self._masks.preallocated(over.visible_WS, over.depths_S, offsets_W, base, self.rows, self.model.dtype)
        output = self.model(
            tokens_W.unsqueeze(0),
            attention_mask=masks,
            position_ids=(base + offsets_W).unsqueeze(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=last,
        )
        return output.logits[0]

    def keep(self, path_D: Tensor, base: Tensor) -> None:
        """Move the rows of an accepted path next to the root's; `path_D` are its slots from depth 1 on, int64."""
        from_D, to_D = base + path_D, base + torch.arange(1, len(path_D) + 1, device=path_D.device)
        for states in self._states:
            states.index_copy_(3, to_D, states.index_select(3, from_D))

    def _stacked(self) -> list[Tensor]:
        # keys and values of one shape are parts of one tensor, so that a GPU moves the rows of all layers at once
        parts = [(layer, name) for layer in self._layers if layer.is_initialized for name in ("keys", "values")]
        by_shape: dict[torch.Size, list[tuple[_Layer, str]]] = {}
        for part in parts:
            by_shape.setdefault(getattr(*part).shape, []).append(part)
        result = [torch.stack([getattr(*part) for part in alike]) for alike in by_shape.values()]
        for alike, states in zip(by_shape.values(), result, strict=True):
            for part, own in zip(alike, states.unbind(), strict=True):
                setattr(*part, own)
        return result


class Passes(NamedTuple):
    drafted: list[tuple[slice, Window]]  # of the draft below the root, with their slots
    target: Window


@cache
def passes_of(action: Action, device: torch.device) -> Passes:
    layout = layout_of(action, device)
    behind = (0, ROOM - layout.size)
    depths_S = pad(layout.depths_S, behind)

    def window(slots: slice) -> Window:
        slots_W = torch.arange(slots.start, slots.stop, device=device)
        return Window(slots_W, pad(layout.ancestors_SS[slots], behind), depths_S)

    trunk = [slice(n, n + 1) for n in range(1, layout.L1 + 1)]
    drafted = [*trunk, *layout.levels[1:]][:-1] if layout.depth else []  # leaves need none
    return Passes([(slots, window(slots)) for slots in drafted], window(slice(0, layout.size)))


class Memory:
    """The tensors for decoding one text; other texts reuse them. `rows` is the length of the caches."""

    def __init__(self, pair: ModelPair, rows: int) -> None:
        self.target, self.draft = (PreallocatedModel(model, rows) for model in (pair.target, pair.draft))
        self.text_T = torch.zeros(rows, dtype=torch.int64, device=pair.device)
        self.base = torch.zeros((), dtype=torch.int64, device=pair.device)  # the root's row, which is its position
        self.uniforms = torch.zeros(ROOM + 2, dtype=torch.float64, device=pair.device)
        self.copied = torch.zeros(ROOM, dtype=torch.int64, device=pair.device)  # a lookup's tokens
        # pinned once, or a step would wait for the copy, or for memory that is pinned
        self._host = torch.zeros(ROOM, dtype=torch.int64, pin_memory=pair.device.type == "cuda")
        dtype = torch.promote_types(pair.draft.dtype, torch.float32)
        self.root_1V = torch.zeros(1, pair.vocabulary, dtype=dtype, device=pair.device)  # the draft's distribution
        self.records = pair.device.type == "cuda"
        self._calls = Counter[object]()
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
        self._host[: len(copied)] = torch.tensor(copied, dtype=torch.int64)
        self.copied.copy_(self._host, non_blocking=True)

    def run(self, key: object, work: Callable[[], Tensor]) -> Tensor:
        """The result of `work`. On a GPU, after `WARM` runs for a key, it is recorded as a CUDA graph and replayed."""
        self._calls[key] += 1
        if not self.records or self._calls[key] <= WARM:
            return work()
        if key not in self._recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):  # this does not run the work
                result = work()
            self._recorded[key] = graph, result
        graph, result = self._recorded[key]
        graph.replay()
        return result
