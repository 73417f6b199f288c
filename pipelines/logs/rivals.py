"""The rules of other projects on an engine's logs: when they copy, and how many tokens they have the drafter draft.

Each rule is tuned on training texts and replayed on others, exactly and on the selector's clock (`selector.replay`).
Constants that a project publishes stay; everything else is tuned for each clock, which is more than an engine does.
No rule is charged for its decisions. A copy is what followed the longest earlier match (`data_gen.lookup`), whichever
match the project itself would take.

Rules that learn from their own steps are walked through each text alone: at each root they know what their earlier
steps in that text had accepted, and nothing else. They need labels of 0 and 1, where it is certain how a step ends.

Where constants were read:

    SAM-Decoding    scripts/run_ablation_0.sh of hyx1999/SAM-Decoding at 5d42249, and samd/draft.py at 0be73fd
    TensorRT-LLM    `SAEnhancerConfig` in its API reference, 1.3.0rc27; sa_enhancer.py at 1a487b3
    ArcticInference docs/suffix-decoding.rst at 4eb0d8e, csrc/suffix_decoding/suffix_tree.cc at 0a11e6a, the comparison
                    with the drafter's length in arctic_inference/vllm/model_runner.py at 008df6b
    SGLang          python/sglang/srt/speculative/adaptive_spec_params.py at 015c872
    BanditSpec      generate_utils.py of sail-sg/BanditSpec at a30f56d

Legend: X texts, R roots, A actions, D depths, F features, C candidates, K kinds of drafts (chain, copy).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import ActionSpace
from selector.data import Timed
from selector.jit import jit
from selector.replay import Replayed, replay
from selector.schema import LOG, PRECEDENT_LENGTHS
from selector.tuning import LEASTS

Array = NDArray[Any]
Moves = Sequence[dict[str, float]]  # changes of a rule that are tried together
AnyRival = TypeVar("AnyRival", bound="Rival")

COPIES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20)  # copied tokens that are tried
HITS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, math.inf)  # shares of recent hits that are tried as thresholds
SAM_LEAST, SAM_COPIED = 5, 40  # SAM-Decoding: --samd_len_threshold, --samd_n_predicts
TENSORRT_LEAST = 4  # TensorRT-LLM: SAEnhancerConfig.threshold
ARCTIC_FACTOR, ARCTIC_SHARE = 1.0, 0.1  # ArcticInference: suffix_max_spec_factor, suffix_min_token_prob
SGLANG_WEIGHT, SGLANG_PACE = 0.2, (10, 5)  # SGLang: ema_alpha; warmup_batches and update_interval
SGLANG_STEPS = (  # SGLang: candidate_steps and down_hysteresis for 1, 8, 32 and 64 requests
    ((1, 3, 5, 7), -0.25),
    ((0, 1, 3), 0.0),
    ((0, 1), 0.0),
    ((0,), 0.0),
)
BANDIT_ARMS, BANDIT_WEIGHT = (1, 2, 3, 4), 2.0  # BanditSpec's lengths; UCB1's weight (BanditSpec's code has 6)
PAYOFFS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 14, math.inf)  # predicted accepted tokens, tried as thresholds
PAYOFF_SCALARS = (  # what a predicted payoff is linear in
    "match",
    "copied",
    "copied_mean_0.8",
    "copied_mean_0.95",
    "source_steady",
    "source_in_prompt",
    "source_foretold",
    "second_match",
    "second_agrees",
    *(f"{name}_{count}" for name in ("seen", "agree") for count in PRECEDENT_LENGTHS),
)


class Logged:
    """Labelled texts, and what rules are told of them.

    Args:
        timed: in a space of `ActionSpace.chains`, with the scalars of `schema.LOG`.
    """

    def __init__(self, timed: Timed) -> None:
        self.timed, self.depth, self.longest = timed, timed.space.depth, max(timed.space.lookups)
        assert timed.space == ActionSpace.chains(self.depth, self.longest)
        self._scalars: dict[str, Tensor] = {}
        self._payoffs: dict[tuple[float, ...], Tensor] = {}
        self._speeds: dict[Rival, float] = {}

    @cached_property
    def certain(self) -> bool:
        """Whether all labels are 0 or 1."""
        survivals_RS = self.timed.survivals_RS
        return bool(((survivals_RS == 0) | (survivals_RS == 1)).all())

    @cached_property
    def accepted_RK(self) -> Array:
        """How many tokens of the longest chain and of the longest copy would be accepted, int64 [R, 2]."""
        parts = self.timed.survivals_RS.split([self.depth, self.longest], dim=1)
        return torch.stack([part.sum(1) for part in parts], dim=1).long().numpy()

    @cached_property
    def seconds_RA(self) -> Array:
        """What a step with each action takes at each root, float32."""
        return self.timed.seconds().numpy()

    def payoff(self, weights: tuple[float, ...]) -> Tensor:
        """What is linear in `PAYOFF_SCALARS` at every root, float64 [R]."""
        if weights not in self._payoffs:
            self._payoffs[weights] = self.payoff_scalars_RF @ torch.tensor(weights, dtype=torch.float64)
        return self._payoffs[weights]

    @cached_property
    def payoff_scalars_RF(self) -> Tensor:
        """A 1 and `PAYOFF_SCALARS` of every root, float64."""
        ones_R = torch.ones_like(self.scalar("match"))
        return torch.stack([ones_R, *map(self.scalar, PAYOFF_SCALARS)], dim=1).double()

    @cached_property
    def suffix(self) -> tuple[Tensor, Tensor]:
        """`suffix_score`."""
        return suffix_score(self)

    @property
    def size_X(self) -> Array:
        return self.timed.texts.size_X.numpy()

    def scalar(self, name: str) -> Tensor:
        """One scalar of `schema.LOG` at every root, [R]."""
        if name not in self._scalars:
            self._scalars[name] = self.timed.texts.scalars_RF[:, LOG.names.index(name)].contiguous()
        return self._scalars[name]

    def copy(self, length: int) -> int:
        """The action that copies so many tokens, or as many as can be copied; a chain of k tokens is action k."""
        return self.depth + min(length, self.longest)

    def replayed(self, rule: Rival) -> Replayed:
        """What a rule takes for these texts."""
        action_R, texts = rule.actions(self), self.timed.texts
        seconds_R = self.timed.seconds_of(action_R)
        return replay(self.timed.survivals_RS, action_R, seconds_R, texts.size_X, self.timed.space)

    def speed(self, rule: Rival) -> float:
        """Tokens per second of `replayed`, remembered. Where labels are certain, one walk along its steps suffices."""
        if rule not in self._speeds:
            if self.certain:
                action_R = rule.actions(self).numpy()
                seconds = _seconds(action_R, self.accepted_RK, self.seconds_RA, self.size_X, self.depth)
                self._speeds[rule] = len(action_R) / seconds
            else:
                self._speeds[rule] = self.replayed(rule).speed
        return self._speeds[rule]


@jit
def _seconds(action_R: Array, accepted_RK: Array, seconds_RA: Array, size_X: Array, depth: int) -> float:
    """The time of a policy's steps where labels are certain."""
    seconds, end, n = 0.0, 0, 0
    for x in range(len(size_X)):
        n, end = end, end + size_X[x]
        while n < end:
            action = action_R[n]
            seconds += seconds_RA[n, action]
            if action > depth:
                n += 1 + min(action - depth, accepted_RK[n, 1])
            else:
                n += 1 + min(action, accepted_RK[n, 0])
    return seconds


