"""A study: does it pay to stop a chain where the draft is unsure, or to verify only a part of it?

    python -m tests.engines.stopping chains RUN CHAINS.pkl     # what the draft drafts along a run's texts
    python -m tests.engines.stopping table RUN CHAINS.pkl      # policies, replayed

Given a text of the target, a top-down chain's next token is the text's own with probability min(1, q/p), else one of
(q - p)+, after which the draft goes on by itself: the joint law of text and chain is p(x) min(1, q/p) = min(p, q) on
equal tokens, and p(x) (q - p)+(y) / sum (q - p)+ . (1 - min(1, q/p)) summed over x gives (q - p)+(y) elsewhere.
"""

from __future__ import annotations

import pickle
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numba import njit

from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from data_gen.traces import read_texts
from pipelines.config import SHIPPED
from pipelines.latency.timings import profile_of, read_timings
from selector.actions import ActionSpace
from selector.train.module import SelectorModule

LONGEST, TEMPERATURES = 10, (0.6, 1.0)
SPLITS = {"train": 100, "validation": 1000, "test": 1000}  # texts at most
THRESHOLDS = (0, 0.02, 0.05, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
PRICES = (0.1, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)  # of the speed
CLOCKS = Path("configs/clocks")


def check_the_law(seed: int = 0) -> float:
    """The largest difference between the joint law of texts and chains of two tokens, forwards and given the text."""
    rng, V = np.random.default_rng(seed), 3
    p1, q1 = rng.dirichlet(np.ones(V), 2)
    p2, q2 = rng.dirichlet(np.ones(V), (2, V))

    def left(a: Any, b: Any) -> Any:
        rest = np.maximum(a - b, 0)
        return rest / max(rest.sum(), 1e-300)

    forward, given = np.zeros((V,) * 4), np.zeros((V,) * 4)  # [draft, draft, text, text]
    for d1, d2 in product(range(V), repeat=2):
        drafted, take1, take2 = q1[d1] * q2[d1, d2], min(1, p1[d1] / q1[d1]), min(1, p2[d1, d2] / q2[d1, d2])
        forward[d1, d2, d1, d2] += drafted * take1 * take2
        forward[d1, d2, d1] += drafted * take1 * (1 - take2) * left(p2[d1], q2[d1])
        forward[d1, d2] += drafted * (1 - take1) * left(p1, q1)[:, None] * p2
    for t1, t2, d1, d2 in product(range(V), repeat=4):
        same1, same2 = min(1, q1[t1] / p1[t1]), min(1, q2[t1, t2] / p2[t1, t2])
        if d1 == t1:
            own = same1 * ((d2 == t2) * same2 + (1 - same2) * left(q2[t1], p2[t1])[d2])
            given[d1, d2, t1, t2] += p1[t1] * p2[t1, t2] * own
        given[d1, d2, t1, t2] += p1[t1] * p2[t1, t2] * (1 - same1) * left(q1, p1)[d1] * q2[d1, d2]
    return float(np.abs(forward - given).max())


@torch.inference_mode()
def chains_along(pair: ModelPair, row: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Of each of a text's next tokens: P(accepted); the draft's own probability of it, at temperature 1; and those of
    a token that is drafted in its place and is rejected, and of the tokens that the draft puts after that."""
    sampling, start = Sampling(row["temperature"], row["top_p"]), row["start"]
    before, own = row["tokens"][:start], row["tokens"][start:]
    target, draft, N = CachedModel(pair.target), CachedModel(pair.draft), len(own) - 1
    target.fill(before)
    draft.fill(before)
    causal = torch.ones(N + 1, N + 1, dtype=torch.bool).tril_()
    p_NV = sampling.probabilities(target.extend(own).logits_WV)[:-1]
    logits_NV = draft.forward(torch.tensor(own), torch.arange(N + 1), causal).logits_WV[:-1]
    q_NV, sure_NV, next_N1 = sampling.probabilities(logits_NV), logits_NV.softmax(-1), torch.tensor(own[1:])[:, None]
    accepted_N1 = (q_NV.gather(1, next_N1) / p_NV.gather(1, next_N1).clamp(min=1e-30)).clamp(max=1)
    over_NV = (q_NV - p_NV).clamp(min=0)
    token_N1 = torch.multinomial(
        torch.where(over_NV.sum(-1, keepdim=True) > 1e-12, over_NV, q_NV), 1, generator=generator
    )
    others, visible = [sure_NV.gather(1, token_N1)], causal[:N]
    for depth in range(1, LONGEST):
        visible = torch.cat([visible, torch.eye(N, dtype=torch.bool)], 1)
        logits_NV = draft.forward(token_N1[:, 0], torch.arange(N) + depth, visible).logits_WV
        token_N1 = torch.multinomial(sampling.probabilities(logits_NV), 1, generator=generator)
        others.append(logits_NV.softmax(-1).gather(1, token_N1))
    numbers = {"accepted": accepted_N1[:, 0], "own": sure_NV.gather(1, next_N1)[:, 0], "others": torch.cat(others, 1)}
    return {name: values.double().numpy() for name, values in numbers.items()}


def chains(run: Path, path: Path) -> None:
    pair, found, generator = ModelPair.load("smollm2", str(SHIPPED), "cpu"), [], torch.Generator().manual_seed(0)
    for split, most in SPLITS.items():
        files = sorted((run / "traces" / split).glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        for row in [row for row in rows if row["temperature"] in TEMPERATURES and row["roots"]][:most]:
            facts = {key: row[key] for key in ("temperature", "prompt", "source", "roots")}
            found.append({"split": split, **facts, **chains_along(pair, row, generator)})
    path.write_bytes(pickle.dumps(found))


@njit
def walk(accepted, own, others, roots, lengths, stop, trim, seconds, verified):  # type: ignore[no-untyped-def]
    """Expected tokens and seconds of a text. A step drafts while the running product of the drafted tokens' numbers is
    at least `stop`, up to the root's length, and verifies those whose product is at least `trim`."""
    reach, tokens, time = np.zeros(roots + LONGEST + 2), 0.0, 0.0
    reach[0] = 1.0
    for r in range(roots):
        left, product_, k, kept = reach[r], 1.0, 0, 0
        while left > 0:
            if k >= lengths[r] or (k > 0 and product_ < stop):
                reach[r + kept + 1] += left
                tokens, time = tokens + left * (kept + 1), time + left * (seconds[k] + verified[kept])
                break
            wrong = left * (1 - accepted[r + k])  # the next one is rejected; the draft goes on, all the same
            if wrong > 0:
                n, j, other = k + 1, 1, product_ * others[r + k, 0]
                good = kept + 1 if kept == k and other >= trim else kept
                while n < lengths[r] and other >= stop:
                    other *= others[r + k, j]
                    n, j = n + 1, j + 1
                    good = good + 1 if good == n - 1 and other >= trim else good
                reach[r + min(k, good) + 1] += wrong
                tokens, time = tokens + wrong * (min(k, good) + 1), time + wrong * (seconds[n] + verified[good])
            left *= accepted[r + k]
            product_ *= own[r + k]
            k += 1
            kept = k if kept == k - 1 and product_ >= trim else kept
    return tokens, time


@njit
def foreseen(accepted, roots, seconds, verified):  # type: ignore[no-untyped-def]
    """As `walk`, of a policy that drafts the tokens alone that will be accepted."""
    reach, tokens, time = np.zeros(roots + LONGEST + 2), 0.0, 0.0
    reach[0] = 1.0
    for r in range(roots):
        left = reach[r]
        for k in range(LONGEST + 1):
            ends = left * (1 - accepted[r + k]) if k < LONGEST else left
            reach[r + k + 1] += ends
            tokens, time, left = tokens + ends * (k + 1), time + ends * (seconds[k] + verified[k]), left - ends
    return tokens, time


class Replays:
    """Policies on one split's texts of one temperature, with one clock."""

    def __init__(self, texts: list[dict[str, Any]], seconds: Any, verified: Any) -> None:
        self.texts, self.seconds, self.verified = texts, seconds, verified

    def of(self, lengths: list[Any], stop: float = 0.0, trim: float = 0.0) -> Any:
        keys = ("accepted", "sure", "unsure", "roots")
        each = zip(self.texts, lengths, strict=True)
        return np.array([walk(*(t[k] for k in keys), n, stop, trim, self.seconds, self.verified) for t, n in each])

    def oracle(self) -> Any:
        return np.array([foreseen(t["accepted"], t["roots"], self.seconds, self.verified) for t in self.texts])

    def fixed(self, length: int) -> list[Any]:
        return [np.full(text["roots"], length) for text in self.texts]

    def by_root(self, price: float, first: int) -> list[Any]:
        worth = [text["predicted"] - price * (self.seconds + self.verified) for text in self.texts]
        return [np.concatenate([[first], own.argmax(1)[1:]]) for own in worth]


def speed(found: Any) -> float:
    return float(found[:, 0].sum() / found[:, 1].sum())


def over(one: Any, other: Any, texts: list[dict[str, Any]]) -> str:
    sources, rng = np.array([text["source"] for text in texts]), np.random.default_rng(0)
    groups = [np.where(sources == source)[0] for source in np.unique(sources)]
    drawn = [np.concatenate([groups[n] for n in rng.integers(0, len(groups), len(groups))]) for _ in range(300)]
    error = np.std([speed(one[own]) / speed(other[own]) for own in drawn])
    return f"{speed(one) / speed(other):.3f} ±{error:.3f}"


def estimate(texts: list[dict[str, Any]], bins: int = 16) -> Any:
    """P(a drafted token is accepted | the draft's probability of it), by bins, ascending."""
    sure = np.concatenate([np.concatenate([text["own"], text["others"][:, 0]]) for text in texts])
    right = np.concatenate([np.concatenate([text["accepted"], 0 * text["accepted"]]) for text in texts])
    weight = np.concatenate([np.concatenate([text["accepted"], 1 - text["accepted"]]) for text in texts])
    edges = np.quantile(sure, np.linspace(0, 1, bins + 1)[1:-1])
    own = np.searchsorted(edges, sure)
    shares = np.bincount(own, right, bins) / np.maximum(np.bincount(own, weight, bins), 1e-9)
    return lambda values: np.maximum.accumulate(shares)[np.searchsorted(edges, values)]


def clocks() -> dict[str, tuple[Any, Any]]:
    """Seconds by drafted and by verified tokens; a plain step of the synthetic ones takes 1."""
    n = np.arange(LONGEST + 1)
    found = {f"draft pass 1/{each}, free": (1 + n / each, 0.0 * n) for each in (10, 20)}
    space = ActionSpace.chains(LONGEST, 0)
    for path, batch in product(sorted(CLOCKS.glob("*.csv")), (1, 8, 32)):
        if "eagle" not in path.name:
            own = profile_of(read_timings(path), str(path), False, "x", ("traversal",)).at_batch(batch)
            whole = np.array([own.action_seconds(space.chain(each), 500, "traversal") for each in n])
            verified = np.array([own.target.at(500, 1 + each) for each in n])
            found[f"{path.stem}, batch {batch}"] = (whole - verified) / whole[0], verified / whole[0]
    return found


def table(run: Path, path: Path) -> None:
    print(f"largest difference of the two laws: {max(map(check_the_law, range(50))):.1e}")
    data = pickle.loads(path.read_bytes())
    module = SelectorModule.load_from_checkpoint(next((run / "training").rglob("*.ckpt")), map_location="cpu").eval()
    chains_at = [module.space.index(module.space.chain(length)) for length in range(LONGEST + 1)]
    for split in SPLITS:
        texts, mine = (
            read_texts(run / "traces", split, ["traversal"]),
            [each for each in data if each["split"] == split],
        )
        with torch.no_grad():
            predicted = module.scores(texts, "light")[:, chains_at].double().numpy()
        first = np.concatenate([[0], texts.size_X.cumsum(0).numpy()])
        hot = [x for x in range(len(texts)) if texts.settings[int(texts.setting_X[x])].temperature in TEMPERATURES]
        for x, each in zip(hot, mine, strict=False):
            assert each["prompt"] == texts.prompt_X[x]
            each["predicted"] = predicted[first[x] : first[x + 1]]
    for (name, (seconds, verified)), temperature in product(clocks().items(), TEMPERATURES):
        of = {split: [e for e in data if e["split"] == split and e["temperature"] == temperature] for split in SPLITS}
        fit = estimate(of["train"])
        for each in (each for texts in of.values() for each in texts):
            each |= {"sure": fit(each["own"]), "unsure": fit(each["others"])}
        # the constants by training and validation texts, those with predictions by validation texts alone
        both, held, test = (
            Replays(texts, seconds, verified)
            for texts in (of["train"] + of["validation"], of["validation"], of["test"])
        )
        g, best = max((speed(both.of(both.fixed(n))), n) for n in range(LONGEST + 1))
        _, cap, stop = max((speed(both.of(both.fixed(n), s)), n, s) for n in (4, 7, 10) for s in THRESHOLDS)
        _, whole, trim = max((speed(both.of(both.fixed(n), 0, t)), n, t) for n in range(1, 8) for t in THRESHOLDS)
        _, price = max((speed(held.of(held.by_root(g * x, best))), g * x) for x in PRICES)
        _, two = max((speed(held.of(held.by_root(g * x, best), s)), (g * x, s)) for x in PRICES for s in THRESHOLDS)
        _, last = max((speed(held.of(held.by_root(two[0], best), two[1], t)), t) for t in THRESHOLDS)
        found = {
            "static": test.of(test.fixed(best)),
            "root": test.of(test.by_root(price, best)),
            "stop": test.of(test.fixed(cap), stop),
            "trim": test.of(test.fixed(whole), 0, trim),
            "root and stop": test.of(test.by_root(two[0], best), two[1]),
            "oracle": test.oracle(),
            "and trim": test.of(test.by_root(two[0], best), two[1], last),
        }
        better = max((found["root"], found["stop"]), key=speed)
        words = [f"{key} {over(own, found['static'], of['test'])}" for key, own in list(found.items())[1:]]
        together = over(found["root and stop"], better, of["test"])
        print(f"{name}, T={temperature:g}: static {speed(found['static']):.2f} (L={best}); over it: {'; '.join(words)}")
        print(f"    root and stop over the better of the two: {together}", flush=True)


if __name__ == "__main__":
    {"chains": chains, "table": table}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
