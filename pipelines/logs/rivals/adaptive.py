"""Rules that learn from their own steps how many tokens the drafter is to draft; they never copy.

Legend: X texts, R roots, A actions, D depths, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from pipelines.logs.rivals.rules import Array, RivalTexts, Sequential, climbed, fastest, grid
from selector.jit import jit

# SGLang at 015c872, python/sglang/srt/speculative/adaptive_spec_params.py: ema_alpha; warmup_batches, update_interval
SGLANG_WEIGHT, SGLANG_PACE = 0.2, (10, 5)
# the same file: candidate_steps and down_hysteresis for 1, 8, 32 and 64 requests
SGLANG_STEPS = (((1, 3, 5, 7), -0.25), ((0, 1, 3), 0.0), ((0, 1), 0.0), ((0,), 0.0))
# BanditSpec at a30f56d, generate_utils.py: its lengths; the weight is UCB1's (that file has 6)
BANDIT_ARMS, BANDIT_WEIGHT = (1, 2, 3, 4), 2.0


@dataclass(frozen=True)
class Adaptive(Sequential):
    """SGLang's adaptive speculative decoding: a moving average of accepted lengths moves the drafter's length among
    candidates. There the average is over all requests; here each text has its own."""

    candidates: tuple[int, ...]  # ascending
    start: int  # position of the first one
    slack: float  # added to the average at which the length goes down
    weight: float  # of the newest step in the average
    warm_up: int  # steps before the first move
    interval: int  # steps between moves

    def actions(self, texts: RivalTexts) -> Tensor:
        own = np.array(self.candidates), self.start, self.slack, self.weight, (self.warm_up, self.interval)
        return torch.from_numpy(_adaptive(texts.accepted_RK[:, 0], texts.size_X, *own))


def sglang_adaptive(train: RivalTexts) -> Adaptive:
    """The set of candidates, which SGLang ties to the number of requests, the first length, the weight and the pace are
    tuned."""
    every = (tuple(range(train.depth + 1)), 0.0)
    sets = {(tuple(k for k in steps if k <= train.depth), slack) for steps, slack in (*SGLANG_STEPS, every)}
    starts = [(steps, at, slack) for steps, slack in sorted(sets) for at in range(len(steps))]
    first = fastest(train, [Adaptive(*start, SGLANG_WEIGHT, *SGLANG_PACE) for start in starts])
    paces = [{"warm_up": warm_up, "interval": interval} for warm_up, interval in (SGLANG_PACE, (0, 5), (0, 1))]
    moves = [paces, grid(weight=(0.05, 0.1, 0.2, 0.4)), grid(start=range(len(first.candidates)))]
    return climbed(train, first, moves)


@dataclass(frozen=True)
class Estimated(Sequential):
    """Acceptance rates estimated online: the length with the most expected tokens per second.

    A moving average for each depth follows vLLM's pull requests 44336 and 47111, which were not merged when they were
    read. SmartSpec and TurboSpec (arXiv 2406.14066) have one rate. vLLM's own estimator (acceptance_estimator.py at
    165b366) reads the drafter's logits, which no log has.
    """

    rates: tuple[float, ...]  # at the start, by depth, of tokens all of whose predecessors were accepted
    weight: float  # of the newest step in the rates
    probe: int  # every `probe`-th step drafts one token more, where they explore at random; 0: never

    def actions(self, texts: RivalTexts) -> Tensor:
        known = texts.accepted_RK[:, 0], texts.size_X, texts.seconds_RA
        return torch.from_numpy(_estimated(*known, np.array(self.rates), self.weight, self.probe))


def vllm_estimator(train: RivalTexts) -> Estimated:
    """The rates begin at those of the training texts. Weight and probing are tuned."""
    reached_D = np.array([(train.accepted_RK[:, 0] >= d).mean() for d in range(train.depth + 1)])
    rates = tuple((reached_D[1:] / np.maximum(reached_D[:-1], 1e-9)).tolist())
    tried = product((0.01, 0.02, 0.05, 0.1, 0.2, 0.4), (0, 5, 10, 20))
    return fastest(train, [Estimated(rates, weight, probe) for weight, probe in tried])


@dataclass(frozen=True)
class Bandit(Sequential):
    """BanditSpec (arXiv 2505.15141): UCB1 over fixed lengths. The reward is a step's tokens per second, as a share of
    the largest possible value."""

    arms: tuple[int, ...]  # the lengths
    weight: float  # of the exploration

    def actions(self, texts: RivalTexts) -> Tensor:
        known = texts.accepted_RK[:, 0], texts.size_X, texts.seconds_RA
        return torch.from_numpy(_bandit(*known, np.array(self.arms), self.weight))


def bandit(train: RivalTexts) -> Bandit:
    """Lengths and weight are tuned; BanditSpec's lengths and UCB1's weight are among the candidates."""
    sets = (BANDIT_ARMS, range(5), range(0, 9, 2), (2, 4), (2, 3, 4, 5, 6), (3, 6, 9))
    arms = dict.fromkeys(tuple(k for k in own if k <= train.depth) for own in sets)
    tried = product(arms, (BANDIT_WEIGHT, 0.5, 0.1, 0.02))
    return fastest(train, [Bandit(own, weight) for own, weight in tried if own])


@jit
def _adaptive(
    accepted_R: Array,
    size_X: Array,
    candidates_C: Array,
    start: int,
    slack: float,
    weight: float,
    pace: tuple[int, int],
) -> Array:
    """`Adaptive`: the length at each root where a step begins, int64 [R]."""
    drafted_R = np.zeros(len(accepted_R), np.int64)
    end = 0
    for x in range(len(size_X)):
        n, end = end, end + size_X[x]
        at, mean, steps = start, candidates_C[start] - 1.0, 0
        while n < end:
            drafted = candidates_C[at]
            accepted = min(drafted, accepted_R[n])
            drafted_R[n] = drafted
            n += 1 + accepted
            steps += 1
            if drafted > 0:
                mean += weight * (accepted - mean)
            if steps > pace[0] and (steps - pace[0]) % pace[1] == 0:
                at, mean = _moved(candidates_C, at, mean, slack)
    return drafted_R


@jit
def _moved(candidates_C: Array, at: int, mean: float, slack: float) -> tuple[int, float]:
    """The next candidate's position, and the average that belongs to it."""
    last, before = len(candidates_C) - 1, at
    if candidates_C[at] == 0:  # the average says nothing where nothing was drafted
        at = min(at + 1, last)
        return at, (candidates_C[at] - 1.0 if mean < 0 and candidates_C[at] > 0 else mean)
    while at > 0 and mean <= max(candidates_C[at - 1] - 0.5, 0.5) + slack:
        at -= 1
    while at >= before and at < last and mean > candidates_C[at] - 0.5:
        at += 1
    return at, mean


