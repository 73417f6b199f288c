"""Measures a pair's latency profile on this machine, from the decoder's passes and steps."""

from __future__ import annotations

import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from data_gen.decoding import decoder_for
from data_gen.decoding.loop import Chooser, Features, FixedTree, Step
from data_gen.models.checkpoints import weights_of
from data_gen.models.heads import caches
from data_gen.models.pair import CachedModel, ModelPair, resolve_device
from data_gen.models.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification import COPIED, get_verifier
from data_gen.verification.distributions import sample
from selector.actions import EMPTY, Action
from selector.latency import NEVER_LATE, Correction, LatencyProfile, Table, correction_counts
from selector.schema import MATCH

T = TypeVar("T")
Case = tuple[str, Action]  # a verifier's name and the action of a step
ROWS = 16  # of probabilities that are filtered at once
DRAFT_PASSES = 4  # timed in a row
TOGETHER = 24  # decodings of a prompt that take turns, each with its own caches
BETWEEN = Action(1, 4, 0)  # drafted between plain steps
LATE = (0, 1, 4, 16)  # plain steps before one that drafts


def device_name(device: str, dtype: str, threads: int | None = None) -> str:
    """The key of measured times: the processor, the number of CPU threads (torch's choice if None), the dtype."""
    device = resolve_device(device)
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, {dtype}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    threads = threads or torch.get_num_threads()
    return f"{processor}, {threads} thread{'s' * (threads > 1)}, {dtype}"


class Grid(NamedTuple):
    """Context lengths, draft pass widths, tree sizes, and depths and branches of verified trees, each timed `repeats`
    times."""

    lengths: Sequence[int]
    widths: Sequence[int]
    nodes: Sequence[int]
    repeats: int
    depths: Sequence[int] = (1, 4, 8, 16)
    branches: Sequence[int] = (1, 2, 4)


def usual(seconds: Sequence[float]) -> float:
    """The mean without the slowest tenth, which other programs cause; the median has a larger variance there."""
    return statistics.fmean(_quicker(seconds, float))


def _quicker(things: Sequence[T], seconds: Callable[[T], float]) -> list[T]:
    return sorted(things, key=seconds)[: max(1, math.floor(0.9 * len(things)))]


@torch.inference_mode()
def measure(
    pair: ModelPair,
    grid: Grid,
    verifiers: Sequence[str],
    device: str,
    tick: Callable[[], None],
    until: float = math.inf,
) -> LatencyProfile:
    """Time every cell of the grid, in rounds over all cells, so that a slow moment of the machine affects all alike.

    The profile has no decision times, and 0 for the rest of a step. No round after the first one begins later than the
    moment `until` of `now`.
    """
    cells = dict(_cells(pair, grid, verifiers))
    seconds: dict[tuple, list[float]] = {key: [] for key in cells}
    for number in range(grid.repeats):
        if number > 0 and now(pair) > until:
            break
        for key, cell in cells.items():
            cell.before()
            start = now(pair)
            cell.work()
            seconds[key].append((now(pair) - start) / cell.passes)
        tick()
    found = {key: usual(values) for key, values in seconds.items()}

    def table(kind: str, lengths: Sequence[int], sizes: Sequence[int]) -> Table:
        return Table([*lengths], [*sizes], [[found[kind, length, size] for size in sizes] for length in lengths])

    return LatencyProfile(
        device=device,
        pair=pair.fingerprint,
        draft=table("draft", grid.lengths, grid.widths),
        target=table("target", grid.lengths, grid.nodes),
        verify={name: table(name, grid.depths, grid.branches) for name in verifiers},
        decide={},
        copied=table(COPIED.name, grid.depths, grid.branches[:1]),
        weights=[weights_of(model) for model in (pair.target, pair.draft)],
        nucleus=max(0.0, (found["nucleus", 0, 1] - found["nucleus", 0, 0]) / ROWS),
        step=0.0,
    )


def now(pair: ModelPair) -> float:
    if pair.device.type == "cuda":
        torch.cuda.synchronize(pair.device)
    return time.perf_counter()


