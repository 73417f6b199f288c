"""The files of an artefact directory, and the checks of them and of a root's features.

Legend: N known keys, J keys of a root, K means (`MEANS`), R roots, F = J (K + 1) scalars.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector import schema
from selector.actions import Action, ActionSpace
from selector.decision import Mode
from selector.files import first_line, read_tensors
from selector.latency import LatencyProfile, number
from selector.schema import FORMAT, FULL, HIDDEN_STATES, LOG, SCALARS_KEY, SCHEMAS, InputError, Schema, sha256
from selector.train.network import RootNetwork

NAMED = f"espalier-selector-{FORMAT}"
CHECKSUMS = "SHA256SUMS"
FILE = "tokens.safetensors"  # the statistics by token
REGISTRY = "models:/"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WEIGHT = 20.0  # of the mean of all roots, in observations
LEAST = 2  # occurrences of a key that is kept
Features = dict[str, Tensor]
Array = NDArray[Any]


@dataclass(frozen=True)
class TokenStatistics:
    """Means of accepted tokens over the training roots that share a key (`selector.schema.KEYS`). Those of a rare key
    are shrunk to those of all roots."""

    keys_N: Array  # int64, ascending
    counts_N: Array  # number of training roots, float64
    sums_NK: Array  # of the values at these roots, float64
    means_K: Array  # over all roots, float64

    @classmethod
    def fit(cls, keys_RJ: Array, values_RK: Array, source_R: Array) -> tuple[TokenStatistics, Array]:
        """The statistics of some roots, and the scalars of these roots, float64 [R, F]. The scalars leave out the
        root's own source: a held-out root knows none of its labels either."""
        (R, J), K = keys_RJ.shape, values_RK.shape[1]
        keys_N, at_RJ = np.unique(keys_RJ, return_inverse=True)
        at, values = at_RJ.reshape(-1), np.repeat(values_RK, J, axis=0)
        counts_N, sums_NK = _summed(at, values, len(keys_N))
        _, own = np.unique(np.repeat(source_R, J) * len(keys_N) + at, return_inverse=True)
        own_counts, own_sums = _summed(own, values, int(own.max()) + 1)
        means_K = values_RK.mean(0)
        counts, sums = counts_N[at] - own_counts[own], sums_NK[at] - own_sums[own]
        often_N = counts_N >= LEAST
        found = cls(keys_N[often_N], counts_N[often_N], sums_NK[often_N], means_K)
        return found, _shrunk(counts, sums, means_K).reshape(R, J * (K + 1))

    @classmethod
    def empty(cls) -> TokenStatistics:
        K = len(schema.MEANS)
        return cls(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, K)), np.zeros(K))

    def of(self, keys_J: Sequence[int]) -> Array:
        """The scalars of some keys, float64 [F]: for each key its means, and its number of occurrences."""
        place_of, rows_NF = self._by_key
        found: Array = rows_NF[[place_of.get(key, -1) for key in keys_J]].ravel()
        return found

    @cached_property
    def _by_key(self) -> tuple[dict[int, int], Array]:
        # each key's row among the scalars; the last row is for unknown keys
        counts_N, sums_NK = np.append(self.counts_N, 0.0), np.append(self.sums_NK, 0.0 * self.means_K[None], axis=0)
        return {key: place for place, key in enumerate(self.keys_N.tolist())}, _shrunk(counts_N, sums_NK, self.means_K)

    def to_tensors(self) -> dict[str, Array]:
        numbers = {name: getattr(self, name).astype(np.float32) for name in ("counts_N", "sums_NK", "means_K")}
        return {"keys_N": self.keys_N, **numbers}

    @classmethod
    def load(cls, folder: Path) -> TokenStatistics:
        """The statistics in an artefact directory, empty where it has none; InputError where the file is damaged."""
        path = folder / FILE
        if not path.exists():
            return cls.empty()
        read = read_tensors(path)
        N, K = len(read.get("keys_N", ())), len(schema.MEANS)
        _check(path, read, {"keys_N": (N,), "counts_N": (N,), "sums_NK": (N, K), "means_K": (K,)})
        return cls(read["keys_N"], *(read[name].astype(np.float64) for name in ("counts_N", "sums_NK", "means_K")))


def _summed(at: Array, values: Array, size: int) -> tuple[Array, Array]:
    sums = np.stack([np.bincount(at, column, size) for column in values.T], axis=1)
    return np.bincount(at, minlength=size).astype(np.float64), sums


