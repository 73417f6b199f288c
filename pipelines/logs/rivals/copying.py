"""Rules that use a drafter and copy what followed an earlier match: when they copy, and how many tokens.

Legend: R roots, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pipelines.logs.rivals.rules import Array, Rival, RivalTexts, climbed, fastest, grid, remembered
from selector.jit import jit
from selector.schema import PRECEDENT_LENGTHS
from selector.train.tuning import LEASTS

COPIES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20)  # candidate lengths of copies
HITS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, math.inf)  # candidate thresholds for the share of recent hits
PAYOFFS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 14, math.inf)  # candidate thresholds, in predicted tokens
# SAM-Decoding at 5d42249, scripts/run_ablation_0.sh: --samd_len_threshold, --samd_n_predicts
SAM_LEAST, SAM_COPIED = 5, 40
TENSORRT_LEAST = 4  # TensorRT-LLM 1.3.0rc27, API reference: SAEnhancerConfig.threshold
# ArcticInference at 4eb0d8e, docs/suffix-decoding.rst: suffix_max_spec_factor, suffix_min_token_prob
ARCTIC_FACTOR, ARCTIC_SHARE = 1.0, 0.1
PAYOFF_SCALARS = (  # what a predicted payoff is linear in
    *("match", "copied", "copied_mean_0.8", "copied_mean_0.95", "source_steady", "source_in_prompt"),
    *("source_foretold", "second_match", "second_agrees"),
    *(f"{name}_{count}" for name in ("seen", "agree") for count in PRECEDENT_LENGTHS),
)


@dataclass(frozen=True)
class Copying(Rival):
    """Copy where the match has at least some length, else draft."""

    drafted: int
    least: int  # the match from which `copied` tokens are copied
    copied: int
    longer: float = math.inf  # the match from which `far` tokens are copied
    far: int = 1
    hits: float = math.inf  # the share of the drafter's recent hits above which `steady` tokens are drafted
    steady: int = 0

    def actions(self, texts: RivalTexts) -> Tensor:
        match_R, hits_R = (texts.scalar(name).numpy() for name in ("match", "hit_mean_0.8"))
        actions = self.drafted, self.steady, texts.copy(self.copied), texts.copy(self.far)
        return torch.from_numpy(_copying(match_R, hits_R, actions, (self.hits, float(self.least), float(self.longer))))


@dataclass(frozen=True)
class Scored(Rival):
    """Copy where the score of the copy is at least the drafter's length (`arctic_inference`)."""

    drafted: int

    def actions(self, texts: RivalTexts) -> Tensor:
        score_R, length_R = suffix_score(texts)
        copies_R = (score_R >= self.drafted) & (length_R > 0)
        return torch.where(copies_R, texts.depth + length_R, self.drafted)


@dataclass(frozen=True)
class Payoff(Rival):
    """Copy where the predicted accepted length of the copy reaches a threshold (`hybrid_verified_decoding`)."""

    weights: tuple[float, ...]  # of a constant 1 and of `PAYOFF_SCALARS`
    drafted: int
    least: float  # the threshold, in tokens
    copied: int

    def actions(self, texts: RivalTexts) -> Tensor:
        copies_R = (payoff(texts, self.weights) >= self.least) & (texts.scalar("match") > 0)
        return torch.where(copies_R, texts.copy(self.copied), self.drafted)


def sam_decoding(train: RivalTexts) -> Copying:
    """SAM-Decoding (arXiv 2411.10666; samd/draft.py at 0be73fd): copy 40 tokens, or as many as the log's lookups have,
    from a match of 5 tokens on, else draft. Its automaton of a corpus is left out. The drafter's length is tuned."""
    return fastest(train, [Copying(k, SAM_LEAST, SAM_COPIED) for k in range(train.depth + 1)])


def tensorrt_llm(train: RivalTexts) -> Copying:
    """TensorRT-LLM's suffix automaton beside a drafter (`sa_config`; sa_enhancer.py at 1a487b3): where the match has 4
    tokens or more, copy as many tokens as are drafted elsewhere; that length is tuned. Here a copy takes no pass of the
    drafter; there each step takes one."""
    lengths = range(min(train.depth, 1), train.depth + 1)
    return fastest(train, [Copying(k, TENSORRT_LEAST, max(k, 1)) for k in lengths])


def n_gram_first(train: RivalTexts, starts: Sequence[Copying]) -> Copying:
    """Prompt lookup beside a drafter, as in vLLM (`ngram`) and Hugging Face (`prompt_lookup_num_tokens`): copy wherever
    the last n tokens occurred before, else draft. All lengths are tuned, beginning with the fastest of `starts`."""
    together = grid(least=LEASTS, copied=range(1, train.longest + 1))
    return climbed(train, fastest(train, starts), [together, grid(drafted=range(train.depth + 1))])


