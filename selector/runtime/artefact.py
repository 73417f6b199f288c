"""The files and the config of an artefact directory, and the checks of a root's features."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.decision import Mode
from selector.files import first_line
from selector.latency import LatencyProfile
from selector.schema import (
    FULL,
    HIDDEN_STATES,
    LOG,
    MATCH,
    SCALARS_KEY,
    SCHEMAS,
    InputError,
    Schema,
    sha256,
)
from selector.tables import number

FORMAT = "espalier-selector-11"
CHECKSUMS = "SHA256SUMS"
REGISTRY = "models:/"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Features = dict[str, Tensor]


@dataclass(frozen=True)
class ArtefactConfig:
    """The contents of `config.json`."""

    schema: Schema
    ranges: list[tuple[float, float]]  # of the scalars at the training roots, to which the network's inputs are clamped
    objective: str  # `regressor` or `policy`
    feature_level: str  # of the network's input where everything is known
    verifier: str
    hidden_states: dict[str, int]  # widths, in schema order; empty for a light selector
    space: ActionSpace
    fallback: Action  # for a root without features
    modes: tuple[Mode, ...]
    pair: dict[str, Any] = field(default_factory=dict)  # names of the models and their `fingerprint`
    facts: dict[str, Any] = field(default_factory=dict)  # `metrics`, `run_id`, `provenance`, `versions`, `checksums`

    @property
    def regressor(self) -> bool:
        """Whether the network predicts survivals; a policy's outputs are logits of the actions."""
        return self.objective == "regressor"

    @property
    def metrics(self) -> dict[str, Any]:
        """Figures of the training and the evaluation."""
        return dict(self.facts["metrics"])

    def static_speeds(self, mode: Mode, latency: LatencyProfile) -> Tensor:
        """Tokens per second of each of `space.trees` under a mode's setting, at the middle measured context length."""
        own = latency.at_batch(mode.batch)
        length = own.draft.lengths[len(own.draft.lengths) // 2]
        seconds = [own.action_seconds(tree, length, self.verifier, (), mode.setting) for tree in self.space.trees]
        return torch.tensor(mode.mean_efficiency) / torch.tensor(seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "schema": self.schema.name,
            "objective": self.objective,
            "feature_level": self.feature_level,
            "verifier": self.verifier,
            "features": {
                "early": self.schema.first,
                "scalars": [
                    {**asdict(scalar), "lowest": low, "highest": high}
                    for scalar, (low, high) in zip(self.schema.scalars, self.ranges, strict=True)
                ],
                "hidden_states": self.hidden_states,
            },
            "space": self.space.to_json(),
            "actions": [list(action) for action in self.space],
            "fallback": list(self.fallback),
            "modes": [mode.row() for mode in self.modes],
            "pair": self.pair,
            **self.facts,
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> ArtefactConfig:
        """Raises ValueError, KeyError, TypeError or AttributeError where the parts do not fit together."""
        features, schema = values["features"], SCHEMAS[values["schema"]]
        config = cls(
            schema=schema,
            ranges=[(number(each["lowest"]), number(each["highest"])) for each in features["scalars"]],
            objective=values["objective"],
            feature_level=values["feature_level"],
            verifier=values["verifier"],
            hidden_states=features["hidden_states"],
            space=ActionSpace.of_json(values["space"]),
            fallback=Action.of(values["fallback"]),
            modes=tuple(map(Mode.of, values["modes"])),
            pair=values["pair"],
        )
        if not config._fits() or features["early"] != schema.first:
            raise ValueError("its parts do not fit together")
        if [Action.of(action) for action in values["actions"]] != list(config.space):
            raise ValueError("the actions are not those of the space")
        config.facts.update({name: value for name, value in values.items() if name not in config.to_json()})
        return config

    def _fits(self) -> bool:
        space, levels = self.space, self.schema.levels
        seen = (), (MATCH,), levels[:1], (self.feature_level,)
        hidden_states = HIDDEN_STATES if self.feature_level == FULL else ()
        return (
            len(self.modes) > 0
            and all(
                mode.action in space.trees
                and (mode.rule is None or mode.rule.length in space.lookups)
                and mode.feature_levels[-1:] in seen
                and mode.level in (levels if self.schema == LOG else ("",))
                and max(mode.allowed, default=0) < len(space)
                and len(mode.mean_efficiency) == len(space.trees)
                for mode in self.modes
            )
            and self.fallback in space.trees
            and self.feature_level in (levels[1], FULL)
            and self.objective in ("regressor", "policy")
            and set(self.hidden_states) == set(hidden_states)
            and all(type(width) is int for width in self.hidden_states.values())
            and isinstance(self.verifier, str)
            and isinstance(self.pair["fingerprint"], str)
        )


def read_config(path: Path) -> ArtefactConfig:
    """`config.json`; InputError where it is damaged or of another version."""
    try:
        values = json.loads(path.read_text())
        if (found := values["format"]) != FORMAT:
            raise InputError(f"{path}: {found}; this program reads {FORMAT}: export the selector again")
        ours, theirs = list(SCHEMAS[values["schema"]].names), [each["name"] for each in values["features"]["scalars"]]
        if ours != theirs:
            other = ", ".join(sorted({*ours} ^ {*theirs})[:3]) or "their order"
            raise InputError(f"{path}: its scalars are not this program's ({other}): train and export it again")
        return ArtefactConfig.of_json(values)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}); export the selector again") from error


