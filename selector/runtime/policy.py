"""A selector bound to one setting: the static tree, the lookup rule or the network decides.

Legend: B requests, A actions, K those that may be chosen, F scalars, L context lengths.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from selector.actions import Action
from selector.decision import NETWORK, NEVER, STATIC, Setting, choices, worth
from selector.files import Array
from selector.latency import LatencyProfile, StepTimes
from selector.runtime.artefact import Features, checked
from selector.runtime.joint import Shapes, joint_choice
from selector.runtime.network import Network
from selector.sampling import Sampling
from selector.schema import MATCH, SCALARS_KEY, InputError


class Loaded:
    """What decisions need of an artefact: its network, and a machine's step times.

    Attributes:
        actions: the action table, which all scores follow.
        latency: the profile that the decisions are based on.
        widths: of the features, by name.
    """

    def __init__(self, network: Network, latency: LatencyProfile) -> None:
        config = network.config
        self.network = network
        self.latency = latency
        self.config = config
        self.space = config.space
        self.schema = config.schema
        self.verifier = config.verifier
        self.actions = config.space.actions
        self.has_logits = not config.regressor
        self.widths = {SCALARS_KEY: len(config.schema.scalars), **config.hidden_states}


class Policy:
    """A selector bound to one setting, for one root or several; a lookup rule or a static
    tree needs no selector.

    Call `select` with the features of each of `feature_levels` in turn until it returns an action.
    On texts of more than `longest` tokens, if it is not 0, a network's setting needs the match
    alone.
    """

    def __init__(self, setting: Setting, selector: Loaded | None = None) -> None:
        if setting.decider == NETWORK and selector is None:
            raise InputError("a network's decisions need its selector")
        self.setting = setting
        self.feature_levels = setting.asked
        self.longest = setting.longest
        self._selector = selector
        self._tables: dict[bool, tuple[list[float], Array]] = {}
        self._covers = lru_cache(self._covers_sampling)
        self._copied = lru_cache(4096)(self._after_match)

    def select(self, features: Features | None) -> Action | None:
        """The action at a root; the static tree without features; None where the features of the
        next one of `feature_levels` are needed, which are known after the draft's forward pass over
        the root.

        Outside the text lengths and the sampling of the training, the lookup rule and the
        static tree decide; outside the sampling a warning says so, once. Raises InputError where a
        feature is missing, of another shape or dtype, or not finite.
        """
        setting = self.setting
        if features is None or self.setting.decider == STATIC:
            return setting.action
        if self._asks_match_alone(features):
            return self._copied(float(features[MATCH]))
        read = self._read(features)
        if self._is_beyond(read):
            return setting.copied(self._scalar(read, MATCH))
        loaded = self._loaded
        early = self._is_early(read)
        positions_K, network = self._allowed
        predicted = self._predicted(read, early, positions_K, network)
        best = choices(*predicted, positions_K, setting, loaded.has_logits)
        action = loaded.actions[best]
        if early and len(setting.feature_levels) > 1 and action.drafts:
            return None
        return action

    def scores(self, features: Features) -> NDArray[np.float32]:
        """What each action is worth at one root, [A]: as `Selector.scores`. Raises InputError as
        `select`."""
        loaded = self._loaded
        read = self._read(features)
        positions_K, network = self._allowed
        if self._is_beyond(read):
            action = self.setting.copied(self._scalar(read, MATCH))
            positions_K = np.array([loaded.space.index(action)])
            network = loaded.network.at(positions_K)
        predicted = self._predicted(read, self._is_early(read), positions_K, network)
        scores_A = np.full(len(loaded.space), NEVER, np.float32)
        scores_A[positions_K] = worth(*predicted, self.setting, loaded.has_logits)
        return scores_A

    def select_jointly(self, features: Features | Sequence[Features]) -> list[Action]:
        """The choices of requests that share draft passes, from the features of all, [B, F], or of
        each; InputError as `select`."""
        if not features:
            return []
        if not isinstance(features, dict):
            features = self._stacked(features)
        if not self.setting.joint:
            first_size, *other_sizes = map(len, features.values())
            if any(size != first_size for size in other_sizes):
                raise InputError("features: batches of different sizes")
            if self._asks_match_alone(features):
                return [self._copied(match) for match in features[MATCH].tolist()]
            actions = []
            for b in range(first_size):
                action = self.select({name: values[b] for name, values in features.items()})
                if action is not None:
                    actions.append(action)
            return actions
        loaded = self._loaded
        read = checked(features, loaded.widths, 2, loaded.schema.first)
        scalars_BF = read[SCALARS_KEY]
        positions_K, network = self._allowed
        tokens_BK = network.predictions(read, self._is_early(read)).astype(np.float64)
        mean_length = float(scalars_BF[:, loaded.schema.index("context_length")].mean())
        shapes, times = self._shared
        prices = times.prices(mean_length, self.setting.batch)
        chosen_B = joint_choice(tokens_BK, shapes, self.setting.joint, *prices)
        return [loaded.actions[a] for a in positions_K[chosen_B]]

    def _asks_match_alone(self, features: Features) -> bool:
        return MATCH in features and (self.setting.rule is not None or self.longest > 0)

    def _after_match(self, match: float) -> Action:
        if not math.isfinite(match):
            raise InputError("features: match is not finite")
        return self.setting.copied(match)

    def _stacked(self, features: Sequence[Features]) -> Features:
        try:
            return {name: torch.stack([root[name] for root in features]) for name in features[0]}
        except (KeyError, TypeError, RuntimeError) as error:
            for root in features:
                self._read(root)  # the one that is wrong says so
            raise InputError("features: requests of one batch know different ones") from error

    @property
    def _loaded(self) -> Loaded:
        if self._selector is None:
            raise InputError("features: match is missing")
        return self._selector

    @cached_property
    def _allowed(self) -> tuple[Array, Network]:
        # positions of the actions that may be chosen, [K], and their network
        positions_K = self.setting.positions(self._loaded.space)
        return positions_K, self._loaded.network.at(positions_K)

    @cached_property
    def _shared(self) -> tuple[Shapes, StepTimes]:
        loaded = self._loaded
        shapes = Shapes.of([loaded.actions[a] for a in self._allowed[0]])
        return shapes, loaded.latency.step_times(self.setting.batch)

    def _read(self, features: Features) -> Features:
        return checked(features, self._loaded.widths, 1, self._loaded.schema.first)

    def _scalar(self, read: Features, name: str) -> float:
        # by NumPy, as an item of a tensor takes several times as long
        return float(read[SCALARS_KEY].numpy()[self._loaded.schema.index(name)])

    def _is_early(self, read: Features) -> bool:
        """Whether the network sees the scalars of the schema's first level alone."""
        return read[SCALARS_KEY].shape[-1] == self._loaded.schema.first or not self.setting.sees_all

    def _predicted(
        self, read: Features, early: bool, positions_K: Array, network: Network
    ) -> tuple[Array, Array]:
        # what the network predicts of its actions at a root, and seconds of a step there, [K] each
        if early not in self._tables:
            self._tables[early] = self._table(early)
        lengths, seconds_LA = self._tables[early]
        length = min(max(self._scalar(read, "context_length"), lengths[0]), lengths[-1])
        above = max(1, bisect_left(lengths, length))
        low_A, high_A = seconds_LA[above - 1 : above + 1]
        share = (length - lengths[above - 1]) / (lengths[above] - lengths[above - 1])
        seconds_A = low_A + share * (high_A - low_A)
        return network.predictions(read, early), seconds_A[positions_K]

    def _table(self, early: bool) -> tuple[list[float], Array]:
        loaded = self._loaded
        levels = self.feature_levels
        if early:
            levels = tuple(level for level in levels if level == loaded.schema.levels[0])
        times = loaded.latency.at_batch(self.setting.batch)
        lengths_L, seconds_LA = times.table(
            loaded.actions, loaded.verifier, levels, self.setting.sampling
        )
        return lengths_L.tolist(), seconds_LA.double().numpy()

    def _is_beyond(self, read: Features) -> bool:
        if self.setting.decider != NETWORK:
            return True
        if not self._covers(self._scalar(read, "temperature"), self._scalar(read, "top_p")):
            return True
        return 0 < self.longest < self._scalar(read, "context_length")

    def _covers_sampling(self, temperature: float, top_p: float) -> bool:
        asked = replace(self.setting.sampling, temperature=temperature, top_p=top_p)
        return covered(self.setting, asked, "features: ")


def covered(setting: Setting, asked: Sampling, where: str = "") -> bool:
    """Whether a setting was trained for a sampling like this one; a warning says, once, where it
    was not."""
    near = setting.sampling.covers(asked)
    if not near:
        words = f"{where}{asked}: too far from the trained {setting.sampling}"
        warn_once(f"{words}; its lookup rule and {setting.action} decide")
    return near


@cache
def warn_once(message: str) -> None:
    """A warning that a process gives once, whatever its filters are."""
    warnings.warn(message, stacklevel=3)
