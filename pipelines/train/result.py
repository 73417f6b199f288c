"""What training left behind, as later stages read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import traces_folder
from pipelines.latency.profile import load_profile
from pipelines.run import read_json, require
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.schema import PAIR, InputError, sha256
from selector.train.module import SelectorModule


def inputs(config: Config, profile: LatencyProfile) -> dict[str, Any]:
    """Everything that the trained selector follows from."""
    return {
        "train": config.train.model_dump(mode="json"),
        "seed": config.seed,
        "scalars": PAIR.fingerprint,
        "traces": {name: s["sha256"] for name, s in read_manifest(traces_folder(config))["shards"].items()},
        "latency": profile.to_json(),
    }


def load_result(config: Config) -> dict[str, Any]:
    """What training found; InputError unless the stage is finished and was run with this config."""
    require(config, "train", inputs(config, load_profile(config)))
    return read_json(config.folder / "training" / "result.json", "train")


def chosen_of(result: dict[str, Any]) -> dict[str, Any]:
    """The entry of the selector that was kept."""
    return result["selectors"][result["chosen"]]


def rule_of(result: dict[str, Any], setting: Sampling, verifier: str) -> Mode:
    """The lookup rule that was tuned for a sampling setting and verifier; InputError where there is none."""
    for entry in result["rules"]:
        if entry["verifier"] == verifier and (mode := Mode.of(entry)).sampling == setting:
            return mode
    raise InputError(f"training tuned no rule for lookups with {verifier}: run the train stage again")


def checkpoint_of(config: Config, name: str, result: dict[str, Any]) -> Path:
    return config.folder / "training" / result["selectors"][name]["checkpoint"]


def load_module(config: Config, name: str, result: dict[str, Any]) -> SelectorModule:
    """A trained module; InputError where its checkpoint is damaged, or a weight is not finite."""
    path = checkpoint_of(config, name, result)
    try:
        module = SelectorModule.load_from_checkpoint(path, map_location="cpu").eval()
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InputError(f"{path} is damaged: run the train stage again") from error
    unseen_F = torch.tensor([not scalar.learned for scalar in module.schema.scalars])  # their scale is infinite
    for key, values in module.state_dict().items():
        if not bool((values.isfinite() | (unseen_F if key.endswith("scale_F") else False)).all()):
            raise InputError(f"{path}: a weight is not finite: run the train stage again")
    return module


def decision_digest(config: Config, result: dict[str, Any]) -> dict[str, str]:
    """What decodes: the chosen checkpoint, and how it decides."""
    return {
        "training": sha256(checkpoint_of(config, result["chosen"], result)),
        "decisions": sha256(config.folder / "training" / "result.json"),
    }
