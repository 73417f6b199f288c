"""Speculative decoding without host waits: a step is one queue of work on the device, and one reading of its outcome.

`Decoder` asks the device some twenty times in a step: for every drafted token, for the shape of the tree, for where the
verifier ends. Each question waits for all work before it, which on a GPU costs as much as the passes themselves. Here
nothing is asked before the end. Tokens are drawn on the device from uniform numbers that are drawn up front; trees
stand in fixed slots (`slots`), the caches stand still (`static_model`), verification does not look (`on_slots`); then
one small tensor comes back, with how many tokens were accepted and which. Given the same uniform numbers the text is
`Decoder`'s, token for token, rounding apart.

Legend: S slots of a tree, D its depth, V vocabulary, T tokens of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_gen.decoding.decoder import Chooser, Decoder, Step
from data_gen.drafting.lookup import LookupIndex
from data_gen.drafting.slots import Layout, layout_of
from data_gen.features.root import Accepted, RootKnowledge
from data_gen.features.rows import LEAST_LOGIT
from data_gen.models.pair import ModelPair
from data_gen.models.preallocated import PreallocatedModel, Window, run_window, window
from data_gen.models.sampling import Sampling
from data_gen.verification import COPIED, Verifier
from data_gen.verification.distributions import invert
from data_gen.verification.on_slots import check_on_slots, verify_slots
from selector.actions import EMPTY, Action, ActionSpace, Choice, Lookup
from selector.schema import EARLY, MATCH, InputError

# of target passes, of which a graph is compiled for each that is used
WIDTHS = 1, 2, 3, 4, 5, 7, 9, 11, 13, 17, 21, 25, 33, 41
WARM = 2  # steps of a shape before it is recorded as a CUDA graph
LEAST_RUN, LONGEST_RUN = 2, 32  # tokens of the draft's root pass: after a step that drafted, one or two are new to it
GRAPHS = 64  # compiled passes of a model, beyond which torch would stop; its own limit is 8


class ReadBack(Accepted):
    """The numbers of a step, as they came back with its outcome."""

    def __init__(self, target_entropies: list[float]) -> None:
        self._entropies = target_entropies

    def entropies(self) -> list[float]:
        return self._entropies


class _Queue(NamedTuple):
    """What a step of one action covers."""

    layout: Layout
    drafted: list[tuple[slice, Window]]  # the draft's passes after the root's: their slots
    target: Window


class GraphDecoder(Decoder):
    """As `Decoder`, for one device and texts up to a given length.

    Steps carry no times of their parts: measuring them would take the waits that this decoder is without.

    Args:
        length: the longest text, prompt and new tokens.
        compiled: compile the models' passes (`torch.compile`; one graph for each width that is used).
        backend: of `torch.compile`.
        recorded: on a GPU, record each shape's whole step as a CUDA graph once it has been used a few times.

    Raises:
        ValueError: the verifier has to look at what was drafted.
        InputError: the chooser asks for what only the draft's pass gives, or target and draft are on several devices.
    """

    def __init__(
        self,
        pair: ModelPair,
        sampling: Sampling,
        verifier: Verifier,
        chooser: Chooser,
        length: int,
        draft_sampling: Sampling | None = None,
        compiled: bool = False,
        backend: str = "inductor",
        recorded: bool = True,
    ) -> None:
        super().__init__(pair, sampling, verifier, chooser, draft_sampling)
        check_on_slots(verifier)
        if set(chooser.feature_levels) - {MATCH, EARLY}:
            raise InputError(
                "a step without host waits decides before the draft's pass; this selector asks for features after it"
            )
        if len({weights.device for model in (pair.target, pair.draft) for weights in model.parameters()}) > 1:
            raise InputError("a step without host waits needs target and draft whole on one device")
        if compiled:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        space = ActionSpace.with_lookups()
        most = max(action.nodes for action in space.actions) + 1
        self.length, self._room = length, most
        rows = length + 2 * most
        self._models = [PreallocatedModel(model, rows, most, compiled, backend) for model in (pair.target, pair.draft)]
        self._plans: dict[Choice, _Queue] = {}
        self._runs = {1 << n: run_window(1 << n, most, pair.device) for n in range(LONGEST_RUN.bit_length())}
        self._text_T = torch.zeros(rows, dtype=torch.int64, device=pair.device)
        self._base = torch.zeros((), dtype=torch.int64, device=pair.device)  # the root's row: its position
        self._uniforms = torch.zeros(most + 2, dtype=torch.float64, device=pair.device)
        self._copied = torch.zeros(most, dtype=torch.int64, device=pair.device)
        self._graphs = _Graphs() if recorded and pair.device.type == "cuda" else None

    @torch.inference_mode()
    def steps(self, prompt: Sequence[int], generator: torch.Generator) -> Generator[tuple[Step, list[int]]]:
        """As `Decoder.steps`; InputError where the text grows beyond `length`, or numbers are not finite."""
        if len(prompt) > self.length:
            raise InputError(f"a prompt of {len(prompt)} tokens; this decoder was made for texts of {self.length}")
        tokens = list(prompt)
        knowledge = (
            RootKnowledge(tokens, self.sampling, self.chooser.feature_levels) if self.chooser.feature_levels else None
        )
        index = LookupIndex() if knowledge is None else knowledge.text.index
        self._begin(tokens)
        passed = len(tokens) - 1  # rows of the draft's cache that hold the text
        while True:
            length = len(tokens)
            if length > self.length:
                raise InputError(f"the text has {length} tokens; this decoder was made for {self.length}")
            action = self._choose(knowledge, length, len(prompt), lambda level: None)
            copied: list[int] = []
            if isinstance(action, Lookup):
                index.extend(tokens[len(index) :])
                copied = index.proposal(action.length)
            drafted = action if copied or not isinstance(action, Lookup) else EMPTY
            outcome = self._step_on_device(drafted, copied, length - passed, length, generator)
            accepted, new = outcome.accepted, outcome.tokens
            if isinstance(drafted, Action) and drafted != EMPTY:
                deepest = self._verifier_law(drafted).layout.depth  # whose leaves the draft has not passed
                passed = length + min(accepted, deepest - 1)
            if knowledge is not None:
                knowledge.committed(ReadBack(outcome.entropies), new)
            tokens += new
            yield Step(length, action, accepted, self._verifier_law(drafted).layout.size, {}), new

    def _begin(self, tokens: list[int]) -> None:
        text_T = torch.tensor(tokens, device=self.pair.device)
        self._text_T[: len(tokens)] = text_T
        self._base.fill_(len(tokens) - 1)
        for model in self._models:
            model.fill(text_T[:-1])

    def _step_on_device(
        self, action: Choice, copied: list[int], pending: int, length: int, generator: torch.Generator
    ) -> Outcome:
        """One step; here, and nowhere else, the host waits.

        Args:
            copied: a lookup's tokens.
            pending: committed tokens that the draft has not passed.
        """
        plan = self._verifier_law(action)
        if copied:
            host = torch.tensor(copied)
            if self._copied.is_cuda:
                host = host.pin_memory()  # or copying it would wait
            self._copied[: len(copied)].copy_(host, non_blocking=True)
        # what `Decoder` draws, in its order: for each drafted token, for where the verifier ends, for its extra token
        known = 1 if action == EMPTY else plan.layout.size - 1 if isinstance(action, Lookup) else 0
        self._uniforms[known : plan.layout.size + 1].uniform_(generator=generator)
        run = self._caught_up(pending, length)
        if self._graphs is None:
            result = self._work(action, run)
        else:
            result = self._graphs.run((action, run), lambda: self._work(action, run))
        return Outcome.read(result, plan.layout.depth)

    def _caught_up(self, pending: int, length: int) -> int:
        """How many tokens the draft's root pass is to cover: a power of two, so that few graphs do for all. After a
        long time without drafts the draft first passes what is too much for one."""
        _, draft = self._models
        most = min(LONGEST_RUN, 1 << (length.bit_length() - 1))
        while pending > most:
            over, begin = self._runs[most], self._base - (pending - 1)
            draft.forward(self._text_T.gather(0, begin + over.slots_W), begin, over)
            pending -= most
        return min(most, max(LEAST_RUN, 1 << (pending - 1).bit_length()))

    def _work(self, action: Choice, run: int) -> Tensor:
        """Draft, target pass, verification, commit: what `Outcome` reads, float64 [2 + (D + 1)]; as many entropies
        more where the chooser sees early features.

        Args:
            run: committed tokens that the draft's root pass covers; those that it has passed before change nothing.
        """
        plan = self._verifier_law(action)
        layout, over = plan.layout, plan.target
        target, _ = self._models
        tokens_S, q_SV = self._drafted(action, plan, run)
        padding = len(over.slots_W) - layout.size
        logits_SV = target.forward(torch.nn.functional.pad(tokens_S, (0, padding)), self._base, over)[: layout.size]
        p_SV = self.sampling.after(_no_texts, logits_SV)
        ends = self._uniforms[layout.size - 1 : layout.size + 1]
        verifier = COPIED if isinstance(action, Lookup) else self.verifier
        slot, extra = verify_slots(verifier, layout, tokens_S, p_SV, q_SV, ends)
        path_D, accepted = layout.paths_SD[slot][0], layout.depths_S[slot]
        at_D = torch.arange(layout.depth + 1, device=slot.device)
        new_D = torch.where(at_D < accepted, torch.nn.functional.pad(tokens_S[path_D], (0, 1)), extra)
        if layout.K > 1:
            # the trunk stands where it belongs; beyond the accepted path any row will do, as it is written again
            for model in self._models:
                model.keep(path_D, self._base)
        self._text_T.index_copy_(0, self._base + 1 + at_D, new_D)
        self._base += accepted[0] + 1
        finite = logits_SV.amax(-1).isfinite().all() & q_SV.isfinite().all()
        result = torch.cat([accepted, finite.view(1), new_D]).double()
        if EARLY not in self.chooser.feature_levels:
            return result
        wide_DV = logits_SV[torch.nn.functional.pad(path_D, (1, 0))].float().clamp(min=LEAST_LOGIT)
        return torch.cat([result, cross_entropy(wide_DV, wide_DV.softmax(-1), reduction="none").double()])

    def _drafted(self, action: Choice, plan: _Queue, run: int) -> tuple[Tensor, Tensor]:
        """The tokens of all slots, and the draft's distribution after each; zeros at leaves."""
        layout = plan.layout
        V, device = self.pair.vocabulary, self.pair.device
        tokens_S = torch.zeros(layout.size, dtype=torch.int64, device=device)
        tokens_S[0] = self._text_T.gather(0, self._base.view(1))[0]
        q_SV = torch.zeros(layout.size, V, device=device)
        if isinstance(action, Lookup):
            tokens_S[1:] = self._copied[: action.length]
            q_SV[:-1].scatter_(-1, tokens_S[1:].unsqueeze(-1), 1.0)
        elif action != EMPTY:
            _, draft = self._models
            over = self._runs[run]
            begin = self._base - (run - 1)
            run_W = self._text_T.gather(0, begin + over.slots_W)
            root_1V = self.draft_sampling.after(_no_texts, draft.forward(run_W, begin, over)[-1:])
            q_SV = q_SV.to(root_1V.dtype)
            q_SV[:1] = root_1V
            self._draw(layout, slice(0, 1), tokens_S, q_SV)
            for slots, window_ in plan.drafted:
                logits_WV = draft.forward(tokens_S[slots], self._base, window_)
                q_SV[slots] = self.draft_sampling.after(_no_texts, logits_WV)
                self._draw(layout, slots, tokens_S, q_SV)
        return tokens_S, q_SV

    def _draw(self, layout: Layout, slots: slice, tokens_S: Tensor, q_SV: Tensor) -> None:
        """The tokens below some slots of one depth: one for each, or all first ones of the branches."""
        first = slots.stop  # the slots below follow
        if slots.stop == layout.L1 + 1 and layout.L2 > 0:
            drawn_1K = invert(q_SV[slots], self._uniforms[first - 1 : first - 1 + layout.K].unsqueeze(0))
            tokens_S[first : first + layout.K] = drawn_1K[0]
        else:
            width = slots.stop - slots.start
            uniforms_W1 = self._uniforms[first - 1 : first - 1 + width].unsqueeze(-1)
            tokens_S[first : first + width] = invert(q_SV[slots], uniforms_W1)[:, 0]

    def _verifier_law(self, action: Choice) -> _Queue:
        if action not in self._plans:
            layout = layout_of(action, self.pair.device)
            trunk = [slice(n, n + 1) for n in range(1, layout.L1 + 1)]
            branches = layout.levels[1:]
            passes = [*trunk, *branches][:-1] if layout.depth else []  # leaves need none
            drafted = [(each, window(layout, each.start, each.stop, self._room)) for each in passes]
            width = next((width for width in WIDTHS if width >= layout.size), layout.size)
            self._plans[action] = _Queue(layout, drafted, window(layout, 0, layout.size, self._room, width))
        return self._plans[action]