@dataclass(frozen=True)
class Rival:
    """A rule with its numbers."""

    def actions(self, logged: Logged) -> Tensor:
        """Positions of what it drafts at every root, int64 [R]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Sequential(Rival):
    """A rule that learns from its own steps; at roots where none of its steps begins its actions mean nothing."""


@dataclass(frozen=True)
class Copying(Rival):
    """Copy from a match of some length on, else have the drafter draft; two lengths of either, where they differ.

    Attributes:
        drafted: tokens of the drafter.
        least, copied: tokens of a match from which on so many tokens are copied.
        longer, far: the same of a longer match.
        hits, steady: the drafter drafts `steady` tokens where the share of its recent hits is above `hits`.
    """

    drafted: int
    least: int
    copied: int
    longer: float = math.inf
    far: int = 1
    hits: float = math.inf
    steady: int = 0

    def actions(self, logged: Logged) -> Tensor:
        match_R, hits_R = (logged.scalar(name).numpy() for name in ("match", "hit_mean_0.8"))
        actions = self.drafted, self.steady, logged.copy(self.copied), logged.copy(self.far)
        return torch.from_numpy(_copying(match_R, hits_R, actions, (self.hits, float(self.least), float(self.longer))))


@dataclass(frozen=True)
class Scored(Rival):
    """Copy where the score of the copy is at least the drafter's length (`arctic_inference`)."""

    drafted: int

    def actions(self, logged: Logged) -> Tensor:
        score_R, length_R = logged.suffix
        copies_R = (score_R >= self.drafted) & (length_R > 0)
        return torch.where(copies_R, logged.depth + length_R, self.drafted)


