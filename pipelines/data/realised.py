"""What the decoder of the data stage accepted, against what the labels say of the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipelines.config import Config
from selector.actions import ActionSpace
from selector.schema import read_manifest, survival_column
from selector.train.replay import outcomes


def realised(config: Config) -> list[dict[str, Any]]:
    """What decoding accepted against what the labels say of the same steps, by verifier.

    Given the text, the accepted lengths of its steps are independent, and the labels hold their laws: `z` is the sum of
    the differences over its standard deviation. (Labels of branching trees carry the noise of one draw of siblings,
    which that deviation leaves out.)
    """
    folder = config.folder / "traces"
    names = [name for name in read_manifest(folder)["shards"] if name.startswith("train/")]
    found: dict[str, list[np.ndarray]] = {}
    for name in names:
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
    """Of every step of one text: tau + 1 as realised, and its mean and variance by the labels; [steps, 3]."""
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
