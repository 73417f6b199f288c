"""Artefact directory -> decisions. Needs torch, NumPy and Numba alone.

Legend: B roots or requests, A actions, K actions that may be chosen, T trees, F scalars, D hidden width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from selector.actions import Action, ActionSpace, Choice, choice_of
from selector.decision import Mode, nearest, without_draft
from selector.latency import LatencyProfile
from selector.runtime.artefact import (
    ArtefactConfig,
    Features,
    check_files,
    check_setting,
    checked,
    local_folder,
    of_schema,
    read_config,
)
from selector.runtime.decision_tables import decision_tables
from selector.runtime.joint import Shapes, StepClock, joint_choice, step_clock
from selector.runtime.one_root import OneRoot
from selector.runtime.tokens import TokenStatistics
from selector.schema import DRAFTER, LENGTH_AT, LOG, MATCH, MATCH_AT, SCALARS_KEY, SETTING_AT, TEXT, InputError


class Selector:
    """A loaded selector.

    Attributes:
        space: what it chooses from.
        actions: the action table; `scores` follows its order.
        schema: its scalars.
        verifier: the verifier it was trained for.
        feature_levels: what `select` is asked with, and `scores`: `light` features, the scalars alone, or `full` ones,
            hidden states, too; `drafter` ones where it was trained on a log. It may also be asked with the scalars of
            its schema's first level alone.
        latency: the profile that its decisions are based on.
        fallback: the action for a root without features.
        modes: how it decides under each of its sampling settings.
        config: the artefact's `config.json`.
        tokens: statistics by token, which features of token ids need where it was trained on a log.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: ArtefactConfig,
        latency: LatencyProfile,
        modes: Sequence[Mode],
        tokens: TokenStatistics | None = None,
    ) -> None:
        self.module, self.config, self.latency, self.modes = module, config, latency, list(modes)
        self.space, self.schema, self.verifier = config.space, config.schema, config.verifier
        self.actions, self.fallback = config.space.actions, config.fallback
        self.feature_levels: tuple[str, ...] = (config.feature_level,)
        self.tokens = tokens or TokenStatistics.empty()
        self.widths = {SCALARS_KEY: len(config.schema.scalars), **config.hidden_states}

    @torch.inference_mode()
    def select(self, features: Features | None) -> Choice:
        """The action for one root.

        Args:
            features: `{name: tensor}` as in the schema, float32 [F] and [D], or the scalars of its first level alone;
                None where there are none.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite, or names no sampling setting.
        """
        if features is None:
            return self.fallback
        return self.actions[int(self.module(self._read(features, 1))[0])]

    @torch.inference_mode()
    def scores(self, features: Features) -> Tensor:
        """Scores of all actions, float32 [A]; [B, A] for a batch. The highest is chosen.

        Those of a regressor are in tokens: what the action yields less what its time is worth. Actions that are never
        taken under the root's sampling setting have a score of `decision.NEVER`; where nothing is decided, all but the
        static tree. Raises InputError as `select`.
        """
        return self.module(self._read(features, 2))[1]

    def _read(self, features: Features, most_axes: int) -> Features:
        read = checked(features, self.widths, most_axes, self.schema.first)
        for setting in read[SCALARS_KEY][..., SETTING_AT].view(-1, len(SETTING_AT)).tolist():
            check_setting(*setting)
        return read

    def at(
        self,
        temperature: float,
        top_p: float = 1.0,
        nodes: int | None = None,
        shapes: Iterable[tuple[int, ...]] | None = None,
        batch: int = 1,
        level: str | None = None,
    ) -> Tuned:
        """The selector under one sampling setting, for steps of so many requests: the nearest one of its modes.

        Args:
            batch: how many requests are decoded together.
            level: `text` or `drafter`, what the engine knows, for a selector that was trained on a log; if None, the
                features that are given decide.
            nodes: most drafted tokens, equal prefixes counted apart.
            shapes: the actions that an engine can draft, trees `(K, L1, L2)` and lookups `(length,)`; all of
                them if None.

        Raises:
            InputError: there is no such sampling setting, batch or level, no tree is left, or a shape is not in the
                action space.
        """
        check_setting(temperature, top_p, batch)
        less = None
        if self.schema == LOG and level is None:
            less, level = self.at(temperature, top_p, nodes, shapes, batch, TEXT), DRAFTER
        elif self.schema != LOG and level is not None:
            raise InputError(f"level {level}: only a selector that was trained on a log has levels to choose from")
        modes = [mode for mode in self.modes if level is None or mode.level == level]
        if not modes:
            raise InputError(f"level {level}: this selector has {', '.join(self.schema.levels)}")
        mode = nearest(modes, temperature, top_p, batch)
        if nodes is None and shapes is None:
            return Tuned(mode, self, less)
        speed_T = self.config.static_speeds(mode, self.latency)
        return Tuned(mode.restricted(self.space, _allowed(self.space, nodes, shapes), speed_T), self, less)