@dataclass(frozen=True)
class Payoff(Rival):
    """Copy where the predicted accepted length of the copy reaches a threshold (`hybrid_verified_decoding`).

    Attributes:
        weights: of a 1 and of `PAYOFF_SCALARS`.
        least: the threshold, in tokens.
    """

    weights: tuple[float, ...]
    drafted: int
    least: float
    copied: int

    def actions(self, logged: Logged) -> Tensor:
        copies_R = (logged.payoff(self.weights) >= self.least) & (logged.scalar("match") > 0)
        return torch.where(copies_R, logged.copy(self.copied), self.drafted)


@dataclass(frozen=True)
class Adaptive(Sequential):
    """A moving average of accepted lengths moves the drafter's length among candidates (`sglang_adaptive`).

    Attributes:
        candidates: ascending.
        start: position of the first one.
        slack: added to the average at which the length goes down.
        weight: of the newest step in the average.
        warm_up, interval: steps before the first move, and between moves.
    """

    candidates: tuple[int, ...]
    start: int
    slack: float
    weight: float
    warm_up: int
    interval: int

    def actions(self, logged: Logged) -> Tensor:
        candidates_C, accepted_R = np.array(self.candidates), logged.accepted_RK[:, 0]
        pace = (self.warm_up, self.interval)
        drafted_R = _adaptive(accepted_R, logged.size_X, candidates_C, self.start, self.slack, self.weight, pace)
        return torch.from_numpy(drafted_R)


@dataclass(frozen=True)
class Estimated(Sequential):
    """The length with the most expected tokens per second, by acceptance rates of its own steps (`vllm_estimator`).

    Attributes:
        rates: at the start, by depth, of tokens all of whose predecessors were accepted.
        weight: of the newest step in them.
        probe: every so many steps one token more is drafted; 0 for never.
    """

    rates: tuple[float, ...]
    weight: float
    probe: int

    def actions(self, logged: Logged) -> Tensor:
        accepted_R, rates_D = logged.accepted_RK[:, 0], np.array(self.rates)
        drafted_R = _estimated(accepted_R, logged.size_X, logged.seconds_RA, rates_D, self.weight, self.probe)
        return torch.from_numpy(drafted_R)


@dataclass(frozen=True)
class Bandit(Sequential):
    """UCB1 over fixed lengths (`bandit`).

    Attributes:
        arms: the lengths.
        weight: of the exploration.
    """

    arms: tuple[int, ...]
    weight: float

    def actions(self, logged: Logged) -> Tensor:
        accepted_R, arms_C = logged.accepted_RK[:, 0], np.array(self.arms)
        return torch.from_numpy(_bandit(accepted_R, logged.size_X, logged.seconds_RA, arms_C, self.weight))


