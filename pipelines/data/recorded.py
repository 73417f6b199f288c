"""The run's recorded texts: what they depend on, how they are read, and whether they agree with decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data_gen.texts.labelled import BEHAVIOUR
from data_gen.timing import device_name
from data_gen.traces import differences, listed_changes, versions
from pipelines.config import Config
from pipelines.pair.loading import prompts_depend
from pipelines.run import verify
from selector.actions import ActionSpace
from selector.latency import LatencyProfile
from selector.schema import InputError, read_manifest, sha256, survival_column
from selector.train.data import SPLITS, Setting, Texts, Timed, read_texts
from selector.train.replay import outcomes


def depends(config: Config, pair: str) -> dict[str, Any]:
    """Everything that the rows' law depends on; `pair` is the pair's fingerprint.

    The engine is left out: it changes the rounding and so a few of the drawn tokens, but not their law.
    """
    return {
        "pair": pair,
        "dtype": config.pair.dtype,
        "device": device_name(config.pair.device, config.pair.dtype).startswith("cuda"),
        "seed": config.seed,
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "data": {
            **config.data.model_dump(mode="json", exclude={"ray", "workers", "gpus_per_worker"}),
            "behaviour": BEHAVIOUR,
        },
        "log": _log_digest(config.data.log),
        "prompts": {"shares": [config.prompts.validation, config.prompts.test], **prompts_depend(config, *SPLITS)},
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
        raise InputError(f"{folder}: made from other inputs ({listed_changes(changes)}): run the data stage")
    return {split: read_texts(folder, split, config.verifiers) for split in SPLITS}


def settings_of(config: Config) -> list[Setting]:
    """The run's sampling settings, in its order."""
    return [(setting.temperature, setting.top_p) for setting in config.sampling]


def timed(texts: Texts, setting: Setting, verifier: str, profile: LatencyProfile) -> Timed:
    """The texts of one sampling setting with a verifier's labels and a machine's times."""
    return Timed(texts.setting_of(setting), verifier, profile)


def realised(config: Config) -> list[dict[str, Any]]:
    """What decoding accepted, compared with the labels of the same steps, by verifier.

    Given the text, the accepted lengths of its steps are independent, and the labels are their laws. So `z` is the sum
    of the differences over its standard deviation, which leaves out the labels' own variance for branching trees.
    """
    folder = traces_folder(config)
    found: dict[str, list[np.ndarray]] = {}
    for name in [name for name in read_manifest(folder)["shards"] if name.startswith("train/")]:
        table = pq.read_table(folder / name)
        for row in range(table.num_rows):
            verifier = table["step_verifier"][row].as_py()
            if verifier is not None and table["roots"][row].as_py() > 0:
                found.setdefault(verifier, []).append(_against_labels(table.slice(row, 1), verifier))
    rows = []
    for verifier in config.verifiers:
        if verifier in found and len(steps := np.concatenate(found[verifier])):
            realised, mean, variance = steps.T
            z = float((realised - mean).sum() / max(variance.sum() ** 0.5, 1e-300))
            figures = {"expected": float(mean.mean()), "realised": float(realised.mean()), "z": z}
            rows.append({"verifier": verifier, "steps": len(steps), **figures})
    return rows


def _against_labels(text: pa.Table, verifier: str) -> np.ndarray:
    """The realised tau + 1 of every step of a text, and its mean and variance by the labels; [steps, 3]."""
    space = ActionSpace.default()
    root, action, accepted = (
        torch.tensor(text[name][0].as_py(), dtype=torch.int64) for name in ("step_root", "step_action", "step_accepted")
    )
    flat = text[survival_column(verifier)].chunk(0).flatten().to_numpy(zero_copy_only=False)
    survivals_RS = torch.from_numpy(flat.astype(np.float64)).view(-1, len(space.sums_SA))
    law_RJ = outcomes(survivals_RS[root], action, space)
    n_J = torch.arange(1, law_RJ.shape[-1] + 1, dtype=torch.float64)
    mean_R = law_RJ @ n_J
    variance_R = law_RJ @ n_J**2 - mean_R**2
    return torch.stack([accepted + 1.0, mean_R, variance_R.clamp(min=0)], dim=-1).numpy()
