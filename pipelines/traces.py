"""The run's traces, read once; and with a machine's times."""

from __future__ import annotations

from pathlib import Path

from data_gen.traces import differences, versions
from pipelines.config import Config
from pipelines.data import depends
from selector.data import SPLITS, Setting, Texts, Timed, read_texts
from selector.runtime import LatencyProfile
from selector.schema import InputError, read_manifest


def traces_folder(config: Config) -> Path:
    return config.folder / "traces"


def load_traces(config: Config, pair: str) -> dict[str, Texts]:
    """The texts of every split; InputError unless they were made with this config and pair."""
    folder = traces_folder(config)
    changes = differences(read_manifest(folder)["depends"], {**versions(), **depends(config, pair)})
    if changes:
        raise InputError(f"{folder}: made from other inputs ({'; '.join(changes[:2])}): run the data stage")
    return {split: read_texts(folder, split, config.verifiers) for split in SPLITS}


def settings_of(config: Config) -> list[Setting]:
    """The run's sampling settings, in its order."""
    return [(setting.temperature, setting.top_p) for setting in config.sampling]


def timed(texts: Texts, setting: Setting, verifier: str, profile: LatencyProfile) -> Timed:
    """The texts of one sampling setting with a verifier's labels and a machine's times."""
    return Timed(texts.setting_of(setting), verifier, profile)