def local_folder(folder: str | Path) -> Path:
    """The directory itself, or the local copy of a repository on the hub or of a version in MLflow's registry, which
    is downloaded if necessary.

    `folder` is a directory, `organisation/name`, `models:/name/version` or `models:/name@alias`. Raises InputError
    where there is no such directory and the download fails.
    """
    if str(folder).startswith(REGISTRY):
        return _of_registry(str(folder))
    path = Path(folder)
    if path.is_dir() or isinstance(folder, Path) or not HUB_ID.fullmatch(folder):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise InputError(f"{folder}: no such directory; to fetch it from the hub, install huggingface_hub") from error
    try:
        return Path(snapshot_download(folder))
    except Exception as error:  # the network, the hub and the cache raise many kinds
        raise InputError(f"{folder}: no such directory, and the hub does not give it: {first_line(error)}") from error


def _of_registry(uri: str) -> Path:
    try:
        from mlflow.artifacts import download_artifacts
    except ModuleNotFoundError as error:
        raise InputError(f"{uri}: to read it from MLflow's registry, install mlflow") from error
    try:
        path = Path(download_artifacts(uri))
        return next(path.glob(f"data/*/{CHECKSUMS}")).parent
    except StopIteration as error:
        raise InputError(f"{uri}: holds no selector directory") from error
    except Exception as error:  # the store raises many kinds
        reason = first_line(error)
        raise InputError(f"{uri}: MLflow does not give it (is MLFLOW_TRACKING_URI set?): {reason}") from error


def check_files(folder: Path) -> None:
    """InputError where a file is missing or does not match the list of checksums."""
    listing = folder / CHECKSUMS
    try:
        lines = listing.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{listing}: missing or unreadable; this is no selector directory") from error
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if not {"selector.pt", "model.safetensors", "config.json", "latency.json"} <= set(listed):
        raise InputError(f"{listing}: damaged; export the selector again")
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing; export the selector again")
        if sha256(path) != digest:
            raise InputError(f"{path}: its checksum does not match {CHECKSUMS}; export the selector again")


def checked(features: Features, widths: dict[str, int], most_axes: int, early: int | None = None) -> Features:
    """The features named in `widths`, on the CPU.

    Args:
        widths: of the last axis, by name.
        most_axes: 1 for one root, 2 where a batch is accepted, too.
        early: number of scalars that suffice without the other features; None where all features are needed.

    Raises:
        InputError: a feature is missing, of another shape or dtype than the schema's, or not finite; names it.
    """
    scalars = features.get(SCALARS_KEY)
    if early is not None and isinstance(scalars, Tensor) and scalars.shape[-1:] == (early,):
        widths = {SCALARS_KEY: early}
    read: Features = {}
    for name, width in widths.items():
        value = features.get(name)
        if not isinstance(value, Tensor):
            raise InputError(f"features: {name} {'is missing' if value is None else 'is no tensor'}")
        shape = value.shape
        if value.dtype != torch.float32 or not 0 < len(shape) <= most_axes or shape[-1] != width:
            raise InputError(f"features: {name} is {value.dtype} {list(shape)}; torch.float32 [{width}] is needed")
        read[name] = value if value.is_cpu else value.cpu()
    if len(read) > 1 and len({value.shape[:-1] for value in read.values()}) > 1:
        raise InputError("features: batches of different sizes")
    for name, value in read.items():
        if not math.isfinite(float(value.sum())):  # one call, because the sum keeps any NaN or infinity
            raise InputError(f"features: {name} is not finite")
    return read


def in_words(temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0) -> str:
    """A sampling setting; a top-k or min-p that keeps everything is left out."""
    further = f", top-k {top_k}" * (top_k != 0) + f", min-p {min_p:g}" * (min_p != 0)
    return f"temperature {temperature:g}, top-p {top_p:g}{further}"


def check_setting(temperature: float, top_p: float, batch: float = 1, top_k: int = 0, min_p: float = 0.0) -> None:
    """InputError where the sampling setting or the number of requests is out of range."""
    if not (0 <= temperature < math.inf and 0 < top_p <= 1 and top_k >= 0 and 0 <= min_p <= 1):
        raise InputError(f"{in_words(temperature, top_p, top_k, min_p)}: no sampling setting")
    if not 1 <= batch < math.inf:
        raise InputError(f"batch {batch:g}: there is at least one request")