def _allowed(space: ActionSpace, nodes: int | None, shapes: Iterable[tuple[int, ...]] | None) -> list[int]:
    """Positions of the actions that remain."""
    try:
        wanted = range(len(space)) if shapes is None else sorted({space.index(choice_of(shape)) for shape in shapes})
    except (ValueError, TypeError) as error:
        raise InputError(f"shapes: {error}") from error
    allowed = [a for a in wanted if nodes is None or space.actions[a].nodes <= nodes]
    if not any(isinstance(space.actions[a], Action) for a in allowed):
        raise InputError(f"no tree is left of those with at most {nodes} nodes and the shapes given")
    return allowed


class Tuned:
    """One sampling setting of a selector: one root at a time, in as few calls as possible.

    Attributes:
        feature_levels: what it is to be asked with, in turn, until it answers: features of a level, or the `match`
            alone; nothing where nothing is decided.
        mode: how it decides.

    Args:
        selector: whose network decides; None for a mode that needs none, the lookup rule's or a static tree's.
        less: asked instead where features of the schema's first level are given.
    """

    def __init__(self, mode: Mode, selector: Selector | None = None, less: Tuned | None = None) -> None:
        self.mode, self.feature_levels, self._selector, self._less = mode, mode.feature_levels, selector, less
        if mode.decides:
            self._at_root = {level: self._one_root(mode, level) for level in mode.feature_levels}

    def select(self, features: Features | None) -> Choice | None:
        """The decision at a root; the static tree where there are no features, or nothing is decided.

        Returns:
            None where only early features are given and the draft is to pass the root: then ask with all of them.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite.
        """
        mode = self.mode
        if features is None:
            return mode.action
        if self._less is not None and len(features.get(SCALARS_KEY, ())) == self._own.schema.first:
            return self._less.select(features)
        if not mode.feature_levels:
            return mode.action
        if mode.rule is not None:
            match = features[MATCH] if MATCH in features else self._read(features)[SCALARS_KEY][MATCH_AT]
            return mode.copied(float(match))
        read = self._read(features)
        known = read[SCALARS_KEY].shape[0]
        early = self._with_less and (len(mode.feature_levels) == 1 or known == self._own.schema.first)
        action = self._at_root[mode.feature_levels[0 if early else -1]].choose(read)
        return None if early and len(mode.feature_levels) > 1 and not without_draft(action) else action

    def select_jointly(self, features: Sequence[Features]) -> list[Choice]:
        """What each of several requests drafts that are decoded together and share their draft passes.

        Args:
            features: of each request, as `select` takes them.

        Raises:
            InputError: as `select`.
        """
        mode = self.mode
        if self._less is not None and all(len(each[SCALARS_KEY]) == self._own.schema.first for each in features):
            return self._less.select_jointly(features)
        if not mode.joint:
            return [choice for each in features if (choice := self.select(each)) is not None]
        at_root, read = self._of_all, [self._read(each) for each in features]
        tokens_BK = np.stack([at_root.tokens(each) for each in read])
        context = float(np.mean([each[SCALARS_KEY][LENGTH_AT] for each in read]))
        shapes, prices = Shapes.of(at_root.actions), self._clock.prices(context, mode.batch)
        chosen_B = joint_choice(tokens_BK, shapes, mode.joint, *prices)
        return [at_root.actions[k] for k in chosen_B]

    @property
    def _own(self) -> Selector:
        """InputError where there is none: the lookup rule then reads the match alone."""
        if self._selector is None:
            raise InputError(
                "a network's decisions need its selector" if self.mode.decides else "features: match is missing"
            )
        return self._selector

    def _one_root(self, mode: Mode, level: str) -> OneRoot:
        own = self._own
        return OneRoot(own.module.state_dict(), own.config, own.latency, mode, level)

    @cached_property
    def _of_all(self) -> OneRoot:
        """For joint decisions all actions count, also those that do not pay for a whole batch."""
        return self._one_root(replace(self.mode, allowed=()), self.mode.feature_levels[-1])

    @cached_property
    def _clock(self) -> StepClock:
        return step_clock(self._own.latency, self.mode.batch)

    @cached_property
    def _with_less(self) -> bool:
        """Whether it may be asked with the schema's first level."""
        return self._own.schema.levels[0] in self.mode.feature_levels or MATCH in self.mode.feature_levels

    def _read(self, features: Features) -> Features:
        return of_schema(features, self._own.widths, 1, self._own.schema.first if self._with_less else None)


