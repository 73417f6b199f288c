"""The run's latency profile."""

from __future__ import annotations

from pathlib import Path

from data_gen.models.pair import ModelPair
from data_gen.timing import device_name
from pipelines.config import Config
from pipelines.run import verify
from selector.latency import LatencyProfile
from selector.schema import InputError


def profile_path(config: Config) -> Path:
    return config.folder / "latency.json"


def load_profile(config: Config, pair: ModelPair | None = None) -> LatencyProfile:
    """The run's profile; InputError where it was measured on another machine or with another pair."""
    path = profile_path(config)
    verify(config, "latency")
    profile = LatencyProfile.load(path)
    here = device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    if profile.device != here:
        raise InputError(f"{path} was measured on {profile.device}; this is {here}: run the latency stage again")
    if pair is not None and profile.pair != pair.fingerprint:
        raise InputError(f"{path} was measured with another pair: run the latency stage again")
    return profile
