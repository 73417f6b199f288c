"""A loaded selector under one sampling setting: the decisions at one root, or at those of several requests.

Legend: B requests, K actions that may be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from selector.actions import Choice, without_draft
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.runtime.artefact import ArtefactConfig, Features, check_finite, checked, in_words
from selector.runtime.joint import Shapes, StepClock, joint_choice, step_clock
from selector.runtime.one_root import OneRoot
from selector.runtime.online import Online
from selector.schema import MATCH, SCALARS_KEY, InputError


class Loaded(Protocol):
    """What decisions need of a `selector.runtime.selector.Selector`."""

    module: torch.nn.Module
    config: ArtefactConfig
    latency: LatencyProfile
    widths: dict[str, int]  # of the features, by name


class Tuned:
    """A selector under one sampling setting, for one root at a time; a lookup rule or a static tree needs no selector.

    Call `select` with the features of each of `feature_levels` in turn until it returns an action. Where only features
    of the schema's first level are given, `less` decides instead. On texts of more than `longest` tokens, if it is not
    0, a network's mode needs the match alone. Under a sampling setting that was not trained, the choices follow the
    accepted lengths that `observe` is told (`online`).
    """

    def __init__(
        self,
        mode: Mode,
        selector: Loaded | None = None,
        less: Tuned | None = None,
        online: Online | None = None,
    ) -> None:
        self.mode, self.feature_levels, self._selector, self._less = mode, mode.feature_levels, selector, less
        self.longest, self._online = mode.longest, online
        self._covered: list[float] = []  # the sampling setting of the latest features, which need no second check
        if mode.decides:
            self._at_root = {level: self._one_root(mode, level) for level in mode.feature_levels}

    def __repr__(self) -> str:
        mode = self.mode
        decides = f"always {mode.action}"
        if mode.rule is not None:
            decides = f"{mode.rule.lookup} after a match of {mode.rule.least} tokens or more, else {mode.action}"
        if mode.decides:
            longer = f"; beyond {mode.longest} tokens {decides}" if mode.longest else ""
            number = f"{len(mode.allowed) or 'all'} actions"
            decides = f"a network with {' and then '.join(mode.feature_levels)} features chooses among {number}{longer}"
        if self._online is not None:
            decides += ", until steps were observed"
        requests = f", batch {mode.batch}" if mode.batch > 1 else ""
        return f"Tuned({in_words(*mode.setting, mode.top_k, mode.min_p)}{requests}: {decides})"

    def select(self, features: Features | None) -> Choice | None:
        """The decision at a root; the static tree without features.

        Returns:
            None where only early features are given and the decision needs all of them, after the draft's root pass.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite, or is of a sampling setting that
                the mode does not cover.
        """
        mode = self.mode
        if features is None or not mode.feature_levels:
            return mode.action if self._online is None else self._online.action
        if self._less is not None and len(features.get(SCALARS_KEY, ())) == self._own.config.schema.first:
            return self._less.select(features)
        if MATCH in features and (mode.rule is not None or mode.longest > 0):
            return self._by_rule(float(features[MATCH]))
        read = self._read(features)
        scalars_F = read[SCALARS_KEY].numpy()  # reading single numbers takes less time than a call of torch
        length_at, match_at, _ = self._places
        if not mode.decides or (mode.longest and mode.is_beyond(scalars_F.item(length_at))):
            return self._by_rule(scalars_F.item(match_at))
        early = self._first_suffices and (len(mode.feature_levels) == 1 or scalars_F.shape == self._early_shape)
        action = self._at_root[mode.feature_levels[0 if early else -1]].choose(read)
        return None if early and len(mode.feature_levels) > 1 and not without_draft(action) else action

    def _by_rule(self, match: float) -> Choice:
        if not math.isfinite(match):
            raise InputError("features: match is not finite")
        return self.mode.copied(match) if self._online is None else self._online.choose(match)

    def observe(self, action: Choice, accepted: int) -> None:
        """Learn from a step: what was drafted, and tau, the number of drafted tokens that were accepted. It matters
        only under a sampling setting that was not trained; the decoders and `generate()` call it."""
        if self._online is not None:
            self._online.observe(action, accepted)

    def select_jointly(self, features: Sequence[Features]) -> list[Choice]:
        """The choices of several requests that share their draft passes, from the features of each, as in `select`.

        Raises InputError as `select`.
        """
        mode = self.mode
        if self._less is not None and all(len(each[SCALARS_KEY]) == self._own.config.schema.first for each in features):
            return self._less.select_jointly(features)
        if not mode.joint:
            return [choice for each in features if (choice := self.select(each)) is not None]
        (at_root, shapes, clock), read = self._jointly, [self._read(each) for each in features]
        tokens_BK = np.stack([at_root.tokens(each) for each in read])
        context = float(np.mean([each[SCALARS_KEY][self._places[0]] for each in read]))
        chosen_B = joint_choice(tokens_BK, shapes, mode.joint, *clock.prices(context, mode.batch))
        return [at_root.actions[k] for k in chosen_B]

    def select_common(self, features: Sequence[Features]) -> Choice:
        """One choice for all requests of a batch, from the features of each: the best for the means of their predicted
        tokens and context lengths. It is for a network that decides from one level of features.

        Raises InputError as `select`.
        """
        if not self.mode.decides:
            return self.mode.action
        return self._at_root[self.mode.feature_levels[0]].choose_for_all([self._read(each) for each in features])

    @property
    def _own(self) -> Loaded:
        if self._selector is None:
            raise InputError(
                "a network's decisions need its selector" if self.mode.decides else "features: match is missing"
            )
        return self._selector

    def _one_root(self, mode: Mode, level: str) -> OneRoot:
        own = self._own
        return OneRoot(own.module.state_dict(), own.config, own.latency, mode, level)

    @cached_property
    def _jointly(self) -> tuple[OneRoot, Shapes, StepClock]:
        """For joint decisions, which consider all actions."""
        at_root = self._one_root(replace(self.mode, allowed=()), self.mode.feature_levels[-1])
        return at_root, Shapes.of(at_root.actions), step_clock(self._own.latency, self.mode.batch)

    @cached_property
    def _first_suffices(self) -> bool:
        """Whether features of the schema's first level suffice."""
        return self._own.config.schema.levels[0] in self.mode.feature_levels or MATCH in self.mode.feature_levels

    @cached_property
    def _places(self) -> tuple[int, int, list[int]]:
        """The positions of the context length, of the match, and of the sampling setting among the scalars."""
        index = self._own.config.schema.index
        return index("context_length"), index(MATCH), [index("temperature"), index("top_p")]

    @cached_property
    def _early_shape(self) -> tuple[int, ...]:
        """Of scalars that suffice, and whose check in NumPy takes less time than that of all features."""
        return (self._own.config.schema.first if self._first_suffices else -1,)

    def _read(self, features: Features) -> Features:
        """The features that are needed; InputError as `select`, but for numbers that are not finite."""
        scalars, scalars_F = features.get(SCALARS_KEY), None
        if type(scalars) is torch.Tensor and scalars.is_cpu and scalars.dtype == torch.float32:
            scalars_F = scalars.numpy()
        if scalars_F is None or scalars_F.shape != self._early_shape:
            early = self._own.config.schema.first if self._first_suffices else None
            features = checked(features, self._own.widths, 1, early, finite=False)  # `OneRoot` checks that
            scalars_F = features[SCALARS_KEY].numpy()
        setting = [scalars_F.item(at) for at in self._places[2]]
        if setting != self._covered:
            if not self.mode.covers(setting[0], setting[1], self.mode.top_k, self.mode.min_p):
                check_finite(features)
                given, own = in_words(setting[0], setting[1]), in_words(*self.mode.setting)
                raise InputError(f"features: {given}; these decisions are for {own}")
            self._covered = setting
        return features
