"""The files of an artefact directory, and the checks of them and of a root's features."""

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
from selector.latency import LatencyProfile, number
from selector.schema import (
    FORMAT,
    FULL,
    HIDDEN_STATES,
    LOG,
    SCALARS_KEY,
    SCHEMAS,
    InputError,
    Schema,
    sha256,
)

NAMED = f"espalier-selector-{FORMAT}"
CHECKSUMS = "SHA256SUMS"
REGISTRY = "models:/"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
Features = dict[str, Tensor]


@dataclass(frozen=True)
class ArtefactConfig:
    """The contents of `config.json`."""

    schema: Schema
    # of the scalars at the training roots, to which the network's inputs are clamped
    ranges: list[tuple[float, float]]
    objective: str  # `regressor` or `policy`
    feature_level: str  # of the network's input where everything is known
    verifier: str
    hidden_states: dict[str, int]  # widths, in schema order; empty for a light selector
    space: ActionSpace
    fallback: Action  # for a root without features
    modes: tuple[Mode, ...]
    # names of the models and their `fingerprint`
    pair: dict[str, Any] = field(default_factory=dict)
    # `metrics`, `run_id`, `provenance`, `versions`
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def regressor(self) -> bool:
        """Whether the network predicts survivals; a policy's outputs are logits of the actions."""
        return self.objective == "regressor"

    @property
    def prefix(self) -> str:
        """Of the names of the network's arrays in `model.safetensors`."""
        return "network.body." if self.regressor else "network."

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(self.facts["metrics"])

    def static_speeds(self, mode: Mode, latency: LatencyProfile) -> Tensor:
        """Tokens per second of each of `space.trees` under a mode's setting, at the middle measured
        context length."""
        profile = latency.at_batch(mode.batch)
        length = profile.draft.lengths[len(profile.draft.lengths) // 2]
        seconds = []
        for tree in self.space.trees:
            seconds.append(profile.action_seconds(tree, length, self.verifier, (), mode.sampling))
        return torch.tensor(mode.mean_efficiency) / torch.tensor(seconds)

    def to_json(self) -> dict[str, Any]:
        scalars = []
        for scalar, (low, high) in zip(self.schema.scalars, self.ranges, strict=True):
            scalars.append({**asdict(scalar), "lowest": low, "highest": high})
        return {
            "format": NAMED,
            "schema": self.schema.name,
            "objective": self.objective,
            "feature_level": self.feature_level,
            "verifier": self.verifier,
            "features": {
                "early": self.schema.first,
                "scalars": scalars,
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
        """Raises ValueError, KeyError, TypeError or AttributeError where the parts do not fit
        together."""
        features = values["features"]
        schema = SCHEMAS[values["schema"]]
        ranges = []
        for scalar in features["scalars"]:
            ranges.append((number(scalar["lowest"]), number(scalar["highest"])))
        config = cls(
            schema=schema,
            ranges=ranges,
            hidden_states=features["hidden_states"],
            space=ActionSpace.of_json(values["space"]),
            fallback=Action.of(values["fallback"]),
            modes=tuple(map(Mode.of, values["modes"])),
            objective=values["objective"],
            feature_level=values["feature_level"],
            verifier=values["verifier"],
            pair=values["pair"],
        )
        if (
            not config._fits()
            or features["early"] != schema.first
            or values["actions"] != config.to_json()["actions"]
        ):
            raise ValueError("its parts do not fit together")
        entries = config.to_json()
        for name, value in values.items():
            if name not in entries:
                config.facts[name] = value
        return config

    def _fits(self) -> bool:
        if not self.modes or not all(self._fits_mode(mode) for mode in self.modes):
            return False
        hidden_names = HIDDEN_STATES if self.feature_level == FULL else ()
        return (
            self.fallback in self.space.trees
            and self.feature_level in (self.schema.levels[1], FULL)
            and self.objective in ("regressor", "policy")
            and set(self.hidden_states) == set(hidden_names)
            and all(type(width) is int and width > 0 for width in self.hidden_states.values())
            and isinstance(self.verifier, str)
            and isinstance(self.pair["fingerprint"], str)
        )

    def _fits_mode(self, mode: Mode) -> bool:
        levels = self.schema.levels
        last_levels = ((), levels[:1], (self.feature_level,))
        mode_levels: tuple[str, ...] = levels if self.schema == LOG else ("",)
        return (
            mode.action in self.space.trees
            and (mode.rule is None or mode.rule.length in self.space.lookups)
            and mode.feature_levels[-1:] in last_levels
            and mode.level in mode_levels
            and max(mode.allowed, default=0) < len(self.space)
            and len(mode.mean_efficiency) == len(self.space.trees)
        )


def read_config(path: Path) -> ArtefactConfig:
    """`config.json`; InputError where it is damaged or of another version."""
    try:
        values = json.loads(path.read_text())
        other = _other_version(values)
        if not other:
            return ArtefactConfig.of_json(values)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path}: damaged ({type(error).__name__}); export the selector again"
        ) from error
    raise InputError(f"{path}: {other}")


def _other_version(values: dict[str, Any]) -> str:
    if values["format"] != NAMED:
        return f"{values['format']}; this program reads {NAMED}: export the selector again"
    ours = list(SCHEMAS[values["schema"]].names)
    theirs = [scalar["name"] for scalar in values["features"]["scalars"]]
    if ours == theirs:
        return ""
    differing_names = sorted(set(ours) ^ set(theirs))
    differing = ", ".join(differing_names[:3]) or "their order"
    return f"its scalars are not this program's ({differing}): train and export it again"


def local_folder(folder: str | Path) -> Path:
    """The directory itself, or the local copy of a repository on the hub or of a version in
    MLflow's registry, which is downloaded if necessary.

    `folder` is a directory, `organisation/name`, `models:/name/version` or `models:/name@alias`.
    Raises InputError where there is no such directory and the download fails.
    """
    name = str(folder)
    try:
        if name.startswith(REGISTRY):
            failure = "MLflow does not give it (is MLFLOW_TRACKING_URI set?)"
            from mlflow.artifacts import download_artifacts

            downloaded = Path(download_artifacts(name))
            return next(downloaded.glob(f"data/*/{CHECKSUMS}")).parent
        if isinstance(folder, str) and HUB_ID.fullmatch(name) and not Path(name).is_dir():
            failure = "no such directory, and the hub does not give it"
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name))
    # a missing library, the network, the stores and their caches raise many kinds
    except Exception as error:
        raise InputError(f"{name}: {failure}: {first_line(error)}") from error
    return Path(folder)


