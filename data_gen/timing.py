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
from copy import deepcopy
from itertools import count, islice, pairwise, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch.nn import Module
from transformers import PreTrainedModel

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree, Overruled, Step
from data_gen.models.checkpoints import known_weights_of
from data_gen.models.pair import ModelPair, resolve_device
from data_gen.models.prepack import PrepackedLinear, computes_in_bfloat16
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from selector.actions import EMPTY, GREEDY, Action
from selector.latency import LatencyProfile, Table, Verification, draft_passes

Case = tuple[str, Action]  # a verifier's name and the action of a step
BURST, TURN = 4, 8  # consecutive steps with one action; of one decoding
GROWN = 128  # new tokens after which a decoding begins anew
ROWS, TIMES = 16, 9  # distributions that are filtered at once; how often
# sizes between which times are linear
NODES, WIDTHS, LAGS = (1, 2, 3, 5, 9, 17, 25, 41), (1, 2, 4), (0, 1, 4, 16)
THOUSAND = 1000.0  # tokens of context
MATRIX_ROWS, MATRIX_TIMES = (1, 2, 4, 8, 16, 32), 5  # rows of the timed matrices; how often
MOST_TIMED = 250_000_000  # elements of these, about: far more than a processor's caches hold


def device_name(device: str, dtype: str, threads: int | None = None) -> str:
    """The key of measured times: the processor, the number of CPU threads (torch's choice if None),
    the dtype."""
    device = resolve_device(device)
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name(device)}, {dtype}"
    info = Path("/proc/cpuinfo")
    name = re.search(
        r"^model name\s*:(.*)", info.read_text() if info.exists() else "", re.MULTILINE
    )
    processor = name[1].strip() if name else platform.processor() or platform.machine()
    threads = threads or torch.get_num_threads()
    return f"{processor}, {threads} thread{'s' * (threads > 1)}, {dtype}"


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
            lag, last = 0, None
            for at, (step, tokens) in enumerate(steps):
                action = step.action
                seen[action] += 1
                warm = at > 0 and seen[action] > 1  # an action's first step is slower
                counts = (action == last or (lag > 0 and action.drafts)) and (
                    step.nodes > 1 or not action.copies
                )
                if warm and counts:
                    yield Sample(verifier, step, lag if action.drafts else 0)
                lag, last = 0 if action.drafts else lag + len(tokens), action
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
    with ExitStack() as stack:
        running = []
        for name in dict.fromkeys(name for name, _ in cases):
            verifier_actions = [action for verifier, action in cases if verifier == name]
            # shared by all texts, so that each action soon occurs
            actions = bursts(verifier_actions, random.Random(0))
            for number, prompt in enumerate(prompts):
                decoding = stack.enter_context(
                    closing(samples_of(pair, name, actions, prompt, longest, 1000 * number))
                )
                running += [decoding] * len(verifier_actions)  # by the number of its actions
        while missing or len(samples) < steps:
            taken = [*islice(shuffled.choice(running), TURN)]
            missing -= {(sample.verifier, sample.step.action) for sample in taken}
            samples += taken
            for _ in taken:
                tick()
    return samples


def ramps(knots: Sequence[float], x: float) -> list[float]:
    """How far a size is from each knot to the next one, from 0 to 1."""
    return [min(max((x - low) / (high - low), 0.0), 1.0) for low, high in pairwise(knots)]


def verified_as(sample: Sample) -> str:
    """The key of `LatencyProfile.verify`: greedy trees are verified alike, whatever verifies the
    others."""
    return GREEDY if sample.step.action.style == GREEDY else sample.verifier


def parts_of(sample: Sample, verifiers: Sequence[str], nodes: Sequence[int]) -> list[float]:
    """How often each part of a step's time occurs in a step: P numbers; `nodes` are those of
    `NODES` that are used."""
    step, action = sample.step, sample.step.action
    passes, drafts = draft_passes(action, step.length), float(action.drafts)
    widths = np.array(
        [[0.0] * (len(WIDTHS) - 1), *(ramps(WIDTHS, width) for _, width in passes)]
    ).sum(0)
    verified = [drafts * (name == verified_as(sample)) for name in verifiers]
    return [
        *(1.0, step.length / THOUSAND, *ramps(nodes, step.nodes)),
        *(float(len(passes)), sum(length for length, _ in passes) / THOUSAND, *widths),
        *(drafts, *(drafts * share for share in ramps(LAGS, sample.lag))),
        *(action.nodes * indicator for indicator in verified),
        *(indicator * (action.K > 1) for indicator in verified),
        *(indicator * action.L2 * (action.K > 1) for indicator in verified),
    ]


