"""What the order of steps costs: plain decoding in a run of its own, and drafts that come after plain steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice

from scipy.optimize import isotonic_regression

from data_gen.decoding.loop import Features, FixedTree
from data_gen.models.pair import ModelPair
from data_gen.timing import steps_of, usual
from selector.actions import EMPTY, Action
from selector.latency import NEVER_LATE, Table

BETWEEN = Action(1, 4, 0)  # drafted between plain steps
LATE = (0, 1, 4, 16)  # plain steps before one that drafts


def plain_alone(pair: ModelPair, verifier: str, prompts: Sequence[list[int]], count: int, tokens: int) -> float:
    """`LatencyProfile.plain`, from up to `count` rounds of each text within `tokens` new tokens; 0 without rounds.

    In each round a step drafts `BETWEEN`, and two plain steps of another decoding follow: the first finds the caches as
    between steps that draft, and the second as in plain decoding. So a slow moment of the machine affects both alike.
    """
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
    """Drafts `BETWEEN` after so many plain steps."""

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
    """`LatencyProfile.late`, from `count` rounds of each text within `tokens` new tokens; free without any.

    In each round decodings of the text take turns. Each makes a number of plain steps (`LATE`) and then drafts, so that
    a slow moment of the machine affects all alike. More tokens to pass never take less time, so the means are fitted by
    isotonic regression. `tick` is called for each round.
    """
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
    """Seconds of the steps that draft after `plain` others, from up to `count` decodings of a text. The first draft of
    each decoding is left out: the draft has just passed the prompt."""
    for seed in range(count):
        with closing(steps_of(pair, verifier, _Late(plain), prompt, tokens, seed)) as steps:
            yield from islice((step.total for step in steps if step.action != EMPTY), 1, None)
