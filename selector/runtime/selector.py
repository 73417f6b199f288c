"""Artefact directory -> decisions. Needs torch, NumPy and Numba alone.

Legend: B roots, S sampling settings, A actions, L context lengths, F scalars.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from selector.actions import Action, ActionSpace, Choice, Lookup, choice_of
from selector.decision import LookupRule, Mode, nearest, without_draft
from selector.latency import LatencyProfile
from selector.runtime.artefact import Features, check_files, check_setting, checked, of_schema, read_config
from selector.runtime.hub import local_folder
from selector.runtime.joint import Shapes, StepClock, joint_choice, step_clock
from selector.runtime.one_root import OneRoot
from selector.runtime.tokens import TokenStatistics
from selector.schema import (
    DRAFTER,
    EARLY,
    FULL,
    LENGTH_AT,
    LIGHT,
    LOG,
    MATCH,
    MATCH_AT,
    SCALARS_KEY,
    SCHEMAS,
    SETTING_AT,
    TEXT,
    InputError,
)

NO_MATCH = 1 << 20  # no match is so long
ANY_LEVEL = -1.0


class Selector:
    """A loaded selector.

    Attributes:
        space: what it chooses from.
        actions: the action table; `scores` follows its order.
        schema: its scalars.
        verifier: the verifier it was trained for.
        feature_levels: what it is asked with where the sampling setting is not settled beforehand: `light` features,
            the scalars alone, or `full` ones, hidden states, too; `drafter` ones where it was trained on a log. It may
            also be asked with the scalars of its schema's first level alone.
        latency: the profile that its decisions are based on.
        fallback: the action for a root without features.
        modes: how it decides under each of its sampling settings.
        config: the artefact's `config.json`.
        tokens: statistics by token, which features of token ids need where it was trained on a log.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: dict,
        latency: LatencyProfile,
        modes: Sequence[Mode],
        tokens: TokenStatistics | None = None,
    ) -> None:
        self.module, self.config, self.latency, self.modes = module, config, latency, list(modes)
        self.space, self.schema = ActionSpace.of_json(config["space"]), SCHEMAS[config["schema"]]
        self.actions = self.space.actions
        self.verifier: str = config["verifier"]
        self.feature_levels: tuple[str, ...] = (config["feature_level"],)
        self.fallback = Action(*config["fallback"])
        self.tokens = tokens or TokenStatistics.empty()
        self.widths = {SCALARS_KEY: len(config["features"]["scalars"]), **config["features"]["hidden_states"]}

    @torch.inference_mode()
    def select(self, features: Features | None) -> Choice:
        """The action for one root.

        Args:
            features: `{name: tensor}` as in the schema, float32 [F] and [D], or the scalars of its first level alone
                where the others are not known; None where there are none.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite, or names no sampling setting.
        """
        if features is None:
            return self.fallback
        return self.actions[int(self.module(self._read(features, 1))[0])]

    @torch.inference_mode()
    def scores(self, features: Features) -> Tensor:
        """Scores of all actions, float32 [A]; [B, A] for a batch. The highest is chosen.

        Of a regressor's, in tokens: what the tree yields less what its time is worth. Trees that are never drafted
        under the root's sampling setting have a score of `decision.NEVER`; where nothing is decided, all but the static
        one. Raises InputError as `select`.
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
        """The selector under one sampling setting, for steps of so many requests: that of its modes which is nearest.

        Args:
            batch: how many requests are decoded together.
            level: `text` or `drafter`, what the engine knows, for a selector that was trained on a log; if None, the
                features that are given decide.
            nodes: drafted tokens at most, equal prefixes counted apart.
            shapes: the only actions that an engine has graphs for, trees `(K, L1, L2)` and lookups `(length,)`; all of
                them if None.

        Raises:
            InputError: there is no such sampling setting, batch or level, no action is left, or a shape is not in the
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
            return Tuned(self, mode, less)
        speed_T = static_speeds(self.config, self.modes.index(mode), self.latency)
        return Tuned(self, mode.restricted(self.space, _allowed(self.space, nodes, shapes), speed_T), less)


def _allowed(space: ActionSpace, nodes: int | None, shapes: Iterable[tuple[int, ...]] | None) -> list[int]:
    """Indices of the actions that remain."""
    try:
        wanted = range(len(space)) if shapes is None else sorted({space.index(choice_of(shape)) for shape in shapes})
    except (ValueError, TypeError) as error:
        raise InputError(f"shapes: {error}") from error
    allowed = [a for a in wanted if nodes is None or space.actions[a].nodes <= nodes]
    if not any(isinstance(space.actions[a], Action) for a in allowed):
        raise InputError(f"no tree is left of those with at most {nodes} nodes and the shapes given")
    return allowed