def check_files(folder: Path) -> None:
    """InputError where a file is missing or does not match the list of checksums."""
    listing = folder / CHECKSUMS
    try:
        lines = listing.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{listing}: missing or unreadable; this is no selector directory"
        ) from error
    listed = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        listed[name] = digest
    if not {"selector.pt", "model.safetensors", "config.json", "latency.json"} <= set(listed):
        raise InputError(f"{listing}: damaged; export the selector again")
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing; export the selector again")
        if sha256(path) != digest:
            raise InputError(f"{path}: its checksum does not match; export the selector again")


def checked(
    features: Features, widths: dict[str, int], most_axes: int, early: int | None = None
) -> Features:
    """The features named in `widths`, with these sizes of their last axes, on the CPU; or the first
    `early` scalars.

    `most_axes` is 1 for one root, and 2 where a batch is accepted, too. Raises InputError, which
    names the feature, where one is missing, of another shape or dtype than the schema's, or not
    finite.
    """
    scalars = features.get(SCALARS_KEY)
    if early is not None and isinstance(scalars, Tensor) and scalars.shape[-1:] == (early,):
        widths = {SCALARS_KEY: early}
    read: Features = {}
    for name, width in widths.items():
        value = features.get(name)
        if value is None:
            raise InputError(f"features: {name} is missing")
        if not isinstance(value, Tensor):
            raise InputError(f"features: {name} is no tensor")
        shape = value.shape
        if value.dtype != torch.float32 or not 0 < len(shape) <= most_axes or shape[-1] != width:
            raise InputError(
                f"features: {name} is {value.dtype} {list(shape)}; torch.float32 [{width}] is "
                "needed"
            )
        read[name] = value if value.is_cpu else value.cpu()
    if len(read) > 1 and len({value.shape[:-1] for value in read.values()}) > 1:
        raise InputError("features: batches of different sizes")
    for name, value in read.items():
        # one call, because the sum keeps any NaN or infinity
        if not math.isfinite(float(value.sum())):
            raise InputError(f"features: {name} is not finite")
    return read
