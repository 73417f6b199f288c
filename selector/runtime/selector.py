"""A loaded selector: it makes the decisions of an artefact directory and needs only torch, NumPy and Numba.

Legend: B roots, A actions, T trees, F scalars, D hidden width.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from selector.actions import ActionSpace, Choice, choice_of
from selector.decision import Mode, nearest
from selector.latency import LatencyProfile
from selector.runtime.artefact import (
    ArtefactConfig,
    Features,
    check_files,
    check_setting,
    checked,
    decision_tables,
    in_words,
    local_folder,
    read_config,
)
from selector.runtime.online import Online
from selector.runtime.tokens import TokenStatistics
from selector.runtime.tuned import Tuned
from selector.schema import DRAFTER, LOG, SCALARS_KEY, TEXT, InputError


class Selector:
    """A loaded selector.

    Attributes:
        actions: the action table; `scores` follows its order.
        feature_levels: the level of the features that `select` and `scores` take: `light`, `full` or `drafter`.
        fallback: the action for a root without features.
        latency: the profile that the decisions are based on.
        tokens: statistics by token, for the features of a log's selector.
        widths: of the features, by name.
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
        self._online: dict[Hashable, Online] = {}

    def __repr__(self) -> str:
        pair, settings = self.config.pair, dict.fromkeys(in_words(*m.setting, m.top_k, m.min_p) for m in self.modes)
        batches = sorted({mode.batch for mode in self.modes})
        requests = f"; batches of {', '.join(map(str, batches))}" if batches != [1] else ""
        return (
            f"Selector({pair['target']} / {pair['draft']}, {self.verifier}; a {self.config.objective} with "
            f"{self.config.feature_level} features, {len(self.actions)} actions; {'; '.join(settings)}{requests})"
        )

    @torch.inference_mode()
    def select(self, features: Features | None) -> Choice:
        """The action for one root; `fallback` without features.

        Args:
            features: `{name: tensor}` as in the schema, float32 [F] and [D], or the scalars of its first level alone.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite, or a setting is out of range.

        Beyond every trained sampling setting (`Mode.covers`), it is the static tree of the nearest one, with a warning.
        """
        if features is None:
            return self.fallback
        return self.actions[int(self.module(self._read(features, 1))[0])]

    @torch.inference_mode()
    def scores(self, features: Features) -> Tensor:
        """Scores of all actions, float32 [A], or [B, A] for a batch. The highest is chosen.

        Those of a regressor are `E - price T` in tokens. Actions that the mode does not allow have `decision.NEVER`.
        Raises InputError as `select`.
        """
        return self.module(self._read(features, 2))[1]

    def _read(self, features: Features, most_axes: int) -> Features:
        read = checked(features, self.widths, most_axes, self.schema.first)
        at = [self.schema.index(name) for name in ("temperature", "top_p", "batch")]
        for T, top_p, batch in dict.fromkeys(map(tuple, read[SCALARS_KEY][..., at].view(-1, len(at)).tolist())):
            check_setting(T, top_p, batch)
            if not any(mode.covers(T, top_p, mode.top_k, mode.min_p) for mode in self.modes):
                _warn_once(
                    f"features: {in_words(T, top_p)}: too far from every trained setting; "
                    "the static tree of the nearest is chosen"
                )
        return read

    def at(
        self,
        temperature: float,
        top_p: float = 1.0,
        nodes: int | None = None,
        shapes: Iterable[tuple[int, ...]] | None = None,
        batch: int = 1,
        level: str | None = None,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> Tuned:
        """The selector under the mode that is nearest to a sampling setting and a number of requests.

        Where no mode covers the setting (`Mode.covers`), the lookup rule and the best static tree of the nearest mode
        decide: they lose less there than a network outside of its training data. From then on both follow the accepted
        lengths that `Tuned.observe` is told (`Online`). A warning says so, once for each setting.

        Args:
            nodes: largest number of drafted tokens; equal prefixes of branches count separately.
            shapes: the actions that an engine can draft, trees `(K, L1, L2)` and lookups `(length,)`; None for all.
            level: `text` or `drafter`, for a log's selector; None to use the level of the features that are given.
            top_k: 0 for the whole vocabulary.

        Raises:
            InputError: the setting, the batch or the level is out of range, no tree is left, or a shape is not in the
                action space.
        """
        asked = temperature, top_p, top_k, min_p
        check_setting(temperature, top_p, batch, top_k, min_p)
        less = None
        if self.schema == LOG and level is None:
            less, level = self.at(temperature, top_p, nodes, shapes, batch, TEXT, top_k, min_p), DRAFTER
        elif self.schema != LOG and level is not None:
            raise InputError(f"level {level}: only a selector that was trained on a log has levels to choose from")
        modes = [mode for mode in self.modes if level is None or mode.level == level]
        if not modes:
            raise InputError(f"level {level}: this selector has {', '.join(self.schema.levels)}")
        mode = nearest(modes, temperature, top_p, batch, top_k, min_p)
        covered = mode.covers(*asked)
        if covered and nodes is None and shapes is None:
            return Tuned(mode, self, less)
        allowed, speed_T = _allowed(self.space, nodes, shapes), self.config.static_speeds(mode, self.latency)
        if covered:
            return Tuned(mode.restricted(self.space, allowed, speed_T), self, less)
        best = max((a for a in allowed if a < len(self.space.trees)), key=speed_T.__getitem__)
        own = replace(mode.by_rule(), action=self.space.trees[best]).restricted(self.space, allowed, speed_T)
        trained = in_words(*mode.setting, mode.top_k, mode.min_p)
        _warn_once(
            f"{in_words(*asked)}: too far from the trained {trained}; its lookup rule and {own.action} decide, "
            "then what fits the accepted lengths"
        )
        key = asked, mode, tuple(allowed)
        if key not in self._online:  # what it learns serves all requests under this setting
            actions = *self.space.trees, *([own.rule.lookup] if own.rule else [])
            seconds = self.config.seconds(actions, own, self.latency, own.feature_levels)
            self._online[key] = Online(self.space, own, seconds, allowed)
        return Tuned(own, self, less, self._online[key])

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
            _warn_once(f"the selector was trained for {' and '.join(own)}; {' and '.join(theirs)} decode")
        timed_on, here = (name.partition(",")[0] for name in (self.latency.device, device))
        if here not in ("", timed_on):
            _warn_once(f"the selector has the step times of {timed_on}; {here} decodes")


@cache
def _warn_once(message: str) -> None:
    """A warning that a process gives once, whatever its filters are."""
    warnings.warn(message, stacklevel=3)


def _allowed(space: ActionSpace, nodes: int | None, shapes: Iterable[tuple[int, ...]] | None) -> list[int]:
    """Positions of the actions that an engine can draft."""
    try:
        wanted = range(len(space)) if shapes is None else sorted({space.index(choice_of(shape)) for shape in shapes})
    except (ValueError, TypeError) as error:
        raise InputError(f"shapes: {error}") from error
    allowed = [a for a in wanted if nodes is None or space.actions[a].nodes <= nodes]
    if not any(a < len(space.trees) for a in allowed):
        raise InputError(f"no tree is left of those with at most {nodes} nodes and the shapes given")
    return allowed


@contextmanager
def torchscript() -> Iterator[None]:
    """Suppresses the warning that TorchScript is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".?torch\.jit\.\w+.? is deprecated", category=DeprecationWarning)
        yield


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
    with torchscript():
        module = torch.jit.load(str(folder / "selector.pt"), map_location="cpu").eval()
    modes: Sequence[Mode] = config.modes
    if profile != own:
        modes = [_moved(config, mode, profile, own) for mode in modes]
        for name, tensor in decision_tables(profile, modes, config.verifier, config.space).items():
            setattr(module, name, tensor)
    return Selector(module, config, profile, modes, TokenStatistics.load(folder))


def _moved(config: ArtefactConfig, mode: Mode, latency: LatencyProfile, own: LatencyProfile) -> Mode:
    """A mode on another machine, with its best static tree, and g in proportion to the trees' speeds."""
    if config.verifier not in latency.verify:
        raise InputError(f"the latency profile of {latency.device} has no times for {config.verifier}")
    speed_T, before_T = config.static_speeds(mode, latency), config.static_speeds(mode, own)
    best = int(speed_T.argmax())
    speed = mode.speed * float(speed_T[best] / before_T[config.space.index(mode.action)])
    return replace(mode, action=config.space.trees[best], speed=speed, allowed=())
