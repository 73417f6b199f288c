"""Artefact directory -> decisions. Needs torch alone.

Legend: B roots, S sampling settings, A actions, K actions that may be chosen, L context lengths, F scalars, H outputs
of the network that the chosen ones need.
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
from torch.nn.functional import layer_norm, logsigmoid

from selector.actions import Action, ActionSpace, Choice, Lookup, choice_of
from selector.artefact import Features, check_files, check_setting, checked, read_config
from selector.decision import Mode, Rule, choice, nearest, without_draft
from selector.hub import local_folder
from selector.latency import Correction, LatencyProfile, StepTimes, Table, correction_counts, gpu_like
from selector.network import survival_factors
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
LENGTH_AT = SCALAR_NAMES.index("context_length")
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
            self._at_root = {sees: _OneRoot(selector, mode, sees) for sees in mode.sees}

    @torch.inference_mode()
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
            match = features[MATCH] if MATCH in features else self._checked(features)[SCALARS_KEY][MATCH_AT]
            return mode.copied(float(match))
        read = self._checked(features)
        early = EARLY in mode.sees and (len(mode.sees) == 1 or read[SCALARS_KEY].shape[0] == len(EARLY_SCALARS))
        action = self._at_root[EARLY if early else mode.sees[-1]].choose(read)
        return None if early and len(mode.sees) > 1 and not without_draft(action) else action

    def _checked(self, features: Features) -> Features:
        asked_early = EARLY in self.mode.sees or MATCH in self.mode.sees
        return checked(features, self.selector.widths, 1, len(EARLY_SCALARS) if asked_early else None)


class _OneRoot:
    """A mode's arithmetic for one root at a time.

    Between two passes of a model the processor's caches hold the model, and a call of any library takes several times
    as long as in a loop of its own. So there are few calls, of those that the model has just used itself: the scaling
    of the scalars is part of the first layer, the last one holds only the outputs that the allowed trees need, and the
    handful of numbers at the end are Python's.
    """

    def __init__(self, selector: Selector, mode: Mode, sees: str) -> None:
        weights = selector.module.state_dict()
        allowed = sorted(mode.allowed) or list(range(len(SPACE)))
        self.mode, self.actions = mode, [SPACE.actions[a] for a in allowed]
        self.regressor = selector.config["objective"] == "regressor"
        self.inputs = len(EARLY_SCALARS) if sees == EARLY else len(SCALAR_NAMES)
        self.hidden_names = [] if sees == EARLY else list(selector.config["features"]["hidden_states"])
        body = "network.body." if self.regressor else "network."
        parts = ("0.weight", "0.bias", "1.weight", "1.bias")
        self.blocks = [[weights[f"{body}blocks.{i}.{part}"] for part in parts] for i in range(len(self.hidden_names))]
        numbers = sorted({int(name.split(".")[-2]) for name in weights if name.startswith(f"{body}mlp.")})
        self.layers = [(weights[f"{body}mlp.{i}.bias"], weights[f"{body}mlp.{i}.weight"]) for i in numbers]
        self.count_F = weights[f"{body}count_F"][: self.inputs]
        self._only_seen(weights[f"{body}scale_F"], weights[f"{body}mean_F"])
        bias, weight = self.layers[-1]
        if self.regressor:
            self._only_needed(bias, weight, allowed)
        else:
            self.layers[-1] = bias[allowed], weight[allowed]
        asked = mode.sees[: mode.sees.index(sees) + 1]
        lengths_L, seconds_LA = selector.latency.table(SPACE.actions, selector.verifier, asked, mode.top_p < 1)
        self.times = StepTimes(lengths_L.tolist(), seconds_LA[:, allowed].tolist())

    def _only_seen(self, scale_F: Tensor, mean_F: Tensor) -> None:
        """The first layer, with the scaling of the scalars in it, for what is seen alone."""
        bias, weight = self.layers[0]
        F, seen = len(scale_F), self.inputs
        scaled = weight[:, :seen] / scale_F[:seen]
        bias = bias - scaled @ mean_F[:seen]
        if seen == F:
            bias = bias + weight[:, F]  # the input that says that the draft has passed the root
        hidden = weight[:, F + 1 :] if self.hidden_names else weight[:, :0]
        self.layers[0] = bias, torch.cat([scaled, hidden], dim=-1).contiguous()

    def _only_needed(self, bias: Tensor, weight: Tensor, allowed: list[int]) -> None:
        """The last layer, and what makes block efficiencies of it, for some trees alone."""
        sums_SA = SPACE.sums_SA[:, allowed]
        survivals = sums_SA.any(1)
        factors_SS = survival_factors(SPACE)[:, survivals]
        outputs = factors_SS.any(1)
        self.layers[-1] = bias[outputs], weight[outputs].contiguous()
        self.factors = factors_SS[outputs].T.contiguous()
        self.sums, self.one = sums_SA[survivals].T.contiguous(), torch.ones(len(allowed))

    def choose(self, features: Features) -> Choice:
        """The action at one root."""
        scalars_F = features[SCALARS_KEY][: self.inputs]
        values = torch.where(self.count_F, scalars_F.clamp(min=0).log1p(), scalars_F)
        if self.blocks:
            states = [
                self._projected(features[name], block)
                for name, block in zip(self.hidden_names, self.blocks, strict=True)
            ]
            values = torch.cat([values, *states])
        for bias, weight in self.layers[:-1]:
            values = torch.addmv(bias, weight, values).relu_()
        outputs_H = torch.addmv(*self.layers[-1], values)
        if not self.regressor:
            return self.actions[int(outputs_H.argmax())]
        survivals = torch.mv(self.factors, logsigmoid(outputs_H)).exp_()
        tokens: list[float] = torch.addmv(self.one, self.sums, survivals).tolist()
        seconds = self.times.at(float(scalars_F[LENGTH_AT]))
        return self.actions[choice(tokens, seconds, self.mode.speed, self.mode.rho)]

    @staticmethod
    def _projected(state_D: Tensor, block: list[Tensor]) -> Tensor:
        """A hidden state through its linear map and layer norm."""
        weight, bias, scale, shift = block
        return layer_norm(torch.addmv(bias, weight, state_D), scale.shape, scale, shift)


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
