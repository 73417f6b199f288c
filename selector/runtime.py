"""Artefact directory -> decisions. Needs torch alone.

Legend: B roots, R calibration roots, A actions.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from selector.actions import Action
from selector.latency import LatencyProfile, Table, interpolated
from selector.schema import SCHEMA_VERSION, InputError

__all__ = ["LatencyProfile", "Selector", "Table", "load_selector"]

FORMAT = "espalier-selector"
CHECKSUMS = "SHA256SUMS"


class Selector:
    """A loaded selector.

    Attributes:
        actions: the action table; `scores` follows its order.
        verifier: the verifier it was trained for.
        latency: the profile that its features and decisions are based on.
        fallback: the action for a root without features.
        config: the artefact's `config.json`.
    """

    def __init__(self, module: torch.jit.ScriptModule, config: dict, latency: LatencyProfile) -> None:
        self._module = module
        self.config = config
        self.latency = latency
        self.actions = tuple(Action(*action) for action in config["actions"])
        self.verifier: str = config["verifier"]
        self.fallback = Action(*config["fallback"])

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
            f"this program reads {FORMAT} of schema version {SCHEMA_VERSION}"
        )
    if isinstance(latency, LatencyProfile):
        profile = latency
    else:
        profile = LatencyProfile.load(Path(latency) if latency is not None else folder / "latency.json")
    if profile.pair != config["pair"]["fingerprint"]:
        raise InputError(f"{folder}: the latency profile was measured with another pair")
    with torchscript():
        module = torch.jit.load(str(folder / "selector.pt"), map_location="cpu").eval()
        if latency is not None:
            _retune(module, config, profile)
        module = torch.jit.freeze(module)
    return Selector(module, config, profile)


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


def _retune(module: torch.jit.ScriptModule, config: dict, profile: LatencyProfile) -> None:
    """Put another machine's times into a regressor and find its g on the calibration predictions."""
    buffers = dict(module.named_buffers())
    predicted_RA = buffers["calibration_RA"].float()
    if len(predicted_RA) == 0:
        return  # a policy sees times only through its features
    actions = tuple(Action(*action) for action in config["actions"])
    lengths_L, seconds_LA = profile.table(actions, config["verifier"], selector=True)
    module.lengths_L, module.seconds_LA = lengths_L, seconds_LA
    seconds_RA = interpolated(seconds_LA, lengths_L, buffers["calibration_length_R"])
    buffers["gain"].fill_(best_gain(predicted_RA, seconds_RA))


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