class _Cell(NamedTuple):
    """Timed work, and the untimed pass before it: in decoding, the two models alternate in the processor's caches."""

    before: Callable[[], object]
    work: Callable[[], object]
    passes: int = 1


def _cells(pair: ModelPair, grid: Grid, verifiers: Sequence[str]) -> Iterator[tuple[tuple, _Cell]]:
    generator = torch.Generator(device=pair.device).manual_seed(0)
    vocabulary = pair.vocabulary
    for length in grid.lengths:
        context = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        target, draft = caches(pair)
        target.fill(context[:-1])
        draft.fill(context)
        one_target_pass, one_draft_pass = _target_pass(target, tree_of(1)), _draft_passes(draft, 1, 1, generator)
        for width in grid.widths:
            passes = _draft_passes(draft, width, DRAFT_PASSES, generator)
            yield ("draft", length, width), _Cell(one_target_pass, passes, DRAFT_PASSES)
        for nodes in grid.nodes:
            tree_pass = _target_pass(target, tree_of(nodes))
            yield ("target", length, nodes), _Cell(one_draft_pass if nodes > 1 else tree_pass, tree_pass)
    logits_NV = torch.randn(ROWS, vocabulary, device=pair.device)
    for filtered, sampling in enumerate((Sampling(), Sampling(1.0, 0.9))):
        yield ("nucleus", 0, filtered), _Cell(one_target_pass, partial(sampling.probabilities, logits_NV))
    drafted = {(depth, count): branches(count, depth) for depth in grid.depths for count in grid.branches}
    drafted_rows = {size: (tree, *_rows(pair, len(tree), generator)) for size, tree in drafted.items()}
    for name in dict.fromkeys((*verifiers, COPIED.name)):
        for (depth, count), rows in drafted_rows.items():
            work = partial(get_verifier(name).verify, *rows, generator)
            yield (name, depth, count), _Cell(one_target_pass, work)


