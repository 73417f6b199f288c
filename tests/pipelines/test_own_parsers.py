"""What we write for engines, and the samples of what they answer, against the engines' own code.

The code comes from an installed package, or out of its wheel without installing it:

    pip download --no-deps --dest wheels vllm==0.33.0 sglang==0.5.23
    ESPALIER_WHEELS=wheels python -m pytest tests/pipelines/test_own_parsers.py

That of TensorRT-LLM, whose wheel lacks it, may be a copy of its repository: `wheels/tensorrt_llm/llmapi/llm_args.py`.
Whole engines need a GPU to import, so single functions and classes of them are run.
"""

from __future__ import annotations

import ast
import bisect
import functools
import importlib.util
import json
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pydantic
import pytest
import yaml

from data_gen.models.sampling import Sampling
from pipelines.export.engines import BestLength, Settings, engine_of

WHEELS = Path(os.environ.get("ESPALIER_WHEELS", "wheels"))
GOLDEN = Path(__file__).parent / "golden"
ANSWERS = Path(__file__).parents[1] / "data_gen" / "responses"
BATCHES = range(1, 65)


def source(engine: str, name: str) -> str:
    """A file of an engine's package."""
    spec = importlib.util.find_spec(engine)
    if spec is not None and spec.submodule_search_locations:
        return (Path(spec.submodule_search_locations[0]) / name).read_text()
    if (file := WHEELS / engine / name).exists():
        return file.read_text()
    wheels = sorted(WHEELS.glob(f"{engine}-*.whl"))
    if not wheels:
        pytest.skip(f"{engine} is not installed, and ESPALIER_WHEELS names no folder with its wheel")
    with ZipFile(wheels[-1]) as wheel:
        return wheel.read(f"{engine}/{name}").decode()


def class_of(engine: str, file: str, name: str) -> ast.ClassDef:
    found = (node for node in ast.walk(ast.parse(source(engine, file))) if isinstance(node, ast.ClassDef))
    return next(node for node in found if node.name == name)


def fields(made: ast.ClassDef) -> dict[str, ast.expr]:
    """The annotations of a class's fields."""
    declared = (node for node in made.body if isinstance(node, ast.AnnAssign))
    return {node.target.id: node.annotation for node in declared if isinstance(node.target, ast.Name)}


def literals(engine: str, file: str, name: str) -> set[str]:
    """The values of `name = Literal[..]`."""
    (value,) = (
        node.value
        for node in ast.parse(source(engine, file)).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
    )
    return {node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def answers(engine: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ANSWERS / f"{engine}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("vllm-*.json")), ids=lambda path: path.stem)
def test_vllm_drafts_what_its_file_says(path: Path) -> None:
    """The schedule as its scheduler expands it; the keys of its config's class, and their values."""
    space: dict[str, Any] = {}
    exec(source("vllm", "v1/spec_decode/dynamic/utils.py"), space)
    written = json.loads(path.read_text())
    schedule, longest = written["num_speculative_tokens_per_batch_size"], written["num_speculative_tokens"]
    lengths = space["build_dynamic_sd_schedule_lookup"](schedule, BATCHES[-1], longest)
    assert lengths[1:] == [next(k for first, last, k in schedule if first <= b <= last) for b in BATCHES]
    file = "config/speculative.py"
    assert set(written) <= set(fields(class_of("vllm", file, "SpeculativeConfig")))
    assert written["rejection_sample_method"] in literals("vllm", file, "RejectionSampleMethod")
    assert written["draft_sample_method"] in literals("vllm", file, "DraftSampleMethod")


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("sglang-*.yaml")), ids=lambda path: path.stem)
def test_sglang_knows_its_options(path: Path) -> None:
    space: dict[str, Any] = {}
    exec(source("sglang", "srt/arg_groups/field_order.py"), space)
    tree = ast.parse(source("sglang", "srt/speculative/spec_info.py"))
    algorithms = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    written = yaml.safe_load(path.read_text())
    assert {key.replace("-", "_") for key in written} <= set(space["POSITIONAL_FIELD_ORDER"])
    assert written["speculative-algorithm"] in algorithms


