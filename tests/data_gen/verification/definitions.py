"""What verifiers accept at one node, by their definitions in plain numbers: nothing here is shared
with the product.

`p` and `q` are the target's and the draft's probabilities by token, `k` the number of drafts.
Acceptance is the probability, over the drafts, too, that the token at a node is one of its
children; a *flow* leaves out the children on which the extra token lands by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from math import expm1, fsum, log1p, prod

Row = Sequence[float]
HALVINGS = 200


def root(falling: Callable[[float], float], low: float, high: float) -> float:
    """The last number at which a falling function is above 0, by bisection."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


def at_least_one(probability: float, k: int) -> float:
    return -expm1(k * log1p(-probability)) if probability < 1 else 1.0


def normalised(row: Row) -> list[float]:
    total = fsum(row)
    return [value / total if total > 0 else 0.0 for value in row]


def excess(p: Row, q: Row) -> list[float]:
    return [max(one - other, 0.0) for one, other in zip(p, q, strict=True)]


def overlap(p: Row, q: Row) -> float:
    return fsum(map(min, p, q))


def k_seq(m: Row, q: Row, k: int) -> tuple[float, float]:
    """SpecTr's `r*` and the flow `sum min(m, r* q)`, for a target measure of any mass up to one."""

    def gap(r: float) -> float:
        taken = overlap(m, [r * one for one in q])
        return at_least_one(min(taken / r, 1.0), k) - taken

    r = root(gap, 1e-9, float(k))
    return r, overlap(m, [r * one for one in q])


def spectr(p: Row, q: Row, k: int) -> float:
    r, flow = k_seq(p, q, k)
    left, dead = (
        normalised(excess(p, [r * one for one in q])),
        normalised(excess(q, [one / r for one in p])),
    )
    return flow + (1 - flow) * _landed(left, dead, k)


def _landed(left: Row, dead: Row, k: int) -> float:
    """P(a draw from `left` is one of k draws from `dead`)."""
    return fsum(one * at_least_one(other, k) for one, other in zip(left, dead, strict=True))


def first_in_rank(p: Row, q: Row, k: int) -> tuple[float, list[float], list[float]]:
    """The flow of the priority rule, and by token its flow and the draft's mass that is never
    selected."""
    flows, dead, left = [0.0] * len(p), list(q), 1.0
    for token in sorted((x for x in range(len(p)) if q[x] > 0), key=lambda x: (-p[x] / q[x], x)):

        def flow(alive: float, before: float = left, one: float = q[token]) -> float:
            return before**k - max(before - alive * one, 0.0) ** k

        alive = (
            1.0
            if flow(1.0) <= p[token]
            else root(lambda a, most=p[token]: most - flow(a), 0.0, 1.0)
        )  # type: ignore[misc]
        flows[token], dead[token] = flow(alive), (1 - alive) * q[token]
        left = max(left - alive * q[token], 0.0)
    return fsum(flows), flows, dead


def priority(p: Row, q: Row, k: int) -> float:
    flow, flows, dead = first_in_rank(p, q, k)
    return flow + (1 - flow) * _landed(normalised(excess(p, flows)), normalised(dead), k)


