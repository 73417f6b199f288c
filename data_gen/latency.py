"""Measures a pair's latency profile on this machine: the program's own passes, timed as the decoder runs them."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data_gen.decoding import Decoder, Fixed, Step
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification import COPIED, get_verifier
from data_gen.verification.profile import sample
from selector.actions import EMPTY, Action
from selector.runtime import Correction, LatencyProfile, Table, correction_counts

ROWS = 16  # of probabilities that are filtered at once
DRAFT_PASSES = 4  # timed in a row
DEPTHS, BRANCHES = (1, 4, 8, 16), (1, 2, 4)  # of the trees whose verification is timed


def device_name(device: str, dtype: str, threads: int | None = None) -> str:
    """What times belong to: the processor, the number of CPU threads (torch's choice if None), the number format."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, {dtype}"
    return f"{_processor()}, {threads or torch.get_num_threads()} threads, {dtype}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Grid:
    """Context lengths, draft pass widths and tree sizes to time; each cell is the median of `repeats` runs."""

    lengths: Sequence[int]
    widths: Sequence[int]
    nodes: Sequence[int]
    repeats: int


@torch.inference_mode()
def measure(
    pair: ModelPair, grid: Grid, verifiers: Sequence[str], device: str, tick: Callable[[], None]
) -> LatencyProfile:
    """Time every cell of the grid, cells interleaved so that a slow moment of the machine hits all alike.

    The times of a selector's decisions are left out, the rest of a step at 0.

    Args:
        device: as `device_name` gives it.
        tick: called after each of the `repeats` rounds.
    """
    cells = dict(_cells(pair, grid, verifiers))
    seconds: dict[tuple, list[float]] = {key: [] for key in cells}
    for _ in range(grid.repeats):
        for key, cell in cells.items():
            cell.before()
            start = _now(pair)
            cell.work()
            seconds[key].append((_now(pair) - start) / cell.passes)
        tick()
    median = {key: statistics.median(values) for key, values in seconds.items()}

    def table(kind: str, lengths: Sequence[int], sizes: Sequence[int]) -> Table:
        rows = [[median[kind, length, size] for size in sizes] for length in lengths]
        return Table(list(lengths), list(sizes), rows)

    return LatencyProfile(
        device=device,
        pair=pair.fingerprint,
        draft=table("draft", grid.lengths, grid.widths),
        target=table("target", grid.lengths, grid.nodes),
        verify={name: table(name, DEPTHS, BRANCHES) for name in verifiers},
        decide={},
        copied=table(COPIED.name, DEPTHS, BRANCHES[:1]),
        nucleus=max(0.0, (median["nucleus", 0, 1] - median["nucleus", 0, 0]) / ROWS),
        step=0.0,
    )


def _now(pair: ModelPair) -> float:
    if pair.device.type == "cuda":
        torch.cuda.synchronize(pair.device)
    return time.perf_counter()


@dataclass(frozen=True)
class _Cell:
    """What is timed, and the untimed pass that precedes it: in decoding, the models take turns in the caches."""

    before: Callable[[], None]
    work: Callable[[], None]
    passes: int = 1


def _cells(pair: ModelPair, grid: Grid, verifiers: Sequence[str]) -> Iterator[tuple[tuple, _Cell]]:
    """All cells, by (kind, length, size)."""
    generator = torch.Generator(device=pair.device).manual_seed(0)
    vocabulary = pair.vocabulary
    for length in grid.lengths:
        context = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        draft, target = CachedModel(pair.draft), CachedModel(pair.target)
        draft.fill(context)
        target.fill(context[:-1])
        one_target_pass, one_draft_pass = _target_pass(target, tree_of(1)), _draft_passes(draft, 1, 1, generator)
        for width in grid.widths:
            passes = _draft_passes(draft, width, DRAFT_PASSES, generator)
            yield ("draft", length, width), _Cell(one_target_pass, passes, DRAFT_PASSES)
        for nodes in grid.nodes:
            tree = tree_of(nodes)
            tree_pass = _target_pass(target, tree)
            yield ("target", length, nodes), _Cell(one_draft_pass if nodes > 1 else tree_pass, tree_pass)
    logits_NV = torch.randn(ROWS, vocabulary, device=pair.device)
    for filtered, sampling in enumerate((Sampling(), Sampling(1.0, 0.9))):
        yield ("nucleus", 0, filtered), _Cell(one_target_pass, _probabilities(sampling, logits_NV))
    for name in dict.fromkeys((*verifiers, COPIED.name)):
        for depth in DEPTHS:
            for count in BRANCHES:
                work = _verification(name, pair, branches(count, depth), generator)
                yield (name, depth, count), _Cell(one_target_pass, work)


def tree_of(nodes: int) -> DraftTree:
    """A tree of `nodes` nodes, the root included: four branches where these come out even, else a chain."""
    drafted = nodes - 1
    if drafted >= 8 and drafted % 4 == 0:
        return branches(4, drafted // 4)
    return branches(1, drafted)


def branches(count: int, depth: int) -> DraftTree:
    """Branches of different tokens from the root."""
    return DraftTree.from_paths([], [[b] * depth for b in range(count)])


def _draft_passes(draft: CachedModel, width: int, count: int, generator: torch.Generator) -> Callable[[], None]:
    """Passes in a row, each with the draw of the next tokens."""
    device = draft.model.device
    tokens = torch.zeros(1, width, dtype=torch.int64, device=device)

    def work() -> None:
        for depth in range(count):
            visible = torch.eye(width, dtype=torch.bool).repeat(1, depth + 1)
            output = draft.forward(tokens, torch.full((width,), depth, device=device), visible)
            sample(Sampling().probabilities(output.logits_BWV[0]), 1, generator).tolist()
        draft.keep([])

    return work


def _target_pass(target: CachedModel, tree: DraftTree) -> Callable[[], None]:
    device = target.model.device
    tokens = tree.tokens_N.clamp(min=0).unsqueeze(0).to(device)
    offsets = tree.depths_N.to(device)

    def work() -> None:
        output = target.forward(tokens, offsets, tree.ancestors_NN())
        Sampling().probabilities(output.logits_BWV[0])
        target.keep([])

    return work


def _probabilities(sampling: Sampling, logits_NV: torch.Tensor) -> Callable[[], None]:
    return lambda: (sampling.probabilities(logits_NV), None)[1]


def _verification(name: str, pair: ModelPair, tree: DraftTree, generator: torch.Generator) -> Callable[[], None]:
    shape = (2, len(tree), pair.vocabulary)
    logits = 3 * torch.randn(shape, generator=generator, device=pair.device)
    p_NV, q_NV = (logits[0] + logits[1]).softmax(-1), logits[1].softmax(-1)
    verifier = get_verifier(name)
    return lambda: (verifier.verify(tree, p_NV, q_NV, generator), None)[1]


def real_steps(
    pair: ModelPair, verifiers: Sequence[str], actions: Sequence[Action], prompts: Sequence[list[int]], tokens: int
) -> dict[tuple[str, Action], list[Step]]:
    """Decoding steps by verifier and action, all of them interleaved prompt by prompt; those that were met."""
    steps: dict[tuple[str, Action], list[Step]] = {(name, action): [] for name in verifiers for action in actions}
    for number, prompt in enumerate(prompts):
        for (name, action), taken in steps.items():
            decoder = Decoder(pair, Sampling(), get_verifier(name), Fixed(action), timed=True)
            generator = torch.Generator(device=pair.device).manual_seed(number)
            taken += decoder.decode(prompt, tokens, generator).steps[1:]  # the first one follows the prefill
    return {key: taken for key, taken in steps.items() if taken}  # a text may end at once


def times(profile: LatencyProfile, verifier: str, action: Action, steps: Sequence[Step]) -> tuple[float, float]:
    """Predicted and measured seconds of steps with one action, the median of each."""
    predicted = statistics.median(profile.action_seconds(action, step.length, verifier) for step in steps)
    return predicted, statistics.median(sum(step.seconds.values()) for step in steps)


def fitted(profile: LatencyProfile, steps: Mapping[tuple[str, Action], Sequence[Step]]) -> LatencyProfile:
    """The profile with `step` and `corrections` from real decoding steps, by least squares of relative errors.

    Drafting takes as long whatever verifies its tokens, so what it took beyond the tables is fitted to the steps of all
    verifiers at once; only what branching took is a verifier's own. Fitted apart, the clock's noise would make a
    difference of several per cent between verifiers on the very same chain.

    Args:
        steps: of the empty tree, and of at least four others, by verifier and action.
    """
    empty = [times(profile, name, action, taken) for (name, action), taken in steps.items() if action == EMPTY]
    profile = replace(profile, step=statistics.median(measured - predicted for predicted, measured in empty))
    names = list(dict.fromkeys(name for name, _ in steps))
    drafted = {key: taken for key, taken in steps.items() if key[1] != EMPTY}
    predicted_R, measured_R = torch.tensor(
        [times(profile, *key, taken) for key, taken in drafted.items()], dtype=torch.float64
    ).unbind(-1)
    counts_RC = torch.zeros(len(drafted), 3 + len(names), dtype=torch.float64)
    for row, (name, action) in enumerate(drafted):
        *shared, branching = correction_counts(action)
        counts_RC[row, :3] = torch.tensor(shared)
        counts_RC[row, 3 + names.index(name)] = branching
    least = torch.linalg.lstsq(counts_RC / measured_R.unsqueeze(-1), 1 - (predicted_R / measured_R).unsqueeze(-1))
    drafting, trunk_pass, branch_pass, *branching_of = least.solution[:, 0].tolist()
    corrections = {
        name: Correction(drafting, trunk_pass, branch_pass, branching)
        for name, branching in zip(names, branching_of, strict=True)
    }
    return replace(profile, corrections=corrections)