def rivals(train: Timed, test: Timed) -> dict[str, Replayed]:
    """Every rule, tuned on training texts and replayed on held-out ones, by where it comes from.

    Rules that learn from their own steps are left out unless all labels of both are 0 or 1.
    """
    known, held_out = Logged(train), Logged(test)
    found = tuned_rivals(known)
    kept = {name: rule for name, rule in found.items() if held_out.certain or not isinstance(rule, Sequential)}
    return {name: held_out.replayed(rule) for name, rule in kept.items()}


def tuned_rivals(train: Logged) -> dict[str, Rival]:
    """Every rule with the numbers that are the fastest on some texts."""
    sam, tensorrt = sam_decoding(train), tensorrt_llm(train)
    n_gram = n_gram_first(train, [sam, tensorrt])
    found: dict[str, Rival] = {
        "n-gram first": n_gram,
        "SAM-Decoding": sam,
        "TensorRT-LLM suffix automaton": tensorrt,
        "the rule at its best": best_rule(train, n_gram),
        "ArcticInference": arctic_inference(train),
        "HVD": hybrid_verified_decoding(train),
    }
    if train.certain:
        found["SGLang adaptive"] = sglang_adaptive(train)
        found["vLLM acceptance estimator"] = vllm_estimator(train)
        found["bandit"] = bandit(train)
    return found


def fastest(train: Logged, rules: Iterable[AnyRival]) -> AnyRival:
    """The first of the fastest rules."""
    return max(rules, key=train.speed)


def climbed(train: Logged, start: AnyRival, moves: Sequence[Moves]) -> AnyRival:
    """The fastest rule that changing some of its numbers at a time leads to; never slower than the start."""
    best, before = start, None
    while best != before:
        before = best
        for changes in moves:
            best = fastest(train, [best, *(replace(best, **change) for change in changes)])
    return best


def one(name: str, values: Iterable[float]) -> Moves:
    """Changes of one number."""
    return [{name: value} for value in values]


def two(first: str, second: str, values: Iterable[tuple[float, float]]) -> Moves:
    """Changes of two numbers together."""
    return [{first: a, second: b} for a, b in values]


def copies(train: Logged) -> list[int]:
    """Lengths of copies that are tried."""
    return sorted({min(length, train.longest) for length in COPIES} | {train.longest})


def sam_decoding(train: Logged) -> Copying:
    """SAM-Decoding (arXiv 2411.10666): copy from a match of 5 tokens on, else draft.

    It copies 40 tokens; here as many of them as the log's lookups have. It has automata of the text and of a corpus, of
    which only the first can be had from a log. The drafter's length is tuned.
    """
    return fastest(train, [Copying(k, SAM_LEAST, SAM_COPIED) for k in range(train.depth + 1)])


def tensorrt_llm(train: Logged) -> Copying:
    """TensorRT-LLM's suffix automaton beside a drafter (`sa_config`): copy from a match of 4 tokens on, else draft.

    It copies as many tokens as the drafter drafts; that length is tuned. There the drafter runs all the same; here a
    copy is charged no pass of it.
    """
    lengths = range(min(train.depth, 1), train.depth + 1)
    return fastest(train, [Copying(k, TENSORRT_LEAST, max(k, 1)) for k in lengths])


def n_gram_first(train: Logged, starts: Sequence[Copying]) -> Copying:
    """Prompt lookup beside a drafter: copy wherever the last n tokens stood before, else draft. All lengths are tuned.

    Copying like that is the practice of vLLM (`ngram`) and of Hugging Face (`prompt_lookup_num_tokens`).

    Args:
        starts: settings of this rule to begin with; the result is as fast as any of them.
    """
    together = two("least", "copied", product(LEASTS, range(1, train.longest + 1)))
    return climbed(train, fastest(train, starts), [together, one("drafted", range(train.depth + 1))])