def drafts(q: Row, k: int, style: str) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every list of drafts with its probability."""
    support = [x for x in range(len(q)) if q[x] > 0]
    if style == "iid":
        for drawn in product(support, repeat=k):
            yield prod(q[x] for x in drawn), drawn
    elif style == "without_replacement":
        for drawn in permutations(support, min(k, len(support))):
            left = [fsum(q[x] for x in support if x not in drawn[:n]) for n in range(len(drawn))]
            yield prod(q[x] / mass for x, mass in zip(drawn, left, strict=True)), drawn
    else:
        fixed, others = greedy_drafts(q, k)
        if not any(others):
            yield 1.0, fixed
        for x in support:
            if others[x] > 0:
                yield others[x], (*fixed, x)


def greedy_drafts(q: Row, k: int) -> tuple[tuple[int, ...], list[float]]:
    """The k - 1 most likely tokens, and the law of one that is drawn from the others. Where these
    have no probability, the k most likely ones, and nothing is drawn."""
    likely = sorted(range(len(q)), key=lambda x: (-q[x], x))
    others = [0.0 if x in likely[: k - 1] else q[x] for x in range(len(q))]
    return tuple(likely[: k - 1 if any(others) else k]), normalised(others)


def recursive(p: Row, q: Row, k: int, style: str, lands: bool) -> float:
    """Recursive rejection of the drafts in their order; the extra token may be a draft, too, if it
    `lands`."""
    total = 0.0
    for probability, drawn in drafts(q, k, style):
        target, law, rejected = list(p), list(q), 1.0
        for token in drawn:
            rejected *= 1 - (min(1.0, target[token] / law[token]) if law[token] > 0 else 0.0)
            if rejected == 0:
                break
            target = normalised(excess(target, law))
            if style == "without_replacement":
                law[token] = 0.0
                law = normalised(law)
        missed = 1 - fsum(target[x] for x in set(drawn)) if lands else 1.0
        total += probability * (1 - rejected * missed)
    return total


def first_only(p: Row, q: Row, k: int, style: str, lands: bool) -> float:
    """Speculative sampling on the first draft; the extra token may be another one if it `lands`."""
    left = normalised(excess(p, q))
    chance = overlap(p, q)
    for probability, drawn in drafts(q, k, style) if lands else ():
        rejected = 1 - min(1.0, p[drawn[0]] / q[drawn[0]])
        chance += probability * rejected * fsum(left[x] for x in set(drawn[1:]) - {drawn[0]})
    return chance


def by_sampling(p: Row, q: Row, k: int, style: str) -> float:
    """A draw from the target is one of the drafts."""
    return fsum(
        probability * fsum(p[x] for x in set(drawn)) for probability, drawn in drafts(q, k, style)
    )


def best_path(p: Row, q: Row, k: int) -> float:
    """Speculative sampling on the draft of the largest `p/q`, by the law of that draft."""
    rank = sorted((x for x in range(len(p)) if q[x] > 0), key=lambda x: (-p[x] / q[x], x))
    law = [0.0] * len(p)
    for probability, drawn in drafts(q, k, "iid"):
        law[min(drawn, key=rank.index)] += probability
    return overlap(p, law)


def greedy(p: Row, q: Row, k: int) -> float:
    fixed, others = greedy_drafts(q, k)
    return fsum(p[x] for x in fixed) + overlap(
        [0.0 if x in fixed else p[x] for x in range(len(p))], others
    )


def accepted(name: str, style: str, p: Row, q: Row, k: int) -> float | None:
    """What a verifier accepts at one node with k >= 2 drafts; None where there is no definition
    here."""
    by_name: dict[str, Callable[[], float]] = {
        "nss": lambda: by_sampling(p, q, k, style),
        "naive": lambda: first_only(p, q, k, style, lands=False),
        "block": lambda: first_only(p, q, k, style, lands=False),
        "naive_tree": lambda: first_only(p, q, k, style, lands=True),
        "specinfer": lambda: recursive(p, q, k, style, lands=True),
        "traversal": lambda: recursive(p, q, k, style, lands=False),
        "spectr": lambda: spectr(p, q, k),
        "lifted_spectr": lambda: k_seq(p, q, k)[1],
        "lifted_uniform": lambda: k_seq(p, q, k)[1],
        "priority": lambda: priority(p, q, k),
        "lifted_priority": lambda: first_in_rank(p, q, k)[0],
        "lifted_best": lambda: max(k_seq(p, q, k)[1], first_in_rank(p, q, k)[0]),
        "greedy_block": lambda: best_path(p, q, k),
        "greedy": lambda: greedy(p, q, k),
        "lifted_greedy": lambda: greedy(p, q, k),
    }
    return by_name[name]() if name in by_name else None
