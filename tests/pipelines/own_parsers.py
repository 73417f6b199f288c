"""The golden tables, read by the engines' own parsers, out of their wheels and without installing them.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    python -m tests.pipelines.own_parsers vllm-0.33.0-*.whl sglang-0.5.23-*.whl

The wheels are too large for the test suite. TensorRT-LLM's parser cannot be had without its GPU libraries.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml

GOLDEN = Path(__file__).parent / "golden"
BATCHES = range(1, 65)


def source(wheel: Path, name: str) -> str:
    with ZipFile(wheel) as file:
        return file.read(name).decode()


def vllm(wheel: Path) -> None:
    """The schedule as the scheduler expands it, and the other keys as the config's class declares them."""
    space: dict[str, Any] = {}
    exec(source(wheel, "vllm/v1/spec_decode/dynamic/utils.py"), space)
    (config,) = (
        node
        for node in ast.parse(source(wheel, "vllm/config/speculative.py")).body
        if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"
    )
    keys = {
        node.target.id for node in config.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for path in sorted(GOLDEN.glob("vllm-*.json")):
        written = json.loads(path.read_text())
        schedule, longest = written["num_speculative_tokens_per_batch_size"], written["num_speculative_tokens"]
        lengths = space["build_dynamic_sd_schedule_lookup"](schedule, BATCHES[-1], longest)
        assert lengths[1:] == [next(k for first, last, k in schedule if first <= b <= last) for b in BATCHES]
        assert set(written) <= keys, set(written) - keys
        print(f"{path.name}: {wheel.name} reads what is meant")


def sglang(wheel: Path) -> None:
    """The options are fields of the server's arguments, and the algorithm is one that it knows."""
    space: dict[str, Any] = {}
    exec(source(wheel, "sglang/srt/arg_groups/field_order.py"), space)
    tree = ast.parse(source(wheel, "sglang/srt/speculative/spec_info.py"))
    algorithms = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for path in sorted(GOLDEN.glob("sglang-*.yaml")):
        written = yaml.safe_load(path.read_text())
        unknown = {key for key in written if key.replace("-", "_") not in space["POSITIONAL_FIELD_ORDER"]}
        assert not unknown and written["speculative-algorithm"] in algorithms, unknown
        print(f"{path.name}: {wheel.name} knows its options")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        wheel = Path(name)
        {"vllm": vllm, "sglang": sglang}[wheel.name.split("-")[0]](wheel)
