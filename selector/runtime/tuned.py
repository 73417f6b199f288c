"""A loaded selector under one sampling setting: the decisions at one root, or at those of several requests.

Legend: A actions, K those that may be chosen, B requests.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from selector.actions import Action
from selector.decision import NETWORK, NEVER, STATIC, Mode
from selector.latency import LatencyProfile
from selector.runtime.artefact import ArtefactConfig, Features, checked
from selector.runtime.joint import Shapes, StepClock, joint_choice, step_clock
from selector.runtime.one_root import OneRoot
from selector.schema import MATCH, SCALARS_KEY, InputError


class Loaded(Protocol):
    """What decisions need of a `selector.runtime.selector.Selector`."""

    weights: Mapping[str, Any]
    config: ArtefactConfig
    latency: LatencyProfile
    widths: dict[str, int]  # of the features, by name


class Tuned:
    """A selector under one sampling setting, for one root at a time; a lookup rule or a static tree needs no selector.

    Call `select` with the features of each of `feature_levels` in turn until it returns an action. On texts of more
    than `longest` tokens, if it is not 0, a network's mode needs the match alone. Where only features of the schema's
    first level are given, `less` decides instead, if there is one.
    """

    def __init__(self, mode: Mode, selector: Loaded | None = None, less: Tuned | None = None) -> None:
        if mode.decider == NETWORK and selector is None:
            raise InputError("a network's decisions need its selector")
        self.mode, self.feature_levels, self.longest = mode, mode.asked, mode.longest
        self._selector, self._less, self._at_root = selector, less, dict[bool, OneRoot]()
        self._covers = lru_cache(self._covers_setting)

    def select(self, features: Features | None, final: bool = False) -> Action | None:
        """The decision at a root; the static tree without features.

        Beyond the lengths and the sampling settings of the training the lookup rule and the static tree decide; of the
        latter a warning tells, once.

        Args:
            features: of one of `feature_levels`, or of the schema's first level where more are not known.
            final: whether there will be no more features at this root.

        Returns:
            None where only features of the first level are given and the decision needs all of them, after the draft's
            root pass; never if `final`.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite.
        """
        mode = self.mode
        if features is None or mode.decider == STATIC:
            return mode.action
        if MATCH in features and (mode.rule is not None or mode.longest > 0):
            match = float(features[MATCH])
            if not math.isfinite(match):
                raise InputError("features: match is not finite")
            return mode.copied(match)
        if self._only_first(features):
            return self._less.select(features, final)  # type: ignore[union-attr]
        read = self._read(features)
        if self._is_beyond(read):
            return mode.copied(self._scalar(read, MATCH))
        at_root = self._root_of(read)
        action = self._actions[self._allowed_K[at_root.worth(read, self._allowed_K).argmax()]]
        again = at_root.early and len(mode.feature_levels) > 1 and not final
        return None if again and action.drafts else action

    def scores(self, features: Features) -> NDArray[np.float32]:
        """What each action is worth at one root, [A]: as `Selector.scores`. Raises InputError as `select`."""
        if self._only_first(features):
            return self._less.scores(features)  # type: ignore[union-attr]
        read, positions_K = self._read(features), self._allowed_K
        if self._is_beyond(read):
            positions_K = np.array([self._own.config.space.index(self.mode.copied(self._scalar(read, MATCH)))])
        scores_A = np.full(len(self._actions), NEVER, np.float32)
        scores_A[positions_K] = self._root_of(read).worth(read, positions_K)
        return scores_A

    def select_jointly(self, features: Sequence[Features]) -> list[Action]:
        """The choices of several requests that share their draft passes, from the features of each, as in `select`.

        Raises InputError as `select`.
        """
        if all(map(self._only_first, features)):
            return self._less.select_jointly(features)  # type: ignore[union-attr]
        if not self.mode.joint:
            return [choice for each in features if (choice := self.select(each)) is not None]
        (shapes, clock), read = self._shared, [self._read(each) for each in features]
        tokens_BA, length = self._predicted(read, np.arange(len(self._actions)))
        prices = clock.prices(length, self.mode.batch)
        chosen_B = joint_choice(tokens_BA.astype(np.float64), shapes, self.mode.joint, *prices)
        return [self._actions[a] for a in chosen_B]

    def select_common(self, features: Sequence[Features]) -> Action:
        """One choice for all requests of a batch, from the features of each: the best for the means of their predicted
        tokens and context lengths. It is for a network that decides from one level of features.

        Raises InputError as `select`.
        """
        if self.mode.decider != NETWORK:
            return self.mode.action
        read = [self._read(each) for each in features]
        tokens_BK, length = self._predicted(read, self._allowed_K)
        net_K = self._root_of(read[0]).net(tokens_BK.mean(0), length, self._allowed_K)
        return self._actions[self._allowed_K[net_K.argmax()]]

    def _predicted(self, read: Sequence[Features], actions_K: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """The predicted tokens of some actions for each request, [B, K], and the mean context length."""
        at_root = self._root_of(read[0])
        tokens_BK = np.stack([at_root.tokens(each, actions_K) for each in read])
        return tokens_BK, float(np.mean([at_root.length(each) for each in read]))

    @property
    def _own(self) -> Loaded:
        if self._selector is None:
            raise InputError("features: match is missing")
        return self._selector

    @cached_property
    def _actions(self) -> tuple[Action, ...]:
        return self._own.config.space.actions

    @cached_property
    def _allowed_K(self) -> NDArray[Any]:
        return np.array(self.mode.allowed or range(len(self._actions)))

    @cached_property
    def _shared(self) -> tuple[Shapes, StepClock]:
        return Shapes.of(self._actions), step_clock(self._own.latency, self.mode.batch)

    def _only_first(self, features: Features) -> bool:
        return self._less is not None and len(features.get(SCALARS_KEY, ())) == self._own.config.schema.first

    def _root_of(self, read: Features) -> OneRoot:
        """Of the features' level, or of the mode's if it is lower."""
        own = self._own
        early = len(read[SCALARS_KEY]) == own.config.schema.first or not self.mode.sees_all
        if early not in self._at_root:
            self._at_root[early] = OneRoot(own.weights, own.config, own.latency, self.mode, early)
        return self._at_root[early]

    def _read(self, features: Features) -> Features:
        return checked(features, self._own.widths, 1, self._own.config.schema.first)

    def _scalar(self, read: Features, name: str) -> float:
        return float(read[SCALARS_KEY][self._own.config.schema.index(name)])

    def _is_beyond(self, read: Features) -> bool:
        """Whether the lookup rule and the static tree decide at a root."""
        if self.mode.decider != NETWORK:
            return True
        covered = self._covers(self._scalar(read, "temperature"), self._scalar(read, "top_p"))
        return not covered or 0 < self.longest < self._scalar(read, "context_length")

    def _covers_setting(self, temperature: float, top_p: float) -> bool:
        asked = replace(self.mode.sampling, temperature=temperature, top_p=top_p)
        if not (covered := self.mode.sampling.covers(asked)):
            warn_far(f"features: {asked}", self.mode)
        return covered


def warn_far(asked: str, mode: Mode) -> None:
    """A warning that a setting is beyond what a mode was trained for."""
    warn_once(f"{asked}: too far from the trained {mode.sampling}; its lookup rule and {mode.action} decide")


@cache
def warn_once(message: str) -> None:
    """A warning that a process gives once, whatever its filters are."""
    warnings.warn(message, stacklevel=3)
