"""A loaded selector: it makes the decisions of an artefact directory and needs only torch and NumPy.

Legend: B roots, A actions, T trees, F scalars, D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.decision import Mode, nearest
from selector.files import read_tensors
from selector.latency import LatencyProfile
from selector.runtime.artefact import ArtefactConfig, Features, check_files, checked, local_folder, read_config
from selector.runtime.tokens import TokenStatistics
from selector.runtime.tuned import Tuned, warn_far, warn_once
from selector.sampling import Sampling
from selector.schema import DRAFTER, LOG, SCALARS_KEY, TEXT, InputError

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
