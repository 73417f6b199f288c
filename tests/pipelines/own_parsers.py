"""The golden tables, read by the engines' own parsers, out of their wheels and without installing them.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    python -m tests.pipelines.own_parsers vllm-0.33.0-*.whl sglang-0.5.23-*.whl

The wheels are too large for the test suite. TensorRT-LLM's parser cannot be had without its GPU libraries.
"""

from __future__ import annotations

import ast
import bisect
import json
import logging
import math
import sys
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from pipelines.export.engines import ADAPTIVE

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
    """The file as the router of batch sizes reads it; and the default that gains are over."""
    tree = ast.parse(source(wheel, "sglang/srt/speculative/adaptive_spec_params.py"))
    # its imports of sglang itself need a GPU build; the parser uses none of them but a line of the log
    kept = [node for node in tree.body if not str(getattr(node, "module", "")).startswith("sglang")]
    space: dict[str, Any] = {"bisect": bisect, "json": json, "math": math, "logging": logging}
    space |= {"cached_property": cached_property, "log_info_on_rank0": lambda *_: None, "__name__": "sglang"}
    exec(compile(ast.Module(kept, []), str(wheel), "exec"), space)
    default = {int(size): tuple(own["candidate_steps"]) for size, own in space["DEFAULT_ADAPTIVE_CONFIG"].items()}
    assert default == ADAPTIVE, default
    for path in sorted(GOLDEN.glob("sglang-*.json")):
        written = {int(size): own["candidate_steps"][0] for size, own in json.loads(path.read_text()).items()}
        read = space["AdaptiveSpeculativeParams"](max(written.values()), str(path))
        lengths = [read.get_steps_for_batch(batch) for batch in BATCHES]
        assert lengths == [written[max(size for size in written if size <= batch)] for batch in BATCHES]
        print(f"{path.name}: {wheel.name} reads what is meant")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        wheel = Path(name)
        {"vllm": vllm, "sglang": sglang}[wheel.name.split("-")[0]](wheel)
