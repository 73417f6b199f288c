"""The code of a registered model, which MLflow stores with it and runs to load it, as no module
that other versions would share. The artefact's TorchScript answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import torch


class Registered(mlflow.pyfunc.PythonModel):  # type: ignore[name-defined]
    """An artefact directory in the form that MLflow calls."""

    def load_context(self, context: Any) -> None:
        folder = Path(context.artifacts["selector"])
        self.config = json.loads((folder / "config.json").read_text())
        self.module = torch.jit.load(str(folder / "selector.pt"), map_location="cpu")

    @torch.inference_mode()
    def predict(self, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """The actions, with the columns `K`, `L1`, `L2` and `style`. The input has a column for
        each scalar and each hidden state, or for the early scalars alone. `params` are not
        used."""
        features = self.config["features"]
        names = [scalar["name"] for scalar in features["scalars"]]
        if not set(names) <= set(model_input.columns):
            names = names[: features["early"]]
        missing = [name for name in names if name not in model_input]
        if missing:
            raise mlflow.MlflowException(
                f"{len(missing)} of {len(names)} columns are missing, the first one is "
                f"{missing[0]}: the input is a DataFrame with a column for each scalar, and for "
                "select() and scores() of load_selector a dictionary of tensors"
            )
        inputs = {}
        for name in features["hidden_states"]:
            if name in model_input:
                inputs[name] = np.stack(list(model_input[name]))
        inputs["scalars"] = model_input[names].to_numpy()
        tensors = {
            name: torch.from_numpy(values.astype(np.float32)) for name, values in inputs.items()
        }
        index_B, _ = self.module(tensors)
        chosen = [self.config["actions"][index] for index in index_B.tolist()]
        return pd.DataFrame(chosen, columns=["K", "L1", "L2", "style"])


mlflow.models.set_model(Registered())
