"""The code of a registered model, which MLflow stores with it. The artefact's TorchScript
answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Registered:
    """An artefact directory in the form that MLflow calls."""

    def __init__(self, folder: str) -> None:
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.module = torch.jit.load(str(Path(folder) / "selector.pt"), map_location="cpu")

    @torch.inference_mode()
    def predict(self, frame: Any, params: Any = None) -> Any:
        """The actions as a DataFrame with the columns `K`, `L1`, `L2` and `style`. The given one
        has a column for each scalar and each hidden state, or for the early scalars alone. `params`
        are not used."""
        features = self.config["features"]
        names = [scalar["name"] for scalar in features["scalars"]]
        if not set(names) <= set(frame.columns):
            names = names[: features["early"]]
        inputs = {}
        for name in features["hidden_states"]:
            if name in frame:
                inputs[name] = np.stack(list(frame[name]))
        inputs["scalars"] = frame[names].to_numpy()
        tensors = {
            name: torch.from_numpy(values.astype(np.float32)) for name, values in inputs.items()
        }
        index_B, _ = self.module(tensors)
        chosen = [self.config["actions"][index] for index in index_B.tolist()]
        return type(frame)(chosen, columns=["K", "L1", "L2", "style"])


_load_pyfunc = Registered  # what MLflow calls to load the model
