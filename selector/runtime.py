"""Artefact directory -> decisions. Needs torch, NumPy and Numba alone.

Legend: B roots, S sampling settings, A actions, L context lengths, F scalars.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace, Choice, Lookup, choice_of
from selector.artefact import Features, check_files, check_setting, checked, of_schema, read_config
from selector.decision import Mode, Rule, nearest, without_draft
from selector.hub import local_folder
from selector.latency import Correction, LatencyProfile, Table, correction_counts, gpu_like
from selector.one_root import OneRoot
from selector.schema import EARLY, EARLY_SCALARS, FULL, LIGHT, MATCH, SCALAR_NAMES, SCALARS_KEY, InputError

__all__ = [
    "Correction",
    "LatencyProfile",
    "Mode",
    "Selector",
    "Table",
    "Tuned",
    "correction_counts",
    "gpu_like",
    "load_selector",
]

SPACE = ActionSpace.with_lookups()
MATCH_AT = SCALAR_NAMES.index("match")
NO_MATCH = 1 << 20  # no match is so long
SETTING_AT = [SCALAR_NAMES.index("temperature"), SCALAR_NAMES.index("top_p")]


class Selector:
    """A loaded selector.

    Attributes:
        actions: the action table; `scores` follows its order.
        verifier: the verifier it was trained for.
        sees: what it is asked with where the sampling setting is not settled beforehand: `light` features, the scalars
            alone, or `full` ones, hidden states, too.
        latency: the profile that its decisions are based on.
        fallback: the action for a root without features.
        modes: how it decides under each of its sampling settings.
        config: the artefact's `config.json`.
    """

    def __init__(self, module: torch.nn.Module, config: dict, latency: LatencyProfile, modes: Sequence[Mode]) -> None:
        self.module, self.config, self.latency, self.modes = module, config, latency, list(modes)
        self.actions = tuple(choice_of(action) for action in config["actions"])
        self.verifier: str = config["verifier"]
        self.sees: tuple[str, ...] = (config["sees"],)
        self.fallback = Action(*config["fallback"])
        self.widths = {SCALARS_KEY: len(config["features"]["scalars"]), **config["features"]["hidden_states"]}

    @torch.inference_mode()
    def select(self, features: Features | None) -> Choice:
        """The action for one root.

        Args:
            features: `{name: tensor}` as in the schema, float32 [F] and [D], or the early scalars alone where the draft
                has not passed the root yet; None where there are none.

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
        read = checked(features, self.widths, most_axes, len(EARLY_SCALARS))
        for setting in read[SCALARS_KEY][..., SETTING_AT].view(-1, 2).tolist():
            check_setting(*setting)
        return read

    def at(
        self,
        temperature: float,
        top_p: float = 1.0,
        nodes: int | None = None,
        shapes: Iterable[tuple[int, ...]] | None = None,
    ) -> Tuned:
        """The selector under one sampling setting: that of its modes which is nearest.

        Args:
            nodes: drafted tokens at most, equal prefixes counted apart.
            shapes: the only actions that an engine has graphs for, trees `(K, L1, L2)` and lookups `(length,)`; all of
                them if None.

        Raises:
            InputError: there is no such sampling setting, no action is left, or a shape is not in the action space.
        """
        check_setting(temperature, top_p)
        mode = nearest(self.modes, temperature, top_p)
        if nodes is None and shapes is None:
            return Tuned(self, mode)
        allowed = _allowed(nodes, shapes)
        speed_A = static_speeds(self.config, self.modes.index(mode), self.latency)
        own = SPACE.index(mode.action)
        best = max((a for a in allowed if a < len(SPACE.trees)), key=speed_A.__getitem__)
        copies = mode.rule is not None and SPACE.index(Lookup(mode.rule.length)) in allowed
        if copies and own in allowed:
            best = own  # the tree that goes with the rule, which the fastest one alone need not be
        # with fewer trees to choose from, decoding is slower, and so time is worth less
        speed = mode.speed * float(speed_A[best] / speed_A[own])
        kept = tuple(a for a in allowed if not mode.allowed or a in mode.allowed) or tuple(allowed)
        changed = replace(mode, action=SPACE.trees[best], speed=speed, allowed=tuple(sorted({*kept, best})))
        if mode.rule is not None and not copies:
            changed = changed.static_only()
        return Tuned(self, changed)


def _allowed(nodes: int | None, shapes: Iterable[tuple[int, ...]] | None) -> list[int]:
    """Indices of the actions that remain."""
    try:
        wanted = range(len(SPACE)) if shapes is None else sorted({SPACE.index(choice_of(shape)) for shape in shapes})
    except (ValueError, TypeError) as error:
        raise InputError(f"shapes: {error}") from error
    allowed = [a for a in wanted if nodes is None or SPACE.actions[a].nodes <= nodes]
    if not any(isinstance(SPACE.actions[a], Action) for a in allowed):
        raise InputError(f"no tree is left of those with at most {nodes} nodes and the shapes given")
    return allowed


