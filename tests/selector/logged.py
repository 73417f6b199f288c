"""Labelled texts of a log, drawn at random, for tests of replay and of joint decisions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from selector.actions import Action, ActionSpace
from selector.latency import Batches, LatencyProfile, Verification
from selector.sampling import Sampling
from selector.schema import DRAFTER, LEVELS, LOG, MATCH, PAIR, TEXT
from selector.tables import FREE, Table
from selector.train.data import Texts, Timed

SPACE = ActionSpace.chains(5, 6)
SIZES = (1, 2, 4)


def profile(decision: float = 0.0) -> LatencyProfile:
    """An engine's times: more for every request, verified token, draft pass and token of
    context. A network's `decision` takes as long for every request."""

    def target(batch: int) -> Table:
        rows = [
            [5e-3 + 2e-4 * batch * tokens + 1e-6 * batch * length for tokens in (1, 64)]
            for length in (1, 201)
        ]
        return Table([1, 201], [1, 64], rows)

    draft = [
        Table([1, 201], [1], [[1e-3 + 1e-4 * batch], [1e-3 + 1e-4 * batch]]) for batch in SIZES
    ]
    decide = [{MATCH: 0.0, TEXT: batch * decision, DRAFTER: batch * decision} for batch in SIZES]
    batches = Batches(
        list(SIZES),
        draft,
        [FREE] * len(SIZES),
        [target(batch) for batch in SIZES],
        stepped=False,
        decide=decide,
    )
    return LatencyProfile(
        device="test engine",
        pair="log:head",
        draft=draft[0],
        target=target(1),
        verify={"naive": Verification()},
        decide=dict.fromkeys(LEVELS, 0.0),
        batches=batches,
    )


def texts(count: int = 9, roots: int = 30, seed: int = 0) -> Texts:
    """Texts of different lengths; the match says little of what is accepted."""
    generator = torch.Generator().manual_seed(seed)
    size_X = torch.randint(roots // 2, roots, (count,), generator=generator)
    R = int(size_X.sum())
    accepted_R = torch.randint(SPACE.depth + 1, (R,), generator=generator)
    lookup_R = torch.randint(max(SPACE.lookups) + 1, (R,), generator=generator)
    scalars_RF = torch.rand(R, len(LOG.scalars), generator=generator)
    scalars_RF[:, PAIR.index("match")] = torch.randint(6, (R,), generator=generator).float()
    length_R = torch.cat([20 + torch.arange(size) for size in size_X.tolist()])
    scalars_RF[:, PAIR.index("context_length")] = length_R.float()
    return Texts(
        samplings=[Sampling(0.0)],
        size_X=size_X,
        sampling_X=torch.zeros(count, dtype=torch.int64),
        kind_X=["code" if x % 2 else "prose" for x in range(count)],
        source_X=[f"source {x}" for x in range(count)],
        prompt_X=[f"text {x}" for x in range(count)],
        scalars_RF=scalars_RF,
        length_R=length_R,
        survivals={"naive": (accepted_R[:, None] > torch.arange(SPACE.depth)).half()},
        lookup_R=lookup_R.to(torch.uint8),
        drafted_R=torch.full((R,), SPACE.depth, dtype=torch.uint8),
        hidden_R=torch.full((R,), -1),
        schema=LOG,
        space=SPACE,
    )


def timed(batch: int = 1, decision: float = 0.0, **made: int) -> Timed:
    return Timed(texts(**made), "naive", profile(decision).at_batch(batch), batch)


def committed(data: Timed, row: int, action: Action) -> int:
    """Tokens of a step, by labels of 0 and 1."""
    own_D = data.survivals_RS[row, SPACE.depth if action.copies else 0 :]
    return int(own_D[: action.nodes].sum()) + 1


def ten_lines(data: Timed, choose: Callable[[int], Action]) -> tuple[int, int, float]:
    """Steps, tokens and seconds of a policy on labels of 0 and 1, by walking along each text."""
    steps = tokens = begin = 0
    seconds = 0.0
    for size in data.texts.size_X.tolist():
        at = 0
        while at < size:
            action = choose(begin + at)
            seconds += data.profile.action_seconds(
                action, float(data.texts.length_R[begin + at]), "naive"
            )
            at, steps = at + committed(data, begin + at, action), steps + 1
        begin, tokens = begin + size, tokens + size
    return steps, tokens, seconds