class Outcome(NamedTuple):
    """What one reading of the device says of a step; entropies where they were asked for."""

    accepted: int
    tokens: list[int]
    entropies: list[float]

    @classmethod
    def read(cls, result: Tensor, depth: int) -> Outcome:
        """From what `_work` returns; this waits for the device. InputError where numbers were not finite."""
        numbers = result.tolist()
        accepted, finite = int(numbers[0]), numbers[1]
        if not finite:
            raise InputError("a model gives numbers that are not finite (NaN or infinity)")
        tokens, entropies = numbers[2 : 3 + accepted], numbers[3 + depth : 4 + depth + accepted]
        return cls(accepted, [int(token) for token in tokens], entropies)


def _no_texts() -> list[list[int]]:
    raise InputError("a distribution that depends on the text before needs the host: it is not for this decoder")


class _Graphs:
    """CUDA graphs of whole steps. A step is run as it is the first times, recorded then, and replayed from then on."""

    def __init__(self) -> None:
        self._calls: dict[object, int] = {}
        self._recorded: dict[object, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def run(self, key: object, work: Callable[[], Tensor]) -> Tensor:
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls <= WARM:
            return work()
        if key not in self._recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # nothing is done yet
                result = work()
            self._recorded[key] = graph, result
        graph, result = self._recorded[key]
        graph.replay()
        return result
