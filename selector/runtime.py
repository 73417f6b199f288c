"""Artefact directory -> decisions. Needs torch alone.

Legend: B roots, R calibration roots, S sampling settings, A actions, U verifiers, O options (every action with each
verifier), I increments, L context lengths, D hidden width, F scalars.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.baselines import worth_most
from selector.latency import (
    Correction,
    LatencyProfile,
    Table,
    correction_counts,
    gpu_like,
    interpolated_at,
)
from selector.schema import SCHEMA_VERSION, InputError
from selector.tuned import Mode, Tuned

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

FORMAT = "espalier-selector-2"
CHECKSUMS = "SHA256SUMS"
HEAD = ("head_weight_IH", "head_bias_I", "head_sums_IO")  # of the trunk's network


class Selector:
    """A loaded selector.

    Attributes:
        actions: the action table; `scores` follows its order.
        verifier: the verifier it was trained for; `joint` where every tree has its own of the `verifiers`.
        latency: the profile that its features and decisions are based on.
        fallback: the action for a root without features.
        modes: how it decides under each of its sampling settings.
        config: the artefact's `config.json`.
    """

    def __init__(
        self,
        module: torch.jit.ScriptModule,
        head: tuple[Tensor, ...],
        config: dict,
        latency: LatencyProfile,
        modes: Sequence[Mode],
    ) -> None:
        self._module = module
        self._head = head
        self.config = config
        self.latency = latency
        self.actions = tuple(Action(*action) for action in config["actions"])
        self.verifier: str = config["verifier"]
        self.verifiers: list[str] = config["verifiers"]
        self.fallback = Action(*config["fallback"])
        self.modes = list(modes)

    @torch.inference_mode()
    def select(self, features: dict[str, Tensor] | None) -> Action:
        """The action for one root.

        Args:
            features: `{name: tensor}` as in the schema, float32 [D] and [F]; None where there are none.
        """
        if features is None:
            return self.fallback
        return self.actions[int(self._module(_on_cpu(features))[0])]

    @torch.inference_mode()
    def scores(self, features: dict[str, Tensor]) -> Tensor:
        """Scores of all actions, float32 [A]; [B, A] for a batch. The highest is chosen."""
        return self._module(_on_cpu(features))[1]

    def at(
        self,
        temperature: float,
        top_p: float = 1.0,
        nodes: int | None = None,
        shapes: Iterable[tuple[int, int, int]] | None = None,
    ) -> Tuned:
        """The selector under one sampling setting: that of its modes which is nearest.

        On another machine than the one it was tuned for, times, the static tree, every action's verifier and the speed
        at which time is charged are that machine's. Where decisions pay was found on the first one, and along the trunk
        they are made at every token and among all actions: which could be left out was found there, too.

        Args:
            nodes: drafted tokens at most, equal prefixes counted apart.
            shapes: the only actions that an engine has graphs for; all of them if None.

        Raises:
            InputError: no action is left, or a shape is not in the action space.
        """
        at = min(range(len(self.modes)), key=lambda i: self.modes[i].distance(temperature, top_p))
        mode = self.modes[at]
        if nodes is None and shapes is None:
            return Tuned(self, mode, None)
        allowed = self._allowed(nodes, shapes)
        table = _static_table(self.config, at, self.latency, _middle(self.latency))
        speed_A = _static_speeds(table, mode.verifier_of)
        best = max(allowed, key=speed_A.__getitem__)
        everything = tuple(range(len(self.actions)))
        # with fewer trees to choose from, decoding is slower, and so time is worth less
        gain = mode.gain * float(speed_A[best] / speed_A[self.actions.index(mode.action)])
        best_mode = replace(mode, action=self.actions[best], further=everything, first=0, gain=gain)
        return Tuned(self, best_mode, allowed)

    def _allowed(self, nodes: int | None, shapes: Iterable[tuple[int, int, int]] | None) -> list[int]:
        """Indices of the actions that remain."""
        space, wanted = ActionSpace.default(), set(range(len(self.actions)))
        try:
            if shapes is not None:
                wanted = {space.index(Action(*shape)) for shape in shapes}
        except (ValueError, TypeError) as error:
            raise InputError(f"shapes: {error}") from error
        allowed = sorted(a for a in wanted if nodes is None or self.actions[a].nodes <= nodes)
        if not allowed:
            raise InputError(f"no action is left of those with at most {nodes} nodes and the shapes given")
        return allowed

    def verifiers_of(self, mode: Mode) -> list[str]:
        """The verifier of every action under a mode's sampling setting."""
        return [self.verifiers[position] for position in mode.verifier_of]

    def efficiency(self, features: dict[str, Tensor], body: tuple[Tensor, ...]) -> Tensor:
        """A regressor's predicted block efficiencies for one root, float32 [A]; a policy's logits.

        Args:
            body: as from `body_of`.
        """
        return self._module.efficiency(_on_cpu(features), *body)

    def further(self, hidden_D: Tensor, scalars_F: Tensor, head: tuple[Tensor, ...], cost_A: Tensor) -> int:
        """The best further action at a drafted token, by its position in `cost_A`; `head` as from `head_of`."""
        return self._module.further(hidden_D, scalars_F, *head, cost_A)

    def body_of(self, mode: Mode) -> tuple[Tensor, ...]:
        """What the root's network needs to tell what every action yields with its verifier."""
        *_, sums_IO = self._head
        if len(sums_IO) == 0:  # a policy's
            return torch.zeros(0, dtype=torch.int64), sums_IO.view(0, 0)
        sums_IA = sums_IO[:, mode.options]
        needed_I = sums_IA.any(1).nonzero().flatten()
        return needed_I, sums_IA[needed_I].T.contiguous()

    def head_of(self, mode: Mode) -> tuple[Tensor, ...]:
        """What the trunk's network needs to tell what the mode's further actions add."""
        weight_IH, bias_I, sums_IO = self._head
        sums_IA = sums_IO[:, [mode.options[a] for a in mode.further]]
        needed = sums_IA.any(1)
        return weight_IH[needed].contiguous(), bias_I[needed], sums_IA[needed].T.contiguous()


