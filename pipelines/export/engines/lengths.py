"""The best chain for every batch size, by replay of labelled texts on an engine's step times.

All requests of a batch draft chains of one length, and a step takes as long as the engine says for that batch and
length, whatever is accepted. So with b requests and chains of L tokens

    tokens per second = b E[tokens | L] / T(b, L),

and both follow from replay: where the steps of a chain begin in a text does not depend on how long they take.

Legend: X texts, L lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from selector.actions import ActionSpace
from selector.latency import LatencyProfile
from selector.train.data import Texts, Timed
from selector.train.replay import Ratio, Replayed, ratio_of_speeds, replay_static
from selector.train.tuning import sources

SPACE = ActionSpace(1, ActionSpace.default().max_L1, ActionSpace.default().max_L2)  # chains: action L drafts L tokens


@dataclass(frozen=True)
class Choice:
    """The best length for one batch size.

    Attributes:
        tokens_per_second: of all requests together.
        gains: speed over the engine's defaults, by their names; without those whose length was not timed.
    """

    batch: int
    length: int
    tokens_per_step: float
    tokens_per_second: float
    gains: dict[str, Ratio]


Defaults = Mapping[str, Mapping[int, Sequence[int]]]  # by name: candidates by the smallest batch size that has them


def best_lengths(
    texts: Texts, verifier: str, profile: LatencyProfile, defaults: Defaults, usual: str, first_is_longest: bool = False
) -> list[Choice]:
    """For each batch size that was timed, ascending; of lengths that were timed.

    Args:
        texts: of one sampling setting.
        verifier: whose labels hold for the chains.
        defaults: what the engine drafts without a table; of several candidates the fastest counts.
        usual: whose labels hold for the defaults.
        first_is_longest: whether larger batches may not draft longer chains than the smallest one.
    """
    assert profile.batches is not None
    result: list[Choice] = []
    for batch, target in zip(profile.batches.sizes, profile.batches.target, strict=True):
        timed_to = target.sizes[-1] - 1
        own = profile.at_batch(batch)
        mine = Chains.of(texts, verifier, own, timed_to)
        other = mine if usual == verifier else Chains.of(texts, usual, own, timed_to)
        allowed = result[0].length + 1 if first_is_longest and result else len(mine.speeds)
        length = mine.best(range(min(allowed, len(mine.speeds))))
        chosen = mine.replayed(length)
        gains = {}
        for name, by_batch in defaults.items():
            candidates = by_batch[max(size for size in by_batch if size <= batch)]
            known = [each for each in candidates if each < len(other.speeds)]
            if known:
                gains[name] = ratio_of_speeds(chosen, other.replayed(other.best(known)), sources(texts))
        result.append(Choice(batch, length, chosen.block_efficiency, batch * chosen.speed, gains))
    return result


@dataclass(frozen=True)
class Chains:
    """Chains of 0, 1, 2, .. tokens on some texts: expected tokens, seconds and steps of a request, [X, L]."""

    tokens_XL: torch.Tensor
    seconds_XL: torch.Tensor
    steps_XL: torch.Tensor

    @classmethod
    def of(cls, texts: Texts, verifier: str, profile: LatencyProfile, longest: int) -> Chains:
        """Those of up to so many tokens, and of no more than there are labels for."""
        survivals_RS = texts.survivals[verifier][:, : SPACE.depth]  # a chain's come first
        timed = Timed(replace(texts, survivals={verifier: survivals_RS}), verifier, profile, SPACE)
        chains = range(min(longest, SPACE.depth) + 1)
        return cls(*replay_static(timed.survivals_RS, timed.seconds(), texts.size_X, SPACE, chains))

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of a request, by length."""
        return (self.tokens_XL.sum(0) / self.seconds_XL.sum(0)).tolist()

    def best(self, lengths: Sequence[int]) -> int:
        """The fastest of some lengths; the shortest of equally fast ones."""
        speeds = self.speeds
        return max(lengths, key=speeds.__getitem__)

    def replayed(self, length: int) -> Replayed:
        """One length; without visits."""
        tokens_X, seconds_X, steps_X = (each[:, length] for each in (self.tokens_XL, self.seconds_XL, self.steps_XL))
        return Replayed(tokens_X, seconds_X, steps_X, torch.zeros(0))
