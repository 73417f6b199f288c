"""The run's traces: what they follow from, read once, and with a machine's times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_gen.timing import device_name
from data_gen.traces import differences, versions
from pipelines.config import Config
from pipelines.pair.encoding import prompts_depend
from pipelines.run import verify
from selector.latency import LatencyProfile
from selector.schema import InputError, read_manifest, sha256
from selector.train.data import SPLITS, Setting, Texts, Timed, read_texts


def depends(config: Config, pair: str) -> dict[str, Any]:
    """Everything the rows follow from.

    Not: who makes them. That moves the passes' rounding, and with it now and then a token that is drawn: other rows, of
    the same law. The same command gives the same bytes.

    Args:
        pair: the pair's fingerprint.
    """
    return {
        "pair": pair,
        "dtype": config.pair.dtype,
        "device": device_name(config.pair.device, config.pair.dtype).startswith("cuda"),
        "seed": config.seed,
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "data": config.data.model_dump(mode="json", exclude={"engine", "ray", "threads"}),
        "log": _log_digest(config.data.log),
        "prompts": {
            "shares": [config.prompts.validation, config.prompts.test],
            **prompts_depend(config, *SPLITS),
        },
    }


def _log_digest(path: Path | None) -> str | None:
    try:
        return None if path is None else sha256(path)
    except OSError as error:
        raise InputError(f"data.log: {path}: {error.strerror}") from error


def traces_folder(config: Config) -> Path:
    return config.folder / "traces"


def load_traces(config: Config, pair: str) -> dict[str, Texts]:
    """The texts of every split; InputError unless they were made with this config and pair."""
    folder = traces_folder(config)
    verify(config, "data")
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
