"""Whatever a file holds, it is read, or refused in one line: no traceback. `make fuzz` tries 10,000
inputs.

Where a damaged file is read without a word, what comes out must be what its readers rely on, which
calling them shows.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_gen.models.sampling import Sampling
from data_gen.texts.log_labels import Labeller, with_features
from data_gen.texts.logs import drafter_of, read_all
from data_gen.texts.prompts import read_prompts
from data_gen.traces import read_manifest
from pipelines.config import Config, known_keys, load_config
from pipelines.latency.timings import profile_of, read_timings
from pipelines.run import read_record, record_path
from selector.actions import Action, ActionSpace
from selector.schema import InputError
from tests.pipelines.small_logs import STEP_TIMES, as_steps, record

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo.yaml"
MANY = settings(
    max_examples=int(os.environ.get("ESPALIER_FUZZ", "25")),
    deadline=None,  # a busy machine is no error
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize="ESPALIER_FUZZ" not in os.environ,
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
)
KEYS = st.sampled_from(known_keys())
JSON_BYTES = JSON.map(lambda value: json.dumps(value).encode())


@contextmanager
def at_worst_one_line() -> Iterator[None]:
    """What is tried succeeds, or is refused in one line."""
    try:
        yield
    except InputError as error:
        message = str(error)
        assert len(message.strip().splitlines()) == 1


@contextmanager
def tried(name: str, content: bytes) -> Iterator[Path]:
    """A file of this name, which may be refused."""
    with tempfile.TemporaryDirectory() as folder, at_worst_one_line():
        path = Path(folder) / name
        path.write_bytes(content)
        yield path


def changed(value: Any, data: st.DataObject) -> Any:
    """A JSON value with one part of it, anywhere, replaced or left out."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(value)))
        if not data.draw(st.integers(0, 3)):
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: changed(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 2)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], changed(value[at], data), *value[at + 1 :]]
    return data.draw(JSON)


@MANY
@given(st.dictionaries(KEYS, JSON, min_size=1, max_size=3))
def test_overrides(values: dict[str, Any]) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    with at_worst_one_line():
        config = load_config(DEMO, overrides)
        assert isinstance(config, Config) and 0 <= config.seed < 2**32


@MANY
@given(st.binary(max_size=200) | JSON_BYTES)
def test_config_files(content: bytes) -> None:
    with tried("run.yaml", content) as path:
        assert isinstance(load_config(path, []), Config)


FIELDS = ("text", "messages", "source", "kind", "id")
OBJECTS = JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON))
LINE = st.binary(max_size=30) | OBJECTS.map(lambda value: json.dumps(value).encode())
LINES = st.lists(LINE, max_size=4).map(b"\n".join)


@MANY
@given(LINES)
def test_prompts(content: bytes) -> None:
    with tried("prompts.jsonl", content) as path:
        for prompt in read_prompts(path):
            assert prompt.text.strip() and isinstance(prompt.id, str)


RESPONSES = (ROOT / "tests/data_gen/responses").glob("*.jsonl")
LOGGED = [record(0), as_steps(record(1))]
for path in RESPONSES:
    LOGGED += [json.loads(line) for line in path.read_text().split("\n") if line]
# one bad line among them is left out
WHOLE = "".join(json.dumps(record(n, 20)) + "\n" for n in range(2, 24)).encode()


@MANY
@given(st.data(), st.sampled_from(LOGGED))
def test_logs_of_engines(data: st.DataObject, entry: dict[str, Any]) -> None:
    line = json.dumps(changed(entry, data)).encode()
    if data.draw(st.booleans()):
        line = data.draw(st.binary(max_size=30))
    with tried("log.jsonl", WHOLE + line) as path:
        logs = read_all([path], [], Sampling(0.0))
        labeller = Labeller("head", ActionSpace.chains(8, 20), Sampling(0.0))
        labelled = with_features(labeller.table(logs.of(drafter_of(logs.all, "head")).texts))
        assert len(labelled) >= 22 and not labelled.scalars_RF.isnan().any()


@MANY
@given(st.data())
def test_step_times(data: st.DataObject) -> None:
    header, *rows = (line.split(",") for line in STEP_TIMES.splitlines())
    cells = st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)
    at = data.draw(st.integers(0, len(rows) - 1))
    rows[at][data.draw(st.integers(0, len(header) - 1))] = data.draw(cells)
    text = "\n".join(map(",".join, [header, *rows])).encode(errors="replace")
    with tried("times.csv", data.draw(st.just(text) | st.binary(max_size=60))) as path:
        profile = profile_of(read_timings(path), str(path), False, "log:head", ("naive",))
        assert profile.batches is not None
        for batch in profile.batches.sizes:
            seconds = profile.at_batch(batch).action_seconds(Action(1, 4, 0), 100, "naive")
            assert 0 < seconds < float("inf")


@MANY
@given(JSON)
def test_stage_files_and_manifests(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = load_config(DEMO, [])
        for path in (record_path(config, "train"), Path("manifest.json")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        with at_worst_one_line():
            assert isinstance(read_record(config, "train")["depends"], dict)
        with at_worst_one_line():
            assert isinstance(read_manifest(Path())["shards"], dict)