@contextmanager
def torchscript() -> Iterator[None]:
    """Leaves out the warning that TorchScript is deprecated from torch 2.10 on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".?torch\.jit\.\w+.? is deprecated", category=DeprecationWarning)
        yield


def load_selector(
    folder: str | Path, latency: str | Path | LatencyProfile | None = None, revision: str | None = None
) -> Selector:
    """Read an artefact directory.

    On another machine than the one it was tuned for, step times, static trees and the speeds that price time are that
    machine's, and any action may be chosen. Under which sampling settings decisions pay was found on the first one.

    Args:
        folder: as written by the export stage, or the id of a repository on the hub that holds one.
        latency: another machine's profile; the one in the directory if None.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: a file is missing, the hub does not give it, its checksum does not match, the schema version is
            another one, or the profile is of another pair or lacks the verifier.
    """
    folder = local_folder(folder, revision)
    check_files(folder)
    config = read_config(folder / "config.json")
    own = profile = LatencyProfile.load(folder / "latency.json")
    if latency is not None:
        profile = latency if isinstance(latency, LatencyProfile) else LatencyProfile.load(Path(latency))
    if profile.pair != config.pair["fingerprint"]:
        raise InputError(f"{folder}: the latency profile was measured with another pair")
    with torchscript():
        module = torch.jit.load(str(folder / "selector.pt"), map_location="cpu").eval()
    modes: Sequence[Mode] = config.modes
    if profile != own:
        modes = [_moved(config, mode, profile, own) for mode in modes]
        for name, tensor in decision_tables(profile, modes, config.verifier, config.space)._asdict().items():
            setattr(module, name, tensor)
    return Selector(module, config, profile, modes, TokenStatistics.load(folder))


def _moved(config: ArtefactConfig, mode: Mode, latency: LatencyProfile, own: LatencyProfile) -> Mode:
    """A mode on another machine: its best static tree, and g in proportion to the trees' speeds."""
    if config.verifier not in latency.verify:
        raise InputError(f"the latency profile of {latency.device} has no times for {config.verifier}")
    speed_T, before_T = config.static_speeds(mode, latency), config.static_speeds(mode, own)
    best = int(speed_T.argmax())
    speed = mode.speed * float(speed_T[best] / before_T[config.space.index(mode.action)])
    return replace(mode, action=config.space.trees[best], speed=speed, allowed=())
