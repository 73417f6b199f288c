"""What an artefact directory, and the features of a root, must be for a decision to mean anything."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace, choice_of
from selector.decision import Mode
from selector.latency import number
from selector.schema import FULL, HIDDEN_STATES, LOG, MATCH, SCALARS_KEY, SCHEMA_VERSION, SCHEMAS, InputError

FORMAT = "espalier-selector-7"
CHECKSUMS = "SHA256SUMS"
Features = dict[str, Tensor]


def check_files(folder: Path) -> None:
    """InputError where a file is missing, or is not what the list of checksums says."""
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


def read_config(path: Path) -> dict:
    """What the artefact says of itself; InputError where it is not of this program's version, or makes no sense."""
    try:
        config = json.loads(path.read_text())
        version = config["format"], config["schema_version"]
        if version == (FORMAT, SCHEMA_VERSION):
            space, schema = ActionSpace.of_json(config["space"]), SCHEMAS[config["schema"]]
            modes = [Mode.of(entry) for entry in config["modes"]]
            efficiencies = [number(e) for entry in config["modes"] for e in entry["mean_efficiency"]]
            fits = (
                len(modes) > 0
                and all(mode.action in space.trees for mode in modes)
                and all(mode.rule is None or mode.rule.length in space.lookups for mode in modes)
                and all(
                    mode.feature_levels[-1:] in ((), (MATCH,), schema.levels[:1], (config["feature_level"],))
                    for mode in modes
                )
                and all(mode.level in (schema.levels if schema == LOG else ("",)) for mode in modes)
                and max((at for mode in modes for at in mode.allowed), default=0) < len(space)
                and len(efficiencies) == len(modes) * len(space.trees)
                and [choice_of(action) for action in config["actions"]] == list(space.actions)
                and Action(*config["fallback"]) in space.trees
                and config["feature_level"] in (schema.levels[1], FULL)
                and config["objective"] in ("regressor", "policy")
                and config["features"]["early"] == schema.first
                and [each["name"] for each in config["features"]["scalars"]] == list(schema.names)
                and set(config["features"]["hidden_states"])
                == set(HIDDEN_STATES if config["feature_level"] == FULL else ())
                and all(type(width) is int for width in config["features"]["hidden_states"].values())
                and isinstance(config["verifier"], str)
                and isinstance(config["pair"]["fingerprint"], str)
            )
            if not fits:
                raise ValueError("its parts do not fit together")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}); export the selector again") from error
    if version != (FORMAT, SCHEMA_VERSION):
        raise InputError(
            f"{path}: {version[0]} of schema version {version[1]}; this program reads {FORMAT} of schema version "
            f"{SCHEMA_VERSION}: export the selector again"
        )
    return config


def checked(features: Features, widths: dict[str, int], most_axes: int, early: int | None = None) -> Features:
    """As `of_schema`; InputError also where a number is not finite."""
    read = of_schema(features, widths, most_axes, early)
    check_finite(read)
    return read


def check_finite(features: Features) -> None:
    """InputError where a number is NaN or infinite; names the feature."""
    for name, value in features.items():
        if not math.isfinite(float(value.sum())):  # one call, and a NaN or an infinity anywhere shows in it
            raise InputError(f"features: {name} is not finite")


def of_schema(features: Features, widths: dict[str, int], most_axes: int, early: int | None = None) -> Features:
    """The features that are read, on the CPU.

    Args:
        widths: by name, of the last axis.
        most_axes: 1 for one root, 2 where a batch will do, too.
        early: how many scalars alone will do; None where all features are needed.

    Raises:
        InputError: one is missing, or of another shape or dtype than the schema's; names it.
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
    return read


def check_setting(temperature: float, top_p: float, batch: float = 1) -> None:
    """InputError where this is no way to sample, or no number of requests."""
    if not (0 <= temperature < math.inf and 0 < top_p <= 1):
        raise InputError(f"temperature {temperature:g}, top-p {top_p:g}: no sampling setting")
    if not 1 <= batch < math.inf:
        raise InputError(f"batch {batch:g}: there is at least one request")