class Tuned:
    """A selector under one sampling setting: one root at a time, in as few calls as there can be.

    Attributes:
        sees: what it is to be asked with, in turn, until it answers: `early` features, `light` or `full` ones, or the
            `match` alone; nothing where nothing is decided.
        mode: how it decides.
    """

    def __init__(self, selector: Selector, mode: Mode) -> None:
        self.selector, self.mode, self.sees = selector, mode, mode.sees
        if mode.decides:
            weights, config = selector.module.state_dict(), selector.config
            self._at_root = {sees: OneRoot(weights, config, selector.latency, mode, sees) for sees in mode.sees}

    def select(self, features: Features | None) -> Choice | None:
        """The decision at a root; the static action where there are no features, or nothing is decided.

        Returns:
            None where only early features are given and the draft is to pass the root: then ask with all of them.

        Raises:
            InputError: a feature is missing, of another shape or dtype, or not finite.
        """
        mode = self.mode
        if features is None or not mode.sees:
            return mode.action
        if mode.rule is not None:
            match = features[MATCH] if MATCH in features else self._read(features)[SCALARS_KEY][MATCH_AT]
            return mode.copied(float(match))
        read = self._read(features)
        early = EARLY in mode.sees and (len(mode.sees) == 1 or read[SCALARS_KEY].shape[0] == len(EARLY_SCALARS))
        action = self._at_root[EARLY if early else mode.sees[-1]].choose(read)
        return None if early and len(mode.sees) > 1 and not without_draft(action) else action

    def _read(self, features: Features) -> Features:
        asked_early = EARLY in self.mode.sees or MATCH in self.mode.sees
        return of_schema(features, self.selector.widths, 1, len(EARLY_SCALARS) if asked_early else None)


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
        for name, tensor in decision_tables(profile, modes, config["verifier"])._asdict().items():
            setattr(module, name, tensor)
    return Selector(module, config, profile, modes)


class DecisionTables(NamedTuple):
    """What the exported file decides with, by sampling setting: times of steps before and after the draft has passed
    the root, by context length; g, rho and the actions that may be chosen; whether the draft's rows are looked at; from
    which match on, and which, lookup is taken instead."""

    settings_S2: Tensor
    lengths_L: Tensor
    early_SLA: Tensor
    late_SLA: Tensor
    speed_S: Tensor
    rho_S: Tensor
    allowed_SA: Tensor
    late_S: Tensor
    least_S: Tensor
    copied_SA: Tensor


def decision_tables(profile: LatencyProfile, modes: Sequence[Mode], verifier: str) -> DecisionTables:
    """Those of some modes on one machine."""

    def times(sees: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
        pairs = zip(modes, sees, strict=True)
        tables = [profile.table(SPACE.actions, verifier, own, mode.top_p < 1) for mode, own in pairs]
        return tables[0][0], torch.stack([seconds_LA for _, seconds_LA in tables])

    lengths_L, early_SLA = times([[sees for sees in mode.sees if sees == EARLY] for mode in modes])
    rules = [mode.rule or Rule(NO_MATCH, SPACE.lookups[0]) for mode in modes]
    return DecisionTables(
        torch.tensor([[mode.temperature, mode.top_p] for mode in modes]),
        lengths_L,
        early_SLA,
        times([mode.sees for mode in modes])[1],
        torch.tensor([mode.speed for mode in modes]),
        torch.tensor([mode.rho for mode in modes]),
        torch.stack([mode.mask(SPACE) for mode in modes]),
        torch.tensor([float(LIGHT in mode.sees or FULL in mode.sees) for mode in modes]),
        torch.tensor([float(rule.least) for rule in rules]),
        torch.stack([torch.tensor([action == Lookup(rule.length) for action in SPACE]) for rule in rules]),
    )


def static_speeds(config: dict, at: int, latency: LatencyProfile) -> Tensor:
    """Tokens per second of the static trees under a mode's setting, in the middle of the measured lengths, in the order
    of `SPACE.trees`."""
    mode = config["modes"][at]
    length = latency.draft.lengths[len(latency.draft.lengths) // 2]
    verifier, filtered = config["verifier"], mode["top_p"] < 1
    seconds = [latency.action_seconds(action, length, verifier, (), filtered) for action in SPACE.trees]
    return torch.tensor(mode["mean_efficiency"]) / torch.tensor(seconds)


def _moved(config: dict, at: int, mode: Mode, latency: LatencyProfile, own: LatencyProfile) -> Mode:
    """A mode on another machine: its best static tree, and g in proportion to the trees' speeds."""
    if config["verifier"] not in latency.verify:
        raise InputError(f"the latency profile of {latency.device} has no times for {config['verifier']}")
    speed_A, before_A = static_speeds(config, at, latency), static_speeds(config, at, own)
    best = int(speed_A.argmax())
    speed = mode.speed * float(speed_A[best] / before_A[SPACE.index(mode.action)])
    return replace(mode, action=SPACE.trees[best], speed=speed, allowed=())
