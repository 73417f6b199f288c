"""What a log's selector gains where requests come and go as they did in the log: tokens per second,
and how long a request takes.

Legend: R roots, A actions, N requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.evaluate.gains import Cases, settings_of
from selector.decision import NETWORK, Setting
from selector.files import Array
from selector.latency import LatencyProfile, StepTimes
from selector.train.arrivals import Choose, Engine, Load
from selector.train.data import Timed
from selector.train.mixed import compiled_choice
from selector.train.tuning import Predictions, decide

LOADS = (1, 2, 4)  # times the log's own arrivals in the same time
REQUESTS = 2000  # of the log, at most, in their order
MOST = 256  # requests in flight, as vLLM's default


def load_of(arrived: Sequence[float], texts: int) -> Load | None:
    """The log's arrivals, each of which asks for one of the held-out texts in turn; None where the
    log does not tell of two times."""
    arrived_N = np.sort(arrived)[:REQUESTS]
    if len(arrived_N) < 2 or arrived_N[0] == arrived_N[-1]:
        return None
    order = np.random.default_rng(0).permutation(texts)
    return Load(arrived_N - arrived_N[0], np.resize(order, len(arrived_N)))


def served(
    load: Load,
    cases_by_batch: Mapping[int, Cases],
    test: Timed,
    predicted: Predictions,
    profile: LatencyProfile,
) -> Iterator[dict[str, Any]]:
    """Every method at every load; `test` are the held-out texts, and the rest as in
    `gains.measured`. Methods are tuned by batch size: a step takes the nearest one's."""
    engine = Engine(test, profile, MOST)
    settings: dict[str, dict[int, Setting]] = {}
    for batch, cases in cases_by_batch.items():
        for name, setting in settings_of(cases).items():
            settings.setdefault(name, {})[batch] = setting
    for name, by_batch in settings.items():
        choose = _chooser(by_batch, test, predicted, profile, engine)
        for times in LOADS:
            outcome = engine.serve(Load(load.arrived_N / times, load.text_N), choose)
            yield {
                "method": name,
                "load": times,
                "arrivals_per_second": len(load.arrived_N) * times / float(load.arrived_N[-1]),
                "tokens_per_second": outcome.speed,
                "requests": outcome.requests,
                "latency": float(outcome.latency_N.mean()),
                "latency_95": float(np.quantile(outcome.latency_N, 0.95)),
            }


def _chooser(
    by_batch: Mapping[int, Setting],
    test: Timed,
    predicted: Predictions,
    profile: LatencyProfile,
    engine: Engine,
) -> Choose:
    action_R: dict[int, Array] = {}
    seconds: dict[int, float] = {}
    for batch, setting in by_batch.items():
        at_batch = profile.at_batch(batch)
        case = test.on(at_batch, batch)
        alone = setting.without_network() if setting.joint else setting
        action_R[batch] = decide(case, predicted, alone).action_R.numpy()
        seconds[batch] = at_batch.decision_seconds(setting.asked)

    def choose(root_B: Array, length: float, times: StepTimes) -> tuple[Array, float]:
        requests = len(root_B)
        batch = min(by_batch, key=lambda size: abs(math.log(size / requests)))
        setting = by_batch[batch]
        if setting.decider != NETWORK or not setting.joint:
            return action_R[batch][root_B], seconds[batch]
        tokens_BA = predicted[setting.level][root_B].double().numpy()
        prices = times.prices(length, requests)
        return compiled_choice(tokens_BA, engine.shapes, setting.joint, *prices), seconds[batch]

    return choose


def in_words(arrivals: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each load."""
    for load in LOADS:
        at_load = [row for row in arrivals if row["load"] == load]
        if at_load:
            parts = []
            for row in at_load:
                parts.append(
                    f"{row['method']} {row['tokens_per_second']:.0f} tokens/s, "
                    f"{row['latency']:.2f} s a request ({row['latency_95']:.2f} s at 95%), "
                    f"{row['requests']:.1f} in a step"
                )
            rate = at_load[0]["arrivals_per_second"]
            yield f"{load} times the log's arrivals, {rate:.2f} requests/s: {'; '.join(parts)}."