def fitted(
    pair: ModelPair, samples: Iterable[Sample], lengths: Sequence[int], device: str
) -> LatencyProfile:
    """The profile whose step times are nearest to those of real steps: non-negative least squares
    of relative errors, over means by case, context and lag. It has no decision times; `lengths` are
    the contexts of its tables."""
    groups: defaultdict[tuple[str, Action, int, int], list[Sample]] = defaultdict(list)
    totals: defaultdict[Case, list[float]] = defaultdict(list)
    for sample in samples:
        case = verified_as(sample), sample.step.action
        groups[*case, bisect(lengths, sample.step.length), bisect(LAGS, sample.lag)].append(sample)
        totals[case].append(sample.step.total)
    # which comes last
    verifiers = sorted(dict.fromkeys(name for name, _ in totals), key=lambda name: name == GREEDY)
    sizes = {sample.step.nodes for group in groups.values() for sample in group}
    nodes = [
        1,
        *(high for low, high in pairwise(NODES) if any(low < size <= high for size in sizes)),
    ]
    parts, seconds, weights = [], [], []
    for (name, action, *_), group in groups.items():
        parts.append(
            np.mean([parts_of(sample, verifiers, nodes) for sample in quicker(group)], axis=0)
        )
        seconds.append(usual(sample.step.total for sample in group))
        # a group's own mean would favour the quicker ones
        weights.append(math.sqrt(len(group)) / usual(totals[name, action]))
    weight_S = np.array(weights)
    seconds_P, _ = nnls(np.array(parts) * weight_S[:, None], np.array(seconds) * weight_S)
    left = iter(seconds_P.tolist())

    def table(knots: Sequence[int]) -> Table:
        first, by_context = next(left), next(left)
        rises = np.cumsum([0.0, *islice(left, len(knots) - 1)]).tolist()
        rows = [[first + by_context * n / THOUSAND + rise for rise in rises] for n in lengths]
        return Table([*lengths], [*knots], rows)

    target, draft, drafting = table(nodes), table(WIDTHS), next(left)
    lag = Table([0], [*LAGS], [np.cumsum([0.0, *islice(left, len(LAGS) - 1)]).tolist()])
    verify = zip(*(list(islice(left, len(verifiers))) for _ in Verification._fields), strict=True)
    return LatencyProfile(
        device=device,
        pair=pair.fingerprint,
        draft=draft,
        target=target,
        verify=dict(zip(verifiers, map(Verification._make, verify), strict=True)),
        decide={},
        drafting=drafting,
        nucleus=nucleus_seconds(pair),
        weights=[known_weights_of(model) for model in (pair.target, pair.draft)],
        lag=lag,
    )


def nucleus_seconds(pair: ModelPair) -> float:
    """`LatencyProfile.nucleus`."""
    logits_NV = torch.randn(ROWS, pair.vocabulary, device=pair.device)
    taken: dict[float, list[float]] = {1.0: [], 0.9: []}
    for top_p, seconds in [*taken.items()] * TIMES:
        start = now(pair)
        Sampling(1.0, top_p).probabilities(logits_NV)
        seconds.append(now(pair) - start)
    plain, filtered = map(statistics.median, taken.values())
    return max(0.0, filtered - plain) / ROWS


@torch.inference_mode()
def matrix_seconds(model: PreTrainedModel) -> list[dict[str, float]]:
    """Seconds that a model's prepacked layers take for some numbers of rows, each layer once: as
    plain layers (`linear`), prepacked, and prepacked in bfloat16 where the processor has it;
    medians, in turn. Of a large model the first layers alone are timed. Empty where no layer is
    prepacked.
    """
    layers: list[PrepackedLinear] = []
    elements = 0
    for layer in model.modules():
        if isinstance(layer, PrepackedLinear) and elements < MOST_TIMED:
            layers.append(layer)
            elements += layer.in_features * layer.out_features
    if not layers:
        return []
    dtype = layers[0].dtype
    plain = [layer.plain() for layer in layers]
    kinds: dict[str, tuple[Sequence[Module], torch.dtype]] = {
        "linear": (plain, dtype),
        "prepacked": (layers, dtype),
    }
    if dtype != torch.bfloat16 and computes_in_bfloat16():
        kinds["prepacked, bfloat16"] = (
            [PrepackedLinear(deepcopy(layer).bfloat16(), False) for layer in plain],
            torch.bfloat16,
        )
    measurements = []
    for rows in MATRIX_ROWS:
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        for name in [*kinds] * MATRIX_TIMES:
            modules, input_dtype = kinds[name]
            values = {
                layer.in_features: torch.randn(rows, layer.in_features, dtype=input_dtype)
                for layer in layers
            }
            start = time.perf_counter()
            for layer, module in zip(layers, modules, strict=True):
                module(values[layer.in_features])
            taken[name].append(time.perf_counter() - start)
        measurements.append(
            {"rows": rows, **{name: statistics.median(seconds) for name, seconds in taken.items()}}
        )
    return measurements


def times(profile: LatencyProfile, samples: Sequence[Sample]) -> tuple[float, float]:
    """Predicted and measured seconds of steps with one action and no lag: means without the slowest
    tenth."""
    predicted = statistics.fmean(
        profile.action_seconds(
            sample.step.action, sample.step.length, sample.verifier, nodes=sample.step.nodes
        )
        for sample in quicker(samples)
    )
    return predicted, usual(sample.step.total for sample in samples)