def test_sglang_drafts_with_a_head_what_its_table_says(tmp_path: Path) -> None:
    """By its own routing of batch sizes."""
    file, names = "srt/speculative/adaptive_spec_params.py", ("AdaptiveStepSlot", "AdaptiveSpeculativeParams")
    tree = ast.parse(source("sglang", file))
    load = next(node for node in tree.body if getattr(node, "name", "") == "_load_adaptive_config")
    space: dict[str, Any] = {
        "bisect": bisect,
        "json": json,
        "cached_property": functools.cached_property,
        "logger": None,
    }
    space["log_info_on_rank0"] = lambda *_: None
    exec(compile(ast.Module([load, *(class_of("sglang", file, name) for name in names)], []), file, "exec"), space)
    lengths = [BestLength(*each, 1.0, 1.0, None) for each in ((4, 6), (8, 2), (64, 0))]
    settings = Settings("big", "head", True, False, Sampling(0.0), lengths)
    (tmp_path / "t.json").write_text(engine_of("sglang", True).files(settings)["temperature-0.steps.json"])
    params = space["AdaptiveSpeculativeParams"](6, str(tmp_path / "t.json"))
    for first, last, length in settings.ranges:
        assert {params.get_steps_for_batch(batch) for batch in range(first, last + 1)} == {length}


@pytest.fixture(scope="module")
def draft_target() -> type[pydantic.BaseModel]:
    """TensorRT-LLM's own class for a draft model, out of its package or of a copy of its repository."""
    space = {name: getattr(module, name) for module in (pydantic, typing) for name in module.__all__}
    space |= {"Path": Path, "functools": functools, "PydanticField": pydantic.Field, "TelemetryField": Any}
    space["StrictBaseModel"] = pydantic.create_model(
        "StrictBaseModel", __config__=pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    )
    wanted = ("Field", "DecodingBaseConfig", "DraftTargetDecodingConfig")
    tree = ast.parse(source("tensorrt_llm", "llmapi/llm_args.py"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted]
    exec(compile(ast.Module(found, []), "llm_args.py", "exec"), space)
    made: type[pydantic.BaseModel] = space[wanted[-1]]
    made.model_rebuild(_types_namespace=space)
    return made


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("tensorrt-llm-*.yaml")), ids=lambda path: path.stem)
def test_tensorrt_llm_reads_its_files(draft_target: type[pydantic.BaseModel], path: Path) -> None:
    """And refuses another key, and a table whose first length is not the longest."""
    written = yaml.safe_load(path.read_text())["speculative_config"]
    read = draft_target.model_validate(written)
    assert {key: getattr(read, key) for key in written} == written
    table = written["draft_len_schedule"]
    for wrong in ({"draft_length": 3}, {"draft_len_schedule": {**table, min(table): 1}}):
        with pytest.raises(pydantic.ValidationError):
            draft_target.model_validate(written | wrong)


def test_the_samples_have_vllms_keys() -> None:
    """The metrics of a step by step run are those that its own class makes."""
    made = class_of("vllm", "v1/metrics/stats.py", "RequestSpecDecodeMetrics")
    space: dict[str, Any] = {"dataclass": dataclass, "field": field, "Any": Any}
    exec(compile(ast.Module([made], []), "stats.py", "exec"), space)
    metrics = space["RequestSpecDecodeMetrics"].new(3)
    for accepted in (3, 0, 3):
        metrics.observe(3, accepted, detailed=True)
    completion, chat = answers("vllm")
    assert completion["metrics"]["speculative_decoding"] == metrics.to_dict() == chat["metrics"]["speculative_decoding"]
    protocol = "entrypoints/generate/base/protocol.py"
    assert set(completion["metrics"]) == set(fields(class_of("vllm", protocol, "PerRequestMetrics")))
    for sample, file, name in ((completion, "completion", "Completion"), (chat, "chat_completion", "ChatCompletion")):
        path = f"entrypoints/openai/{file}/protocol.py"
        assert set(sample) <= set(fields(class_of("vllm", path, f"{name}Response")))
        assert set(sample["choices"][0]) <= set(fields(class_of("vllm", path, f"{name}ResponseChoice")))


def test_the_samples_have_sglangs_keys() -> None:
    completion, generated, logged = answers("sglang")
    path = "srt/entrypoints/openai/protocol.py"
    assert set(completion) <= set(fields(class_of("sglang", path, "CompletionResponse")))
    assert set(completion["choices"][0]) <= set(fields(class_of("sglang", path, "CompletionResponseChoice")))
    metrics = {key for key in generated["meta_info"] if key.startswith("spec_")}
    assert metrics <= set(fields(class_of("sglang", path, "SpecTokensDetails")))
    manager, logger = (
        source("sglang", f"srt/{name}.py") for name in ("managers/tokenizer_manager", "utils/request_logger")
    )
    assert all(f'"{key}"' in manager for key in generated)
    assert all(f'"{key}"' in logger for key in ("rid", "obj", "out", logged["event"]))
