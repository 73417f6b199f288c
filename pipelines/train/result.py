"""What training left behind, as later stages read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipelines.config import Config
from pipelines.data.recorded import traces_folder
from pipelines.latency.profile import load_profile
from pipelines.run import read_json, require
from selector.latency import LatencyProfile
from selector.schema import InputError, read_manifest, sha256
from selector.train.module import SelectorModule

NETWORKS = 10  # bump it when the same traces train another network, or its decisions are judged otherwise


def inputs(config: Config, profile: LatencyProfile) -> dict[str, Any]:
    """Everything the trained selector follows from."""
    return {
        "train": config.train.model_dump(mode="json"),
        "seed": config.seed,
        "networks": NETWORKS,
        "traces": {name: s["sha256"] for name, s in read_manifest(traces_folder(config))["shards"].items()},
        "latency": profile.to_json(),
    }


def chosen_of(result: dict[str, Any]) -> dict[str, Any]:
    """The selector that was kept."""
    return result["selectors"][result["chosen"]]


def load_result(config: Config) -> dict[str, Any]:
    """What training found; InputError unless the stage is finished and was run with this config."""
    profile = load_profile(config)
    require(config, "train", inputs(config, profile))
    return read_json(config.folder / "training" / "result.json", "train")


def checkpoint_of(config: Config, name: str, result: dict[str, Any]) -> Path:
    return config.folder / "training" / result["selectors"][name]["checkpoint"]


def load_module(config: Config, name: str, result: dict[str, Any]) -> SelectorModule:
    """A trained module; InputError where its checkpoint is damaged, or a weight is not finite."""
    path = checkpoint_of(config, name, result)
    try:
        module = SelectorModule.load_from_checkpoint(path, map_location="cpu").eval()
    except Exception as error:  # whatever a damaged file makes torch raise
        raise InputError(f"{path} is damaged: run the train stage again") from error
    unseen_F = torch.tensor([not scalar.learned for scalar in module.schema.scalars])  # scaled away, by infinity
    for name, values in module.state_dict().items():
        finite = values.isfinite() | unseen_F if name.endswith("scale_F") else values.isfinite()
        if bool(finite.all()):
            continue
        raise InputError(f"{path}: a weight is not finite: run the train stage again")
    return module


def decision_digest(config: Config, result: dict[str, Any]) -> dict[str, str]:
    """What decodes: the chosen checkpoint, and how it decides."""
    return {
        "training": sha256(checkpoint_of(config, result["chosen"], result)),
        "decisions": sha256(config.folder / "training" / "result.json"),
    }
