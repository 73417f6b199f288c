"""The files of an artefact directory, and the checks of them and of a root's features."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.decision import NETWORK, Setting
from selector.files import first_line
from selector.latency import LatencyProfile
from selector.layout import layout_of
from selector.schema import (
    FORMAT,
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
    settings: tuple[Setting, ...]
    # names of the models and their `fingerprint`
    pair: dict[str, Any] = field(default_factory=dict)
    # `metrics`, `run_id`, `provenance`, `versions`
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def regressor(self) -> bool:
        """Whether the network predicts survivals; under the policy objective its outputs are
        logits of the actions."""
        return self.objective == "regressor"

    @property
    def prefix(self) -> str:
        """Of the names of the network's arrays in `model.safetensors`."""
        return "network.body." if self.regressor else "network."

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(self.facts["metrics"])

    def static_speeds(self, setting: Setting, latency: LatencyProfile) -> Tensor:
        """Tokens per second of each of `space.trees` under a setting, at the middle measured
        context length."""
        profile = latency.at_batch(setting.batch)
        length = profile.draft.lengths[len(profile.draft.lengths) // 2]
        seconds = [
            profile.action_seconds(tree, length, self.verifier, (), setting.sampling)
            for tree in self.space.trees
        ]
        return torch.tensor(setting.mean_efficiency) / torch.tensor(seconds)

    @property
    def offered(self) -> list[Action]:
        """The actions that some setting may choose, in the order of the space."""
        positions: set[int] = {self.space.index(self.fallback)}
        for setting in self.settings:
            positions.add(self.space.index(setting.action))
            if setting.decider == NETWORK:
                positions.update(setting.positions(self.space).tolist())
            if setting.rule is not None:
                positions.update(map(self.space.index, setting.rule.lookups.values()))
        return [self.space.actions[position] for position in sorted(positions)]

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
            "trees": {str(self.space.index(action)): layout_of(action) for action in self.offered},
            "fallback": list(self.fallback),
            "settings": [setting.row() for setting in self.settings],
            "pair": self.pair,
            **self.facts,
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> ArtefactConfig:
        """The config of `to_json`."""
        scalars = values["features"]["scalars"]
        config = cls(
            schema=SCHEMAS[values["schema"]],
            ranges=[(scalar["lowest"], scalar["highest"]) for scalar in scalars],
            hidden_states=values["features"]["hidden_states"],
            space=ActionSpace.of_json(values["space"]),
            fallback=Action.of(values["fallback"]),
            settings=tuple(map(Setting.of, values["settings"])),
            objective=values["objective"],
            feature_level=values["feature_level"],
            verifier=values["verifier"],
            pair=values["pair"],
        )
        entries = config.to_json()
        facts = {name: value for name, value in values.items() if name not in entries}
        return replace(config, facts=facts)


def read_config(path: Path) -> ArtefactConfig:
    """`config.json`; InputError where it is of another version."""
    values = json.loads(path.read_text())
    if values["format"] != NAMED:
        raise InputError(
            f"{path}: {values['format']}; this program reads {NAMED}: export the selector again"
        )
    names = [scalar["name"] for scalar in values["features"]["scalars"]]
    if names != list(SCHEMAS[values["schema"]].names):
        raise InputError(
            f"{path}: its scalars are not this program's: train and export the selector again"
        )
    return ArtefactConfig.of_json(values)


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
            from mlflow import get_registry_uri
            from mlflow.artifacts import download_artifacts

            scheme, _, store = get_registry_uri().partition("sqlite:///")
            if not scheme and not Path(unquote(store)).exists():  # MLflow would make an empty one
                raise FileNotFoundError(f"there is no store {store}")
            downloaded = Path(download_artifacts(name))
            return next(downloaded.glob(f"artifacts/*/{CHECKSUMS}")).parent
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
        if not isinstance(value, Tensor):
            raise InputError(f"features: {name} is missing, or no tensor")
        shape = value.shape
        if value.dtype != torch.float32 or not 0 < len(shape) <= most_axes or shape[-1] != width:
            raise InputError(
                f"features: {name} is {value.dtype} {list(shape)}; torch.float32 [{width}] is "
                "needed"
            )
        # one call, because the sum keeps any NaN or infinity
        if not math.isfinite(float(value.sum())):
            raise InputError(f"features: {name} is not finite")
        read[name] = value.cpu()
    if len({value.shape[:-1] for value in read.values()}) > 1:
        raise InputError("features: batches of different sizes")
    return read