def best_rule(train: Logged, start: Copying) -> Copying:
    """Our own best attempt at a rule of thumb, from the practice of all of these: two lengths of copies by two lengths
    of the match, and two lengths of the drafter by its recent hits. All numbers are tuned.

    Args:
        start: what it begins with; the result is as fast.
    """
    lengths, drafted = copies(train), range(train.depth + 1)
    moves = [
        two("copied", "longer", product(lengths, LEASTS)),
        two("least", "copied", product(LEASTS, lengths)),
        two("longer", "far", product(LEASTS, lengths)),
        two("hits", "steady", product(HITS, drafted)),
        two("drafted", "hits", product(drafted, HITS)),
    ]
    return climbed(train, replace(start, far=start.copied, steady=start.drafted), moves)


def arctic_inference(train: Logged) -> Scored:
    """ArcticInference's suffix decoding beside a drafter: copy where the copy's score, an estimate of its accepted
    tokens, is at least the drafter's length. That length is tuned; the score is `suffix_score`.

    It also looks into earlier requests' texts, and a log's texts stand alone.
    """
    return fastest(train, [Scored(k) for k in range(train.depth + 1)])


def suffix_score(logged: Logged) -> tuple[Tensor, Tensor]:
    """ArcticInference's score of a copy and the copy's length, [R] each, approximately.

    There the score is the sum of the copied tokens' probabilities: of each the product, along the copy, of the shares
    with which the text went on like that after the match. A copy has at most `suffix_max_spec_factor` tokens for each
    one of the match, and none of a probability below `suffix_min_token_prob`.

    Here the share is known for the first token and the last 1 to 4 tokens of the match (`agree_k`). Every further token
    is given the same share as the first one. A match that stood only once before has the share 1, as it has there. Only
    the longest match counts, where they try shorter ones too.
    """
    match_R = logged.scalar("match").double()
    share_R = torch.zeros_like(match_R)
    for count in PRECEDENT_LENGTHS:
        share_R = torch.where(match_R >= count, logged.scalar(f"agree_{count}").double(), share_R)
    share_R = share_R.masked_fill((match_R > 0) & (logged.scalar("second_match") < match_R), 1.0)
    below_R = share_R.clamp(1e-9, 1 - 1e-9)
    likely_R = (math.log(ARCTIC_SHARE) / below_R.log() + 1e-9).floor()
    length_R = (ARCTIC_FACTOR * match_R).floor().clamp(max=logged.longest).minimum(likely_R)
    score_R = torch.where(share_R < 1, below_R * (1 - below_R**length_R) / (1 - below_R), length_R)
    return score_R, length_R.long()


def hybrid_verified_decoding(train: Logged) -> Payoff:
    """Hybrid Verified Decoding (HVD, arXiv 2606.01019): predict a copy's accepted length, and copy where it is large.

    It follows the idea of that paper's abstract, not its predictor: here the accepted length is linear in scalars of
    the match, by least squares over the training roots that have one. Threshold and both lengths are tuned.
    """
    has_R = train.scalar("match") > 0
    own_RF = train.payoff_scalars_RF[has_R]
    accepted_R = train.timed.survivals_RS[has_R, train.depth :].sum(1).double()
    ridge_FF = 1e-6 * max(len(own_RF), 1) * torch.eye(own_RF.shape[1], dtype=torch.float64)
    weights_F = torch.linalg.solve(own_RF.T @ own_RF + ridge_FF, own_RF.T @ accepted_R)
    drafted = one("drafted", range(train.depth + 1))
    start = Payoff(tuple(weights_F.tolist()), 0, math.inf, train.longest)
    return climbed(train, start, [drafted, two("least", "copied", product(PAYOFFS, copies(train)))])