def _on_cpu(features: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in features.items()}


@contextmanager
def torchscript() -> Iterator[None]:
    """TorchScript is deprecated from torch 2.10 on; that is known, and only that warning is left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".?torch\.jit\.\w+.? is deprecated", category=DeprecationWarning)
        yield


def load_selector(folder: str | Path, latency: str | Path | LatencyProfile | None = None) -> Selector:
    """Read an artefact directory.

    Args:
        folder: as written by the export stage.
        latency: another machine's profile; the one in the directory if None.

    Raises:
        InputError: a file is missing, its checksum does not match, the schema version is another one, or the profile
            is of another pair or lacks the verifier.
    """
    folder = Path(folder)
    _check_files(folder)
    config = json.loads((folder / "config.json").read_text())
    if config.get("format") != FORMAT or config.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{folder / 'config.json'}: {config.get('format')} of schema version {config.get('schema_version')}; "
            f"this program reads {FORMAT} of schema version {SCHEMA_VERSION}: export the selector again"
        )
    if isinstance(latency, LatencyProfile):
        profile = latency
    else:
        profile = LatencyProfile.load(Path(latency) if latency is not None else folder / "latency.json")
    if profile.pair != config["pair"]["fingerprint"]:
        raise InputError(f"{folder}: the latency profile was measured with another pair")
    if unmeasured := set(config["verifiers"]) - set(profile.verify):
        raise InputError(f"the latency profile of {profile.device} has no times for {', '.join(sorted(unmeasured))}")
    modes = [Mode.of(entry) for entry in config["modes"]]
    own = LatencyProfile.load(folder / "latency.json")
    if profile != own:
        modes = [_retuned(config, at, modes[at], profile, own) for at in range(len(modes))]
    with torchscript():
        module = torch.jit.load(str(folder / "selector.pt"), map_location="cpu").eval()
        if profile != own:
            _retune(module, decision_tables(profile, modes, config["verifiers"], config["objective"] == "regressor"))
        buffers = dict(module.named_buffers())
        head = tuple(buffers[name].clone() for name in HEAD)
        module = torch.jit.freeze(module, preserved_attrs=["efficiency", "further"])
    return Selector(module, head, config, profile, modes)


def _check_files(folder: Path) -> None:
    listing = folder / CHECKSUMS
    try:
        lines = listing.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{listing}: missing or unreadable; this is no selector directory") from error
    listed = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        listed[name] = digest
    if not {"selector.pt", "config.json", "latency.json"} <= set(listed):
        raise InputError(f"{listing}: damaged; export the selector again")
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing; export the selector again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise InputError(f"{path}: its checksum does not match {CHECKSUMS}; export the selector again")


class DecisionTables(NamedTuple):
    """What decisions at the root are charged with: the sampling settings, temperature and top-p; lengths; and seconds,
    with the verifiers that `option_SA` says, int64. A policy's outputs are actions, whatever their verifiers."""

    settings_S2: Tensor
    lengths_L: Tensor
    seconds_SLA: Tensor
    option_SA: Tensor