@jit
def _estimated(accepted_R: Array, size_X: Array, seconds_RA: Array, rates_D: Array, weight: float, probe: int) -> Array:
    """`Estimated`: the length at each root where a step begins, int64 [R]."""
    drafted_R = np.zeros(len(accepted_R), np.int64)
    end, depth = 0, len(rates_D)
    for x in range(len(size_X)):
        n, end = end, end + size_X[x]
        own_D, steps = rates_D.copy(), 0
        while n < end:
            steps += 1
            tokens, reached, drafted, most = 1.0, 1.0, 0, 1.0 / seconds_RA[n, 0]
            for k in range(1, depth + 1):
                reached *= own_D[k - 1]
                tokens += reached
                if tokens / seconds_RA[n, k] > most:
                    drafted, most = k, tokens / seconds_RA[n, k]
            if probe > 0 and steps % probe == 0:
                drafted = min(drafted + 1, depth)
            accepted = min(drafted, accepted_R[n])
            for d in range(min(accepted + 1, drafted)):
                own_D[d] += weight * ((1.0 if d < accepted else 0.0) - own_D[d])
            drafted_R[n] = drafted
            n += 1 + accepted
    return drafted_R


@jit
def _bandit(accepted_R: Array, size_X: Array, seconds_RA: Array, arms_C: Array, weight: float) -> Array:
    """`Bandit`: the length at each root where a step begins, int64 [R]."""
    drafted_R = np.zeros(len(accepted_R), np.int64)
    end = 0
    for x in range(len(size_X)):
        n, end = end, end + size_X[x]
        rewards_C, times_C, steps = np.zeros(len(arms_C)), np.zeros(len(arms_C)), 0
        while n < end:
            chosen, best, most = 0, -1.0, 0.0
            for c in range(len(arms_C)):
                most = max(most, (arms_C[c] + 1) / seconds_RA[n, arms_C[c]])
                score = np.inf
                if times_C[c] > 0:
                    score = rewards_C[c] / times_C[c] + np.sqrt(weight * np.log(steps) / times_C[c])
                if score > best:
                    chosen, best = c, score
            drafted = arms_C[chosen]
            accepted = min(drafted, accepted_R[n])
            rewards_C[chosen] += (accepted + 1) / seconds_RA[n, drafted] / most
            times_C[chosen] += 1
            steps += 1
            drafted_R[n] = drafted
            n += 1 + accepted
    return drafted_R