class Tuned:
    """A selector under one sampling setting: one root at a time, in as few calls as there can be.

    Attributes:
        feature_levels: what it is to be asked with, in turn, until it answers: features of a level, or the `match`
            alone; nothing where nothing is decided.
        mode: how it decides.

    Args:
        less: asked instead where features of the schema's first level are given.
    """

    def __init__(self, selector: Selector, mode: Mode, less: Tuned | None = None) -> None:
        self.selector, self.mode, self.feature_levels, self._less = selector, mode, mode.feature_levels, less
        if mode.decides:
            weights, config = selector.module.state_dict(), selector.config
            self._at_root = {
                level: OneRoot(weights, config, selector.latency, mode, level) for level in mode.feature_levels
            }

    def select(self, features: Features | None) -> Choice | None:
        """The decision at a root; the static action where there are no features, or nothing is decided.

        Returns:
            None where only early features are given and the draft is to pass the root: then ask with all of them.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite.
        """
        mode = self.mode
        if features is None:
            return mode.action
        if self._less is not None and len(features.get(SCALARS_KEY, ())) == self.selector.schema.first:
            return self._less.select(features)
        if not mode.feature_levels:
            return mode.action
        if mode.rule is not None:
            match = features[MATCH] if MATCH in features else self._read(features)[SCALARS_KEY][MATCH_AT]
            return mode.copied(float(match))
        read = self._read(features)
        first = self.selector.schema.first
        early = self._with_less and (len(mode.feature_levels) == 1 or read[SCALARS_KEY].shape[0] == first)
        action = self._at_root[mode.feature_levels[0] if early else mode.feature_levels[-1]].choose(read)
        return None if early and len(mode.feature_levels) > 1 and not without_draft(action) else action

    def select_jointly(self, features: Sequence[Features]) -> list[Choice]:
        """What each of several requests drafts that are decoded together, where draft passes are shared.

        Args:
            features: of each request, as `select` takes them.

        Raises:
            InputError: as `select`.
        """
        mode = self.mode
        if self._less is not None and all(len(each[SCALARS_KEY]) == self.selector.schema.first for each in features):
            return self._less.select_jointly(features)
        if not mode.joint:
            return [choice for each in features if (choice := self.select(each)) is not None]
        at_root, read = self._of_all, [self._read(each) for each in features]
        tokens_BK = np.stack([at_root.tokens(each) for each in read])
        context = float(np.mean([each[SCALARS_KEY][LENGTH_AT] for each in read]))
        token, one_pass = self._clock.prices(context, mode.batch)
        chosen_B = joint_choice(tokens_BK, Shapes.of(at_root.actions), mode.joint, token, one_pass)
        return [at_root.actions[k] for k in chosen_B]

    @cached_property
    def _of_all(self) -> OneRoot:
        """For joint decisions all actions count, not only those that are worth it for a whole batch."""
        weights, config, mode = self.selector.module.state_dict(), self.selector.config, replace(self.mode, allowed=())
        return OneRoot(weights, config, self.selector.latency, mode, mode.feature_levels[-1])

    @cached_property
    def _clock(self) -> StepClock:
        return step_clock(self.selector.latency, self.mode.batch)

    @cached_property
    def _with_less(self) -> bool:
        """Whether it may be asked with the schema's first level."""
        return self.selector.schema.levels[0] in self.mode.feature_levels or MATCH in self.mode.feature_levels

    def _read(self, features: Features) -> Features:
        return of_schema(features, self.selector.widths, 1, self.selector.schema.first if self._with_less else None)


