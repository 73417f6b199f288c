"""Stages through their real entry point, on a pair that takes seconds to train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL_PAIR = [
    "pair.embedded.vocabulary=320",
    "pair.embedded.context=32",
    "pair.embedded.max_files=12",
    *(f"pair.embedded.{role}.{key}" for role in ("target", "draft") for key in ("hidden=32", "intermediate=48")),
    *(f"pair.embedded.{role}.{key}" for role in ("target", "draft") for key in ("heads=2", "steps=12", "batch=4")),
    "pair.embedded.target.layers=2",
]
TEXTS, TOKENS = 40, 24
SMALL = [
    *SMALL_PAIR,
    "prompts.tokens=12",
    f"data.texts={TEXTS}",
    f"data.tokens={TOKENS}",
    "data.texts_per_shard=8",
    "latency.lengths=[16,48]",
    "latency.nodes=[1,5,17]",
    "latency.repeats=3",
    "latency.prompts=1",
    "train.epochs=2",
    "train.width=8",
    "train.hidden=[16,8]",
    "evaluate.prompts=3",
    "evaluate.tokens=16",
    "evaluate.bootstrap=100",
]


def command(stage: str, *arguments: str, config: str = "demo.yaml") -> list[str]:
    return [sys.executable, "-m", "pipelines.cli", stage, "--config", str(ROOT / "configs" / config), *arguments]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    return {**kept, "PYTHONPATH": str(ROOT)}


def espalier(folder: Path, stage: str, *arguments: str, config: str = "demo.yaml") -> str:
    """Run a stage in a process of its own; its output."""
    todo = command(stage, *arguments, config=config)
    result = subprocess.run(todo, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr
