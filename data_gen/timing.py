"""Measures a pair's latency profile on this machine: times of real decoding steps, and a fit of
them.

Legend: S groups of steps, P parts of a step's time.
"""

from __future__ import annotations

import math
import platform
import random
import re
import statistics
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import count, islice, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.optimize import nnls

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree, Overruled, Step
from data_gen.models.checkpoints import known_weights_of
from data_gen.models.pair import ModelPair, resolve_device
from data_gen.models.sampling import Sampling, probabilities
from data_gen.verification import get_verifier
from selector.actions import EMPTY, GREEDY, RANKED, Action
from selector.latency import LatencyProfile, Table, Verification, draft_passes

Case = tuple[str, Action]  # a verifier's name and the action of a step
BURST = 4  # consecutive steps with one action
TURN = 8  # consecutive steps of one decoding
GROWN = 128  # new tokens after which a decoding begins anew
ROWS = 16  # distributions that are filtered at once
TIMES = 9  # how often they are
# sizes between which times are linear
NODES = (1, 2, 3, 5, 9, 17, 25, 41, 65, 97)
WIDTHS = (1, 2, 4, 8, 16, 32)
LAGS = (0, 1, 4, 16)
THOUSAND = 1000.0  # tokens of context


def device_name(device: str, dtype: str) -> str:
    """The key of measured times: the processor, the number of CPU threads, the dtype."""
    device = resolve_device(device)
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, {dtype}"
    info = Path("/proc/cpuinfo")
    description = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*:(.*)", description, re.MULTILINE)
    if name:
        processor = name[1].strip()
    else:
        processor = platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    unit = "threads" if threads > 1 else "thread"
    return f"{processor}, {threads} {unit}, {dtype}"


def now(pair: ModelPair) -> float:
    if pair.device.type == "cuda":
        torch.cuda.synchronize(pair.device)
    return time.perf_counter()


class Sample(NamedTuple):
    """A timed decoding step, with its `lag` in tokens as in `LatencyProfile`; 0 where nothing is
    drafted."""

    verifier: str
    step: Step
    lag: int


def usual(seconds: Iterable[float]) -> float:
    """The mean without the slowest tenth, which other programs cause; the median has a larger
    variance there."""
    ascending = sorted(seconds)
    return statistics.fmean(ascending[: len(ascending) - len(ascending) // 10])


def quicker(samples: Iterable[Sample]) -> list[Sample]:
    ascending = sorted(samples, key=lambda sample: sample.step.total)
    return ascending[: len(ascending) - len(ascending) // 10]


def bursts(actions: Sequence[Action], shuffled: random.Random) -> Iterator[Action]:
    """Each action several times in a row, as in decoding, in an order that is shuffled anew each
    time; without end."""
    while True:
        for action in shuffled.sample(actions, len(actions)):
            yield from repeat(action, BURST)


def samples_of(
    pair: ModelPair,
    verifier: str,
    actions: Iterator[Action],
    prompt: list[int],
    longest: int,
    seed: int,
) -> Generator[Sample]:
    """Endless steps of one verifier after a prompt, in texts of about `longest` tokens at most. The
    first step of a burst counts only where the draft lags, and a lookup only where it finds a
    match."""
    chooser = Overruled(FixedTree(EMPTY), actions)
    seen = Counter[Action]()
    for number in count(seed):
        grown = min(len(prompt) + GROWN, longest)
        decoder = Decoder(pair, Sampling(), get_verifier(verifier), chooser, timed=True)
        generator = torch.Generator(device=pair.device).manual_seed(number)
        with closing(decoder.steps(prompt, generator)) as steps:
            lag = 0
            last: Action | None = None
            for at, (step, tokens) in enumerate(steps):
                action = step.action
                seen[action] += 1
                warm = at > 0 and seen[action] > 1  # an action's first step is slower
                continues = action == last or (lag > 0 and action.drafts)
                has_match = step.nodes > 1 or not action.copies
                if warm and continues and has_match:
                    yield Sample(verifier, step, lag if action.drafts else 0)
                if action.drafts:
                    lag = 0
                else:
                    lag += len(tokens)
                last = action
                if step.length + len(tokens) >= grown:
                    break


def real_steps(
    pair: ModelPair,
    cases: Sequence[Case],
    prompts: Sequence[list[int]],
    longest: int,
    steps: int,
    tick: Callable[[], object] = lambda: None,
) -> list[Sample]:
    """At least `steps` steps of all cases and prompts together, and one of each case that is no
    lookup; in texts of about `longest` tokens at most. Decodings take turns in a random order, so
    that slow moments affect all of them."""
    samples: list[Sample] = []
    shuffled = random.Random(0)
    missing = {case for case in cases if not case[1].copies}
    actions_of: dict[str, list[Action]] = {}
    for verifier, action in cases:
        actions_of.setdefault(verifier, []).append(action)
    with ExitStack() as stack:
        running = []
        for verifier, verifier_actions in actions_of.items():
            # shared by all texts, so that each action soon occurs
            actions = bursts(verifier_actions, random.Random(0))
            for number, prompt in enumerate(prompts):
                decoding = samples_of(pair, verifier, actions, prompt, longest, 1000 * number)
                stack.enter_context(closing(decoding))
                running += [decoding] * len(verifier_actions)  # by the number of its actions
        while missing or len(samples) < steps:
            for sample in list(islice(shuffled.choice(running), TURN)):
                missing.discard((sample.verifier, sample.step.action))
                samples.append(sample)
                tick()
    return samples


def verified_as(sample: Sample) -> str:
    """The key of `LatencyProfile.verify`: greedy trees and shapes by rank are verified alike,
    whatever verifies the others."""
    style = sample.step.action.style_name
    return style if style in (GREEDY, RANKED) else sample.verifier


def parts_of(sample: Sample) -> Counter[str]:
    """How often each part of a step's time occurs in a step, by name."""
    step = sample.step
    action = step.action
    parts = Counter(_pass_parts("target", NODES, step.length, step.nodes))
    for length, width in draft_passes(action, step.length):
        parts.update(_pass_parts("draft", WIDTHS, length, width))
    if action.drafts:
        name = verified_as(sample)
        parts["drafting"] = 1
        parts.update(_ramps("lag", LAGS, sample.lag))
        parts[f"token {name}"] = action.nodes
        if action.K > 1 and not action.is_certain:
            parts[f"branching {name}"] = 1
            parts[f"depth {name}"] = action.L2
    return parts


def _pass_parts(name: str, knots: Sequence[int], length: float, size: float) -> dict[str, Any]:
    """A forward pass, its context in thousands of tokens, and its size."""
    return {name: 1, f"{name} context": length / THOUSAND, **_ramps(name, knots, size)}


def _ramps(name: str, knots: Sequence[int], size: float) -> dict[str, Any]:
    """How far a size is from each knot to the next one, from 0 to 1."""
    shares = {}
    for low, high in pairwise(knots):
        shares[f"{name} {high}"] = min(max((size - low) / (high - low), 0.0), 1.0)
    return shares


def fitted(
    pair: ModelPair, samples: Iterable[Sample], lengths: Sequence[int], device: str
) -> LatencyProfile:
    """The profile whose step times are nearest to those of real steps: non-negative least squares
    of relative errors, over means by case, context and lag. It has no decision times; `lengths` are
    the contexts of its tables."""
    groups: defaultdict[tuple[str, Action, int, int], list[Sample]] = defaultdict(list)
    totals: defaultdict[Case, list[float]] = defaultdict(list)
    for sample in samples:
        name, action = verified_as(sample), sample.step.action
        context = bisect(lengths, sample.step.length)
        groups[name, action, context, bisect(LAGS, sample.lag)].append(sample)
        totals[name, action].append(sample.step.total)
    parts = []
    seconds = []
    weights = []
    for (name, action, *_), group in groups.items():
        parts.append(pd.DataFrame(map(parts_of, quicker(group))).mean())
        seconds.append(usual(sample.step.total for sample in group))
        # a group's own mean would favour the quicker ones
        weights.append(math.sqrt(len(group)) / usual(totals[name, action]))
    parts_SP = pd.DataFrame(parts).fillna(0.0)
    weight_S = np.array(weights)
    seconds_P, _ = nnls(parts_SP.to_numpy() * weight_S[:, None], np.array(seconds) * weight_S)
    times = dict(zip(parts_SP.columns, seconds_P.tolist(), strict=True))
    verify = {}
    for name in dict.fromkeys(name for name, _ in totals):
        verify[name] = Verification(
            *(times.get(f"{part} {name}", 0.0) for part in Verification._fields)
        )
    return LatencyProfile(
        device=device,
        pair=pair.fingerprint,
        draft=_table(times, "draft", lengths, WIDTHS),
        target=_table(times, "target", lengths, NODES),
        verify=verify,
        decide={},
        drafting=Table.constant(times["drafting"]),
        nucleus=nucleus_seconds(pair),
        weights=[known_weights_of(model) for model in (pair.target, pair.draft)],
        lag=Table([0], [*LAGS], [_rises(times, "lag", LAGS)]),
    )


def _table(
    times: dict[str, float], name: str, lengths: Sequence[int], knots: Sequence[int]
) -> Table:
    """A forward pass, from the fitted parts of this name."""
    rows = []
    for length in lengths:
        at_first_knot = times[name] + times[f"{name} context"] * length / THOUSAND
        rows.append([at_first_knot + rise for rise in _rises(times, name, knots)])
    return Table([*lengths], [*knots], rows)


def _rises(times: dict[str, float], name: str, knots: Sequence[int]) -> list[float]:
    """How far the time at each knot is above that at the first one."""
    rises = [0.0]
    for knot in knots[1:]:
        rises.append(rises[-1] + times[f"{name} {knot}"])
    return rises


def nucleus_seconds(pair: ModelPair) -> float:
    """`LatencyProfile.nucleus`."""
    logits_NV = torch.randn(ROWS, pair.vocabulary, device=pair.device)
    seconds_by_top_p: dict[float, list[float]] = {1.0: [], 0.9: []}
    for _ in range(TIMES):
        for top_p, seconds in seconds_by_top_p.items():
            start = now(pair)
            probabilities(logits_NV, Sampling(1.0, top_p))
            seconds.append(now(pair) - start)
    plain, filtered = map(statistics.median, seconds_by_top_p.values())
    return max(0.0, filtered - plain) / ROWS


def times(profile: LatencyProfile, samples: Sequence[Sample]) -> tuple[float, float]:
    """Predicted and measured seconds of steps with one action and no lag: means without the slowest
    tenth."""
    predicted = []
    for sample in quicker(samples):
        step = sample.step
        predicted.append(
            profile.action_seconds(step.action, step.length, sample.verifier, nodes=step.nodes)
        )
    return statistics.fmean(predicted), usual(sample.step.total for sample in samples)
