"""What a run on logs begins with; a config file and the command line may change all of it."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "name": "logs",
    "sampling": [{"temperature": 0.0}],
    "prompts": {"validation": 0.15, "test": 0.25},
    "latency": {"stepped": False},
    "train": {"hidden": [256, 256], "batch": 4096, "learning_rate": 0.01, "epochs": 12, "objectives": ["regressor"]},
}