def tree_of(nodes: int) -> DraftTree:
    """So many nodes with the root: four branches of equal length where possible, else a chain."""
    drafted = nodes - 1
    count = 4 if drafted >= 8 and drafted % 4 == 0 else 1
    return branches(count, drafted // count)


def branches(count: int, depth: int) -> DraftTree:
    return DraftTree.from_paths([], [[b] * depth for b in range(count)])


def _draft_passes(draft: CachedModel, width: int, count: int, generator: torch.Generator) -> Callable[[], None]:
    tokens = torch.zeros(width, dtype=torch.int64)

    def work() -> None:
        for depth in range(count):
            visible = torch.eye(width, dtype=torch.bool).repeat(1, depth + 1)
            output = draft.forward(tokens, torch.full((width,), depth), visible)
            sample(Sampling().probabilities(output.logits_WV), 1, generator).tolist()
        draft.keep([])

    return work


def _target_pass(target: CachedModel, tree: DraftTree) -> Callable[[], None]:
    def work() -> None:
        output = target.forward(tree.tokens_N.clamp(min=0), tree.depths_N, tree.ancestors_NN())
        Sampling().probabilities(output.logits_WV)
        target.keep([])

    return work


def _rows(pair: ModelPair, nodes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    logits = 3 * torch.randn(2, nodes, pair.vocabulary, generator=generator, device=pair.device)
    return (logits[0] + logits[1]).softmax(-1), logits[1].softmax(-1)


def real_steps(
    pair: ModelPair,
    cases: Sequence[Case],
    prompts: Sequence[list[int]],
    count: int,
    tokens: int,
    tick: Callable[[], object] = lambda: None,
    until: float = math.inf,
) -> dict[Case, list[Step]]:
    """Steps by case: up to `count` of each text, after its slow first steps and within `tokens` new tokens. Steps of a
    lookup without a match and cases without steps are left out. After the moment `until` of `now` every decoding makes
    one such step, and no more. `tick` is called `rounds` times.

    Decodings of a prompt take turns step by step, in a random order, so that slow moments affect all of them alike.
    """
    steps: dict[Case, list[Step]] = {case: [] for case in cases}
    for number, prompt in enumerate(prompts):
        shuffled = random.Random(number)
        order = shuffled.sample(list(steps), len(steps))
        for begin in range(0, len(order), TOGETHER):
            with ExitStack() as stack:
                running = {
                    (name, action): stack.enter_context(
                        closing(steps_of(pair, name, FixedTree(action, _seen_for(action)), prompt, tokens, number))
                    )
                    for name, action in order[begin : begin + TOGETHER]
                }
                for turn in range(count):
                    if turn > 0 and now(pair) > until:
                        break
                    for key in shuffled.sample(list(running), len(running)):
                        steps[key] += islice(running[key], 1)
            tick()
    return {key: taken for key, taken in steps.items() if taken}  # a text may end with its first step


def rounds(cases: Sequence[Case], prompts: Sequence[list[int]]) -> int:
    return len(prompts) * math.ceil(len(cases) / TOGETHER)


def _seen_for(action: Action) -> tuple[str, ...]:
    return (MATCH,) if action.copies else ()


def steps_of(
    pair: ModelPair, verifier: str, chooser: Chooser, prompt: list[int], limit: int, seed: int
) -> Generator[Step]:
    """The steps of one decoding within `limit` new tokens, after its slow ones; without lookups that find no match."""
    verify, length = get_verifier(verifier), len(prompt) + limit
    decoder = decoder_for(pair, Sampling(), verify, chooser, length, timed=True)
    generator = torch.Generator(device=pair.device).manual_seed(seed)
    with closing(decoder.steps(prompt, generator)) as steps:
        tokens: list[int] = []
        new = slow = 0
        while new < limit and pair.eos_ids.isdisjoint(tokens):
            step, tokens = next(steps)
            new, slow = new + len(tokens), slow + 1
            if slow > decoder.slow_steps and (step.nodes > 1 or step.action == EMPTY):
                yield step


def times(profile: LatencyProfile, verifier: str, action: Action, steps: Sequence[Step]) -> tuple[float, float]:
    """Predicted and measured seconds of a step with one action: means without the slowest tenth."""
    kept = _quicker(steps, lambda step: step.total)
    predicted = statistics.fmean(
        profile.action_seconds(action, step.length, verifier, _seen_for(action), nodes=step.nodes) for step in kept
    )
    return predicted, statistics.fmean(step.total for step in kept)


def fitted(profile: LatencyProfile, steps: Mapping[Case, Sequence[Step]]) -> LatencyProfile:
    """The profile with `step`, `copied` and `corrections` from real decoding steps: of the empty tree, at least two
    chains, at least two trees with branches, and any lookups. The corrections of drafting are fitted to all verifiers
    together, on which they do not depend: first to chains, then the correction of branching to other trees.
    """
    empty = [times(profile, name, tree, taken) for (name, tree), taken in steps.items() if tree == EMPTY]
    profile = replace(profile, step=statistics.fmean(measured - predicted for predicted, measured in empty))
    profile = replace(profile, copied=_copied(profile, steps))
    drafted = {(name, tree): taken for (name, tree), taken in steps.items() if not tree.copies}
    chains = {key: taken for key, taken in drafted.items() if key[1].K == 1 and key[1] != EMPTY}
    drafting, trunk_pass = _least_squares(profile, chains, [correction_counts(action)[:2] for _, action in chains])
    profile = replace(profile, corrections=dict.fromkeys(profile.verify, Correction(drafting, trunk_pass)))
    trees = {key: taken for key, taken in drafted.items() if key[1].K > 1}
    names = list(dict.fromkeys(name for name, _ in trees))
    counts = [(correction_counts(action)[2], *(float(name == own) for own in names)) for name, action in trees]
    if not trees:  # a head drafts chains alone
        return profile
    branch_pass, *branching = _least_squares(profile, trees, counts)
    corrections = profile.corrections | {
        name: Correction(drafting, trunk_pass, branch_pass, own) for name, own in zip(names, branching, strict=True)
    }
    return replace(profile, corrections=corrections)


def _least_squares(
    profile: LatencyProfile, steps: Mapping[Case, Sequence[Step]], counts: Sequence[Sequence[float]]
) -> list[float]:
    predicted_R, measured_R = torch.tensor(
        [times(profile, *key, taken) for key, taken in steps.items()], dtype=torch.float64
    ).unbind(-1)
    counts_RC = torch.tensor(counts, dtype=torch.float64)
    least = torch.linalg.lstsq(counts_RC / measured_R.unsqueeze(-1), 1 - (predicted_R / measured_R).unsqueeze(-1))
    seconds: list[float] = least.solution[:, 0].tolist()
    return seconds


def _copied(profile: LatencyProfile, steps: Mapping[Case, Sequence[Step]]) -> Table:
    """Seconds to verify a copied chain, by its length: as timed, plus the mean error over real steps of all lengths."""
    lookups = {key: taken for key, taken in steps.items() if key[1].copies}
    if not lookups:
        return profile.copied
    found = [times(profile, *key, taken) for key, taken in lookups.items()]
    shift = statistics.fmean([measured - predicted for predicted, measured in found], [*map(len, lookups.values())])
    rows = [[max(0.0, seconds + shift) for seconds in row] for row in profile.copied.seconds]
    return Table(profile.copied.lengths, profile.copied.sizes, rows)


def plain_alone(pair: ModelPair, verifier: str, prompts: Sequence[list[int]], count: int, tokens: int) -> float:
    """`LatencyProfile.plain`, from up to `count` rounds of each text within `tokens` new tokens; 0 without rounds. In
    each round a step drafts `BETWEEN`, and two plain steps of another decoding follow: the first finds the processor's
    caches as between steps that draft, and the second as in plain decoding."""
    first, second = [], []
    for number, prompt in enumerate(prompts):
        with ExitStack() as stack:
            drafting, plain = (
                stack.enter_context(closing(steps_of(pair, verifier, FixedTree(action), prompt, tokens, number)))
                for action in (BETWEEN, EMPTY)
            )
            for _, between, alone in islice(zip(drafting, plain, plain, strict=False), count):
                first.append(between.total)
                second.append(alone.total)
    return usual(second) - usual(first) if first else 0.0


@dataclass
class _Late:
    plain: int
    feature_levels: tuple[str, ...] = ()
    since: int = 0

    def select(self, features: Features | None) -> Action:
        self.since = (self.since + 1) % (self.plain + 1)
        return EMPTY if self.since else BETWEEN


def late_drafts(
    pair: ModelPair,
    verifier: str,
    prompts: Sequence[list[int]],
    count: int,
    tokens: int,
    tick: Callable[[], object] = lambda: None,
) -> Table:
    """`LatencyProfile.late`, from `count` rounds of each text within `tokens` new tokens; free without any. In each
    round decodings of the text take turns: each makes a number of plain steps (`LATE`) and then drafts. More tokens to
    pass never take less time, so the means are fitted by isotonic regression."""
    seconds: dict[int, list[float]] = {plain: [] for plain in LATE if 2 * (plain + 1) + BETWEEN.nodes < tokens}
    for prompt in prompts:
        with ExitStack() as stack:
            running = {
                plain: stack.enter_context(closing(_drafts_after(plain, pair, verifier, prompt, count, tokens)))
                for plain in seconds
            }
            for _ in range(count):
                for plain, drafts in running.items():
                    turn = [*islice(drafts, 1 if plain else 2)]  # the first of two follows another decoding's step
                    seconds[plain] += turn[-1:]
                tick()
    timed = [plain for plain, own in seconds.items() if own]
    if 0 not in timed:
        return NEVER_LATE
    later = [usual(seconds[plain]) - usual(seconds[0]) for plain in timed]
    fitted = isotonic_regression(later, weights=[len(seconds[plain]) for plain in timed]).x
    return Table([0], timed, [[max(0.0, value) for value in fitted.tolist()]])


def _drafts_after(
    plain: int, pair: ModelPair, verifier: str, prompt: list[int], count: int, tokens: int
) -> Generator[float]:
    """The first draft of each decoding is left out: the draft has just passed the prompt."""
    for seed in range(count):
        with closing(steps_of(pair, verifier, _Late(plain), prompt, tokens, seed)) as steps:
            yield from islice((step.total for step in steps if step.action != EMPTY), 1, None)
