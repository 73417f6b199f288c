"""A loaded selector: it makes the decisions of an artefact directory and needs only torch and NumPy.

Legend: B roots or requests, A actions, K those that may be chosen, T trees, F scalars, D hidden width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.decision import NETWORK, NEVER, STATIC, Mode, nearest
from selector.files import read_tensors
from selector.latency import LatencyProfile
from selector.runtime.artefact import ArtefactConfig, Features, check_files, checked, local_folder, read_config
from selector.runtime.joint import Shapes, StepClock, joint_choice, step_clock
from selector.runtime.one_root import OneRoot
from selector.runtime.tokens import TokenStatistics
from selector.sampling import Sampling
from selector.schema import DRAFTER, LOG, MATCH, SCALARS_KEY, TEXT, InputError

ASKED_BY = ("temperature", "top_p", "batch")  # scalars that tell which mode decides


def checked_batch(batch: float) -> float:
    """InputError where it is no number of requests."""
    if not 1 <= batch < math.inf:
        raise InputError(f"batch {batch:g}: there is at least one request")
    return batch


class Selector:
    """A loaded selector.

    Attributes:
        actions: the action table; `scores` follows its order.
        feature_levels: the level of the features that `select` and `scores` take: `light`, `full` or `drafter`.
        fallback: the action for a root without features.
        latency: the profile that the decisions are based on.
        tokens: statistics by token, for the features of a log's selector.
        weights: of the network, arrays or tensors, by the names in `model.safetensors`.
        widths: of the features, by name.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        config: ArtefactConfig,
        latency: LatencyProfile,
        modes: Sequence[Mode],
        tokens: TokenStatistics | None = None,
    ) -> None:
        self.weights, self.config, self.latency, self.modes = weights, config, latency, list(modes)
        self.space, self.schema, self.verifier = config.space, config.schema, config.verifier
        self.actions, self.fallback = config.space.actions, config.fallback
        self.feature_levels: tuple[str, ...] = (config.feature_level,)
        self.tokens = tokens or TokenStatistics.empty()
        self.widths = {SCALARS_KEY: len(config.schema.scalars), **config.hidden_states}
        self._known: dict[tuple[float, float, float, str], Tuned] = {}

    def __repr__(self) -> str:
        pair, settings = self.config.pair, dict.fromkeys(str(mode.sampling) for mode in self.modes)
        return (
            f"Selector({pair['target']} / {pair['draft']}, {self.verifier}; a {self.config.objective} with "
            f"{self.config.feature_level} features, {len(self.actions)} actions; {'; '.join(settings)})"
        )

    def select(self, features: Features | None) -> Action:
        """The action for one root; `fallback` without features.

        Args:
            features: `{name: tensor}` as in the schema, float32 [F] and [D], or the scalars of its first level alone.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite, or a setting is out of range.

        The mode that is nearest to the features' sampling setting and number of requests decides, as `Tuned.select`.
        """
        if features is None:
            return self.fallback
        chosen = self._tuned_of(checked(features, self.widths, 1, self.schema.first)).select(features, final=True)
        assert chosen is not None
        return chosen

    def scores(self, features: Features) -> Tensor:
        """Scores of all actions, float32 [A], or [B, A] for a batch. The highest is chosen.

        Those of a regressor are `E - price T` in tokens. Actions that may not be chosen have `decision.NEVER`.
        Raises InputError as `select`.
        """
        read = checked(features, self.widths, 2, self.schema.first)
        if read[SCALARS_KEY].dim() == 1:
            return torch.from_numpy(self._tuned_of(read).scores(read))
        roots = [dict(zip(read, values, strict=True)) for values in zip(*read.values(), strict=True)]
        return torch.stack([self.scores(root) for root in roots])

    def _tuned_of(self, read: Features) -> Tuned:
        scalars_F = read[SCALARS_KEY].numpy()
        temperature, top_p, batch = (scalars_F[self.schema.index(name)].item() for name in ASKED_BY)
        level = self.schema.levels[int(len(scalars_F) > self.schema.first)] if self.schema == LOG else ""
        asked = temperature, top_p, batch, level
        if asked not in self._known:
            modes = [mode for mode in self.modes if mode.level == level]
            mode = nearest(modes or self.modes, Sampling(temperature, top_p), checked_batch(batch))
            self._known[asked] = Tuned(mode, self)
        return self._known[asked]

    def at(
        self,
        temperature: float,
        top_p: float = 1.0,
        shapes: Iterable[tuple[Any, ...]] | None = None,
        batch: int = 1,
        level: str | None = None,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> Tuned:
        """The selector under the mode that is nearest to a sampling setting and a number of requests.

        Where no mode covers the setting (`Sampling.covers`), the lookup rule and the static tree of the nearest one
        decide: they lose less there than a network outside of its training data. A warning says so, once for each
        setting.

        Args:
            shapes: the actions that an engine can draft, `(K, L1, L2)` or `(K, L1, L2, style)`; None for all.
            level: `text` or `drafter`, for a log's selector; None to use the level of the features that are given.

        Raises:
            InputError: the setting, the batch or the level is out of range, no tree is left, or a shape is not in the
                action space.
        """
        asked, less = Sampling(temperature, top_p, top_k, min_p), None
        if self.schema == LOG and level is None:
            shapes = None if shapes is None else list(shapes)
            less, level = self.at(temperature, top_p, shapes, batch, TEXT, top_k, min_p), DRAFTER
        modes = [mode for mode in self.modes if level is None or mode.level == level]
        if not modes:
            raise InputError(f"level {level}: this selector has none of that level")
        mode = nearest(modes, asked, checked_batch(batch))
        if not mode.sampling.covers(asked):
            warn_far(str(asked), mode)
            mode = mode.without_network()
        if shapes is not None:
            speed_T = self.config.static_speeds(mode, self.latency)
            mode = mode.restricted(self.space, _positions(self.space, shapes), speed_T)
        return Tuned(mode, self, less)

    def check_pair(self, target: str, draft: str, device: str = "", weights: Sequence[str] = ()) -> None:
        """Warn, once, where the models or the machine are not those that the selector was trained for.

        Args:
            target, draft: directories or hub ids of the models that decode. Of paths the last part is compared, and
                only where the weights are not known.
            device: as `LatencyProfile.device`, of which the part before the first comma is compared; "" if not known.
            weights: as `LatencyProfile.weights`, of the models that decode.
        """
        own, theirs = [str(self.config.pair.get(role)) for role in ("target", "draft")], [target, draft]
        if weights and self.latency.weights:
            same = list(weights) == self.latency.weights
            theirs = [f"{name} with other weights" if name in own else name for name in theirs]
        else:
            same = [Path(name).name for name in own] == [Path(name).name for name in theirs]
        if not same:
            warn_once(f"the selector was trained for {' and '.join(own)}; {' and '.join(theirs)} decode")
        timed_on, here = (name.partition(",")[0] for name in (self.latency.device, device))
        if here not in ("", timed_on):
            warn_once(f"the selector has the step times of {timed_on}; {here} decodes")


def _positions(space: ActionSpace, shapes: Iterable[tuple[Any, ...]]) -> set[int]:
    try:
        positions = {space.index(Action.of(shape)) for shape in shapes}
    except (ValueError, TypeError) as error:
        raise InputError(f"shapes: {error}") from error
    if not any(a < len(space.trees) for a in positions):
        raise InputError("shapes: no tree is left")
    return positions


def load_selector(folder: str | Path, latency: str | Path | LatencyProfile | None = None) -> Selector:
    """Reads an artefact directory.

    Args:
        folder: the directory, the id of a repository on the hub, or `models:/name/version` or `models:/name@alias` of
            MLflow's registry.
        latency: another machine's profile, whose step times, static trees and price of time are used; all actions are
            then allowed. None for the directory's own.

    Raises:
        InputError: a file is missing, damaged or of another schema version, the download fails, or the profile is of
            another pair or lacks the verifier.
    """
    folder = local_folder(folder)
    check_files(folder)
    config = read_config(folder / "config.json")
    own = profile = LatencyProfile.load(folder / "latency.json")
    if latency is not None:
        profile = latency if isinstance(latency, LatencyProfile) else LatencyProfile.load(Path(latency))
    if profile.pair != config.pair["fingerprint"]:
        raise InputError(f"{folder}: the latency profile was measured with another pair")
    modes = config.modes if profile == own else [_moved(config, mode, profile, own) for mode in config.modes]
    weights = read_tensors(folder / "model.safetensors")
    return Selector(weights, config, profile, modes, TokenStatistics.load(folder))


def _moved(config: ArtefactConfig, mode: Mode, latency: LatencyProfile, own: LatencyProfile) -> Mode:
    if config.verifier not in latency.verify:
        raise InputError(f"the latency profile of {latency.device} has no times for {config.verifier}")
    speed_T, before_T = config.static_speeds(mode, latency), config.static_speeds(mode, own)
    best = int(speed_T.argmax())
    speed = mode.speed * float(speed_T[best] / before_T[config.space.index(mode.action)])
    return replace(mode, action=config.space.trees[best], speed=speed, allowed=())


class Tuned:
    """A selector under one sampling setting, for one root at a time; a lookup rule or a static tree needs no selector.

    Call `select` with the features of each of `feature_levels` in turn until it returns an action. On texts of more
    than `longest` tokens, if it is not 0, a network's mode needs the match alone. Where only features of the schema's
    first level are given, `less` decides instead, if there is one.
    """

    def __init__(self, mode: Mode, selector: Selector | None = None, less: Tuned | None = None) -> None:
        if mode.decider == NETWORK and selector is None:
            raise InputError("a network's decisions need its selector")
        self.mode, self.feature_levels, self.longest = mode, mode.asked, mode.longest
        self._selector, self._less, self._at_root = selector, less, dict[bool, OneRoot]()
        self._covers = lru_cache(self._covers_setting)

    def __repr__(self) -> str:
        return f"Tuned({self.mode.sampling}, {self.mode.batch} requests: {self.mode.decider}, {self.mode.action})"

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
        shapes, clock = self._shared
        tokens_BA, length = self._predicted(features, np.arange(len(self._actions)))
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
        tokens_BK, length = self._predicted(features, self._allowed_K)
        net_K = self._root_of(features[0]).net(tokens_BK.mean(0), length, self._allowed_K)
        return self._actions[self._allowed_K[net_K.argmax()]]

    def _predicted(self, features: Sequence[Features], actions_K: NDArray[Any]) -> tuple[NDArray[Any], float]:
        # the predicted tokens of some actions for each request, [B, K], and the mean context length
        read = [self._read(each) for each in features]
        at_root = self._root_of(read[0])
        tokens_BK = np.stack([at_root.tokens(each, actions_K) for each in read])
        return tokens_BK, float(np.mean([at_root.length(each) for each in read]))

    @property
    def _own(self) -> Selector:
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
        # of the features' level, or of the mode's if it is lower
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