def sglang_adaptive(train: Logged) -> Adaptive:
    """SGLang's adaptive speculative decoding (`adaptive_spec_params.py`): the drafter's length follows a moving average
    of accepted lengths, among candidates.

    Its sets of candidates go with numbers of requests; here the best one is found for each clock, together with the
    first length, the weight and the pace. It averages over all requests of a batch and goes on from one to the next;
    here each text has its own average, from its beginning on.
    """
    every = (tuple(range(train.depth + 1)), 0.0)
    sets = {(tuple(k for k in steps if k <= train.depth), slack) for steps, slack in (*SGLANG_STEPS, every)}
    starts = [(steps, at, slack) for steps, slack in sorted(sets) for at in range(len(steps))]
    first = fastest(train, [Adaptive(*start, SGLANG_WEIGHT, *SGLANG_PACE) for start in starts])
    moves = [two("warm_up", "interval", [SGLANG_PACE, (0, 5), (0, 1)]), one("weight", (0.05, 0.1, 0.2, 0.4))]
    return climbed(train, first, [*moves, one("start", range(len(first.candidates)))])


def vllm_estimator(train: Logged) -> Estimated:
    """Acceptance rates estimated online, as proposed for vLLM: the length with the most expected tokens per second.

    SmartSpec and TurboSpec (arXiv 2406.14066) have one rate. vLLM's pull requests 44336 and 47111, not merged when they
    were read, have a moving average for each depth, and so has this. The rates begin at those of the training texts.
    Weight and probing are tuned: one token more, now and then, stands for the pull requests' random exploration. vLLM's
    own estimator (acceptance_estimator.py at 165b366) reads the drafter's logits, which no log has.
    """
    reached_D = np.array([(train.accepted_RK[:, 0] >= d).mean() for d in range(train.depth + 1)])
    rates = tuple((reached_D[1:] / np.maximum(reached_D[:-1], 1e-9)).tolist())
    tried = product((0.01, 0.02, 0.05, 0.1, 0.2, 0.4), (0, 5, 10, 20))
    return fastest(train, [Estimated(rates, weight, probe) for weight, probe in tried])


def bandit(train: Logged) -> Bandit:
    """BanditSpec (arXiv 2505.15141): UCB1 over fixed lengths, within each text.

    TapOut (arXiv 2511.02017) chooses among strategies for when to stop drafting in the same way. The reward is a step's
    tokens per second, as a share of the most that it could have been. Lengths and the weight of exploration are tuned;
    BanditSpec's lengths and UCB1's weight are among them.
    """
    sets = (BANDIT_ARMS, range(5), range(0, 9, 2), (2, 4), (2, 3, 4, 5, 6), (3, 6, 9))
    arms = dict.fromkeys(tuple(k for k in own if k <= train.depth) for own in sets)
    tried = product(arms, (BANDIT_WEIGHT, 0.5, 0.1, 0.02))
    return fastest(train, [Bandit(own, weight) for own, weight in tried if own])


@jit
def _copying(
    match_R: Array, hits_R: Array, actions: tuple[int, int, int, int], least: tuple[float, float, float]
) -> Array:
    """`Copying`: the action at every root, int64 [R]; torch takes ten times as long.

    Args:
        actions: to draft, to draft after hits, to copy, to copy after a longer match.
        least: hits, match and longer match from which the last three are taken.
    """
    action_R = np.zeros(len(match_R), np.int64)
    for r in range(len(match_R)):
        action = actions[1] if hits_R[r] > least[0] else actions[0]
        action = actions[2] if match_R[r] >= least[1] else action
        action_R[r] = actions[3] if match_R[r] >= least[2] else action
    return action_R


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
    """The next candidate's position, and the average that goes on with it.

    From no drafting it goes up by one. Else it goes down as long as the average is at most the next smaller length less
    half a token; where it does not go down, it goes up as long as the average exceeds its length less half a token.
    """
    last, before = len(candidates_C) - 1, at
    if candidates_C[at] == 0:
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