def best_rule(train: RivalTexts, start: Copying) -> Copying:
    """Our own best rule of thumb: two lengths of copies by two lengths of the match, and two lengths of the drafter by
    its recent hits. All of them are tuned, beginning with `start`."""
    lengths, drafted = _copy_lengths(train), range(train.depth + 1)
    moves = [
        grid(copied=lengths, longer=LEASTS),
        grid(least=LEASTS, copied=lengths),
        grid(longer=LEASTS, far=lengths),
        grid(hits=HITS, steady=drafted),
        grid(drafted=drafted, hits=HITS),
    ]
    return climbed(train, replace(start, far=start.copied, steady=start.drafted), moves)


def _copy_lengths(train: RivalTexts) -> list[int]:
    return sorted({min(length, train.longest) for length in COPIES} | {train.longest})


def arctic_inference(train: RivalTexts) -> Scored:
    """ArcticInference's suffix decoding beside a drafter (arctic_inference/vllm/model_runner.py at 008df6b): copy where
    `suffix_score` is at least the drafter's length. That length is tuned. Earlier requests are not searched."""
    return fastest(train, [Scored(k) for k in range(train.depth + 1)])


@remembered
def suffix_score(texts: RivalTexts) -> tuple[Tensor, Tensor]:
    """ArcticInference's score of a copy and the copy's length, [R] each.

    There (csrc/suffix_decoding/suffix_tree.cc at 0a11e6a) the score is the sum of the copied tokens'
    probabilities. The probability of a token is the product, along the copy, of the shares with which the text
    continued in this way after the match. A copy has at most `suffix_max_spec_factor` tokens for each token of the
    match, and none with a probability below `suffix_min_token_prob`.

    This is approximate: `agree_k`, the share for the first token after the last 1 to 4 tokens of the match, is used for
    the further tokens, too. A match that occurred only once before has the share 1, as it has there. Only the longest
    match is tried; they also try shorter ones.
    """
    match_R = texts.scalar("match").double()
    share_R = torch.zeros_like(match_R)
    for count in PRECEDENT_LENGTHS:
        share_R = torch.where(match_R >= count, texts.scalar(f"agree_{count}").double(), share_R)
    share_R = share_R.masked_fill((match_R > 0) & (texts.scalar("second_match") < match_R), 1.0)
    below_R = share_R.clamp(1e-9, 1 - 1e-9)
    likely_R = (math.log(ARCTIC_SHARE) / below_R.log() + 1e-9).floor()
    length_R = (ARCTIC_FACTOR * match_R).floor().clamp(max=texts.longest).minimum(likely_R)
    score_R = torch.where(share_R < 1, below_R * (1 - below_R**length_R) / (1 - below_R), length_R)
    return score_R, length_R.long()


def hybrid_verified_decoding(train: RivalTexts) -> Payoff:
    """Hybrid Verified Decoding (HVD, arXiv 2606.01019): predict a copy's accepted length, and copy where it is large.

    This follows the idea of the abstract, not the paper's predictor: here the accepted length is linear in scalars of
    the match, fitted by least squares at the training roots with a match. The threshold and both lengths are tuned.
    """
    has_R = train.scalar("match") > 0
    own_RF = _payoff_scalars(train)[has_R]
    accepted_R = train.timed.survivals_RS[has_R, train.depth :].sum(1).double()
    ridge_FF = 1e-6 * max(len(own_RF), 1) * torch.eye(own_RF.shape[1], dtype=torch.float64)
    weights_F = torch.linalg.solve(own_RF.T @ own_RF + ridge_FF, own_RF.T @ accepted_R)
    start = Payoff(tuple(weights_F.tolist()), 0, math.inf, train.longest)
    together = grid(least=PAYOFFS, copied=_copy_lengths(train))
    return climbed(train, start, [grid(drafted=range(train.depth + 1)), together])


@remembered
def _payoff_scalars(texts: RivalTexts) -> Tensor:
    """A constant 1 and `PAYOFF_SCALARS` of every root, float64 [R, F]."""
    ones_R = torch.ones_like(texts.scalar("match"))
    return torch.stack([ones_R, *map(texts.scalar, PAYOFF_SCALARS)], dim=1).double()


@remembered
def payoff(texts: RivalTexts, weights: tuple[float, ...]) -> Tensor:
    """The predicted accepted length of a copy at every root, float64 [R]."""
    return _payoff_scalars(texts) @ torch.tensor(weights, dtype=torch.float64)


@jit
def _copying(
    match_R: Array, hits_R: Array, actions: tuple[int, int, int, int], least: tuple[float, float, float]
) -> Array:
    """`Copying`: the action at every root, int64 [R]; with torch this takes ten times as long. The first action is the
    default; the others are taken where hits, match and longer match reach `least`."""
    action_R = np.zeros(len(match_R), np.int64)
    for r in range(len(match_R)):
        action = actions[1] if hits_R[r] > least[0] else actions[0]
        action = actions[2] if match_R[r] >= least[1] else action
        action_R[r] = actions[3] if match_R[r] >= least[2] else action
    return action_R