def decision_tables(
    profile: LatencyProfile, modes: Sequence[Mode], verifiers: Sequence[str], regressor: bool
) -> DecisionTables:
    """Those of some modes on one machine."""
    actions = ActionSpace.default().actions
    tables = [
        profile.table(actions, [verifiers[position] for position in mode.verifier_of], True, filtered=mode.top_p < 1)
        for mode in modes
    ]
    settings_S2 = torch.tensor([[mode.temperature, mode.top_p] for mode in modes])
    options = [mode.options if regressor else range(len(actions)) for mode in modes]
    seconds_SLA = torch.stack([seconds_LA for _, seconds_LA in tables])
    return DecisionTables(settings_S2, tables[0][0], seconds_SLA, torch.tensor([list(each) for each in options]))


def _retune(module: torch.jit.ScriptModule, tables: DecisionTables) -> None:
    """Put another machine's times into a regressor and find its g on the calibration predictions."""
    buffers = dict(module.named_buffers())
    predicted_RO = buffers["calibration_RO"].float()
    if len(predicted_RO) == 0:
        return  # a policy sees times only through its features
    module.lengths_L, module.seconds_SLA, module.option_SA = tables.lengths_L, tables.seconds_SLA, tables.option_SA
    setting_R = buffers["calibration_setting_R"]
    predicted_RA = predicted_RO.gather(-1, tables.option_SA[setting_R])
    weight_R1 = buffers["calibration_weight_R"].unsqueeze(-1)
    seconds_RA = interpolated_at(tables.seconds_SLA, tables.lengths_L, setting_R, buffers["calibration_length_R"])
    buffers["gain"].fill_(best_gain(weight_R1 * predicted_RA, weight_R1 * seconds_RA))


def _middle(latency: LatencyProfile) -> int:
    """The context length at which static trees are compared: in the middle of those that were measured."""
    return latency.draft.lengths[len(latency.draft.lengths) // 2]


def _static_table(config: dict, at: int, latency: LatencyProfile, length: int) -> tuple[Tensor, Tensor]:
    """Block efficiencies of the static trees under a mode's sampling setting, and their times; [U, A] each."""
    entry, actions = config["modes"][at], ActionSpace.default().actions
    filtered = entry["top_p"] < 1
    seconds_UA = torch.tensor(
        [
            [latency.action_seconds(action, length, verifier, filtered=filtered) for action in actions]
            for verifier in config["verifiers"]
        ]
    )
    return torch.tensor(entry["mean_efficiency"]), seconds_UA


def _static_speeds(table: tuple[Tensor, Tensor], verifier_of: Sequence[int]) -> Tensor:
    """Of the static trees, each with its verifier; tokens per second, [A]."""
    tokens_UA, seconds_UA = table
    verifier_1A = torch.tensor([list(verifier_of)])
    return tokens_UA.gather(0, verifier_1A)[0] / seconds_UA.gather(0, verifier_1A)[0]


def _retuned(config: dict, at: int, mode: Mode, latency: LatencyProfile, tuned_for: LatencyProfile) -> Mode:
    """A mode with another machine's verifiers and best static tree, and g moved in proportion to the trees' speeds."""
    length = _middle(tuned_for)  # contexts of the traces, on both machines
    table = _static_table(config, at, latency, length)
    verifier_of = worth_most(*table)
    speed_A = _static_speeds(table, verifier_of)
    best, actions = int(speed_A.argmax()), ActionSpace.default().actions
    before = _static_speeds(_static_table(config, at, tuned_for, length), mode.verifier_of)[actions.index(mode.action)]
    # which further actions are ever the best is not known there: all are weighed
    further = tuple(range(len(actions)))
    gain = mode.gain * float(speed_A[best] / before)
    return replace(mode, action=actions[best], gain=gain, further=further, first=0, verifier_of=verifier_of)


def best_gain(efficiency_BA: Tensor, seconds_BA: Tensor, tolerance: float = 1e-9) -> float:
    """The speed g, in tokens per second, at which `mean_B max_A (E - g T)` is zero (Dinkelbach).

    Choosing `argmax_A E - g T` at that g maximises total tokens over total time, which the action with the best own
    ratio does not.
    """
    gain = 0.0
    for _ in range(100):
        best_B1 = (efficiency_BA - gain * seconds_BA).argmax(-1, keepdim=True)
        tokens = efficiency_BA.gather(-1, best_B1).sum(dtype=torch.float64)
        previous, gain = gain, float(tokens / seconds_BA.gather(-1, best_B1).sum(dtype=torch.float64))
        if abs(gain - previous) <= tolerance * gain:
            break
    return gain