def _shrunk(counts_J: Array, sums_JK: Array, means_K: Array) -> Array:
    means_JK = (sums_JK + WEIGHT * means_K) / (counts_J + WEIGHT)[:, None]
    return np.concatenate([means_JK, np.minimum(counts_J, schema.MOST_COUNTED)[:, None]], axis=1)


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
    facts: dict[str, Any] = field(default_factory=dict)  # `metrics`, `run_id`, `provenance`, `versions`

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
        """Tokens per second of each of `space.trees` under a mode's setting, at the middle measured context length."""
        own = latency.at_batch(mode.batch)
        length = own.draft.lengths[len(own.draft.lengths) // 2]
        seconds = [own.action_seconds(tree, length, self.verifier, (), mode.sampling) for tree in self.space.trees]
        return torch.tensor(mode.mean_efficiency) / torch.tensor(seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": NAMED,
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
        features, known = values["features"], SCHEMAS[values["schema"]]
        config = cls(
            schema=known,
            ranges=[(number(each["lowest"]), number(each["highest"])) for each in features["scalars"]],
            hidden_states=features["hidden_states"],
            space=ActionSpace.of_json(values["space"]),
            fallback=Action.of(values["fallback"]),
            modes=tuple(map(Mode.of, values["modes"])),
            **{name: values[name] for name in ("objective", "feature_level", "verifier", "pair")},
        )
        if not config._fits() or features["early"] != known.first or values["actions"] != config.to_json()["actions"]:
            raise ValueError("its parts do not fit together")
        config.facts.update({name: value for name, value in values.items() if name not in config.to_json()})
        return config

    def _fits(self) -> bool:
        space, levels = self.space, self.schema.levels
        return (
            len(self.modes) > 0
            and all(
                mode.action in space.trees
                and (mode.rule is None or mode.rule.length in space.lookups)
                and mode.feature_levels[-1:] in ((), levels[:1], (self.feature_level,))
                and mode.level in (levels if self.schema == LOG else ("",))
                and max(mode.allowed, default=0) < len(space)
                and len(mode.mean_efficiency) == len(space.trees)
                for mode in self.modes
            )
            and self.fallback in space.trees
            and self.feature_level in (levels[1], FULL)
            and self.objective in ("regressor", "policy")
            and set(self.hidden_states) == set(HIDDEN_STATES if self.feature_level == FULL else ())
            and all(type(width) is int and width > 0 for width in self.hidden_states.values())
            and isinstance(self.verifier, str)
            and isinstance(self.pair["fingerprint"], str)
        )


def read_config(path: Path) -> ArtefactConfig:
    """`config.json`; InputError where it is damaged or of another version."""
    try:
        values = json.loads(path.read_text())
        if not (other := _other_version(values)):
            return ArtefactConfig.of_json(values)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}); export the selector again") from error
    raise InputError(f"{path}: {other}")


def _other_version(values: dict[str, Any]) -> str:
    if values["format"] != NAMED:
        return f"{values['format']}; this program reads {NAMED}: export the selector again"
    ours, theirs = list(SCHEMAS[values["schema"]].names), [each["name"] for each in values["features"]["scalars"]]
    differing = ", ".join(sorted({*ours} ^ {*theirs})[:3]) or "their order"
    return "" if ours == theirs else f"its scalars are not this program's ({differing}): train and export it again"


def read_weights(path: Path, config: ArtefactConfig) -> dict[str, Array]:
    """`model.safetensors`; InputError where an array of the network is missing, of another shape or not finite."""
    weights, bias = read_tensors(path), re.compile(re.escape(config.prefix) + r"mlp\.(\d+)\.bias")
    sizes = {int(found[1]): each.size for name, each in weights.items() if (found := bias.fullmatch(name))}
    outputs = len(config.space.sums_SA) if config.regressor else len(config.space)
    width = np.size(weights.get(f"{config.prefix}blocks.0.0.bias", ()))
    hidden = [sizes[i] for i in sorted(sizes)][:-1]
    with torch.device("meta"):  # for its shapes alone
        widths = list(config.hidden_states.values())
        network = RootNetwork(config.schema, widths, outputs, width, hidden, policy=not config.regressor)
    _check(path, weights, {config.prefix + name: tuple(each.shape) for name, each in network.state_dict().items()})
    return weights


def _check(path: Path, arrays: dict[str, Array], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        own = arrays.get(name)
        positive = name.endswith(("scale_F", "counts_N"))  # the scale of an unseen scalar is infinite
        if own is None or own.shape != shape or not (own > 0 if positive else np.isfinite(own)).all():
            raise InputError(f"{path}: {name} is missing, of another shape or not finite; export the selector again")


def local_folder(folder: str | Path) -> Path:
    """The directory itself, or the local copy of a repository on the hub or of a version in MLflow's registry, which
    is downloaded if necessary.

    `folder` is a directory, `organisation/name`, `models:/name/version` or `models:/name@alias`. Raises InputError
    where there is no such directory and the download fails.
    """
    name = str(folder)
    try:
        if name.startswith(REGISTRY):
            failure = "MLflow does not give it (is MLFLOW_TRACKING_URI set?)"
            from mlflow.artifacts import download_artifacts

            return next(Path(download_artifacts(name)).glob(f"data/*/{CHECKSUMS}")).parent
        if isinstance(folder, str) and HUB_ID.fullmatch(name) and not Path(name).is_dir():
            failure = "no such directory, and the hub does not give it"
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name))
    except Exception as error:  # a missing library, the network, the stores and their caches raise many kinds
        raise InputError(f"{name}: {failure}: {first_line(error)}") from error
    return Path(folder)


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
    for path, digest in ((folder / name, digest) for name, digest in listed.items()):
        if not path.is_file() or sha256(path) != digest:
            state = "its checksum does not match" if path.is_file() else "missing"
            raise InputError(f"{path}: {state}; export the selector again")


def checked(features: Features, widths: dict[str, int], most_axes: int, early: int | None = None) -> Features:
    """The features named in `widths`, with these sizes of their last axes, on the CPU; or the first `early` scalars.

    `most_axes` is 1 for one root, and 2 where a batch is accepted, too. Raises InputError, which names the feature,
    where one is missing, of another shape or dtype than the schema's, or not finite.
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