@contextmanager
def torchscript() -> Iterator[None]:
    """TorchScript is deprecated from torch 2.10 on; that is known, and only that warning is left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".?torch\.jit\.\w+.? is deprecated", category=DeprecationWarning)
        yield


def load_selector(
    folder: str | Path, latency: str | Path | LatencyProfile | None = None, revision: str | None = None
) -> Selector:
    """Read an artefact directory.

    On another machine than the one it was tuned for, times, the static tree and the speed at which time is charged are
    that machine's, and any tree may be chosen; under which sampling settings decisions pay was found on the first one.

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
    own = LatencyProfile.load(folder / "latency.json")
    profile = latency if isinstance(latency, LatencyProfile) else own
    if isinstance(latency, str | Path):
        profile = LatencyProfile.load(Path(latency))
    if profile.pair != config["pair"]["fingerprint"]:
        raise InputError(f"{folder}: the latency profile was measured with another pair")
    with torchscript():
        module = torch.jit.load(str(folder / "selector.pt"), map_location="cpu").eval()
    modes = [Mode.of(entry) for entry in config["modes"]]
    if profile != own:
        modes = [_moved(config, at, mode, profile, own) for at, mode in enumerate(modes)]
        space = ActionSpace.of_json(config["space"])
        for name, tensor in decision_tables(profile, modes, config["verifier"], space)._asdict().items():
            setattr(module, name, tensor)
    return Selector(module, config, profile, modes, TokenStatistics.load(folder))


class DecisionTables(NamedTuple):
    """What the exported file decides with, by sampling setting: times of steps before and after the draft has passed
    the root, by context length; g, rho and the actions that may be chosen; whether the draft's rows are looked at; from
    which match on, and which, lookup is taken instead; for which level of what is known."""

    settings_S3: Tensor
    lengths_L: Tensor
    early_SLA: Tensor
    late_SLA: Tensor
    speed_S: Tensor
    rho_S: Tensor
    allowed_SA: Tensor
    late_S: Tensor
    least_S: Tensor
    copied_SA: Tensor
    level_S: Tensor


def decision_tables(
    profile: LatencyProfile, modes: Sequence[Mode], verifier: str, space: ActionSpace
) -> DecisionTables:
    """Those of some modes on one machine."""
    at_batch = {mode.batch: profile.at_batch(mode.batch) for mode in modes}

    def times(feature_levels: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
        pairs = zip(modes, feature_levels, strict=True)
        tables = [at_batch[mode.batch].table(space.actions, verifier, own, mode.top_p < 1) for mode, own in pairs]
        return tables[0][0], torch.stack([seconds_LA for _, seconds_LA in tables])

    lengths_L, early_SLA = times([[level for level in mode.feature_levels if level in (TEXT, EARLY)] for mode in modes])
    rules = [mode.rule or LookupRule(NO_MATCH, 0) for mode in modes]
    return DecisionTables(
        torch.tensor([mode.key for mode in modes]),
        lengths_L,
        early_SLA,
        times([mode.feature_levels for mode in modes])[1],
        torch.tensor([mode.speed for mode in modes]),
        torch.tensor([mode.rho for mode in modes]),
        torch.stack([mode.mask(space) for mode in modes]),
        torch.tensor([float(mode.feature_levels[-1:] in ((LIGHT,), (FULL,), LOG.levels[1:])) for mode in modes]),
        torch.tensor([float(rule.least) for rule in rules]),
        torch.stack([torch.tensor([action == Lookup(rule.length) for action in space]) for rule in rules]),
        torch.tensor([float(LOG.levels.index(mode.level)) if mode.level else ANY_LEVEL for mode in modes]),
    )


def static_speeds(config: dict, at: int, latency: LatencyProfile) -> Tensor:
    """Tokens per second of the static trees under a mode's setting, in the middle of the measured lengths, in the order
    of the space's trees."""
    mode, trees = config["modes"][at], ActionSpace.of_json(config["space"]).trees
    latency = latency.at_batch(mode["batch"])
    length = latency.draft.lengths[len(latency.draft.lengths) // 2]
    verifier, filtered = config["verifier"], mode["top_p"] < 1
    seconds = [latency.action_seconds(action, length, verifier, (), filtered) for action in trees]
    return torch.tensor(mode["mean_efficiency"]) / torch.tensor(seconds)


def _moved(config: dict, at: int, mode: Mode, latency: LatencyProfile, own: LatencyProfile) -> Mode:
    """A mode on another machine: its best static tree, and g in proportion to the trees' speeds."""
    if config["verifier"] not in latency.verify:
        raise InputError(f"the latency profile of {latency.device} has no times for {config['verifier']}")
    speed_A, before_A = static_speeds(config, at, latency), static_speeds(config, at, own)
    space, best = ActionSpace.of_json(config["space"]), int(speed_A.argmax())
    speed = mode.speed * float(speed_A[best] / before_A[space.index(mode.action)])
    return replace(mode, action=space.trees[best], speed=speed, allowed=())
