"""Stages through their real entry point, on a tiny pair."""

from __future__ import annotations

import json
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.config import Config, load_config
from tests.checks import ROOT, environment
from tests.tiny import small_pair

DEMO = ROOT / "configs" / "demo.yaml"
TARGET, DRAFT = small_pair()
SMALL_PAIR = [
    f"pair.target={TARGET}",
    f"pair.draft={DRAFT}",
    "pair.device=cpu",  # also where there is a GPU, whose sums differ from run to run
]
TEXTS, TOKENS = 40, 24
UNTEMPLATED = ("prompts.chat=false", "prompts.longer=start")  # texts without a chat template
SMALL = [
    *SMALL_PAIR,
    *UNTEMPLATED,
    "prompts.tokens=12",
    "prompts.validation=0.2",
    "verifiers=[specinfer,traversal,lifted_uniform]",
    "sampling=[{temperature: 0.0}, {temperature: 1.0}]",
    f"data.texts={TEXTS}",
    f"data.tokens={TOKENS}",
    "data.texts_per_shard=8",
    "data.siblings=1",
    "latency.repeats=3",
    "train.epochs=2",
    "train.objectives=[regressor,policy]",
    "train.hidden=[16,8]",
    "evaluate.prompts=3",
    "evaluate.assisted=false",  # they decode for a third of an evaluation
]
STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
APART = ("compare", "distil", "logs")  # commands that stand alone

# its processes begin with everything imported: seconds saved
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *(f"pipelines.{stage}.stage" for stage in (*STAGES, "compare")),
        "mlflow.store.tracking.sqlalchemy_store",
        __name__,
    ]
)
Prepare = Callable[[], object]


def demo_config(*overrides: str) -> Config:
    """The demo's config, but for what is given."""
    return load_config(DEMO, list(overrides))


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(stage: str, *arguments: str, config: str = "demo.yaml") -> list[str]:
    chosen = ["--config", str(ROOT / "configs" / config)] if config else []
    return [sys.executable, "-m", "pipelines", stage, *chosen, *arguments]


def started(
    folder: Path,
    output_path: Path,
    stage: str,
    *arguments: str,
    config: str = "demo.yaml",
    prepare: Prepare | None = None,
) -> BaseProcess:
    """A stage in a process of its own, whose output goes to the file `output_path`; `prepare` is
    called there before it."""
    line = command(stage, *arguments, config=config)[3:]
    process = SERVER.Process(target=_work, args=(folder, output_path, line, environment(), prepare))
    process.start()
    return process


def _work(
    folder: Path,
    output_path: Path,
    line: list[str],
    variables: dict[str, str],
    prepare: Prepare | None,
) -> None:
    from pipelines.cli import app as main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    output = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    sys.argv = ["espalier", *line]
    if prepare is not None:
        prepare()
    main()


def outcome(
    folder: Path,
    stage: str,
    *arguments: str,
    config: str = "demo.yaml",
    prepare: Prepare | None = None,
) -> tuple[int, str]:
    """Exit code and output of a stage in a process of its own."""
    with tempfile.TemporaryDirectory() as elsewhere:
        output_path = Path(elsewhere) / "said"
        process = started(folder, output_path, stage, *arguments, config=config, prepare=prepare)
        process.join()
        assert process.exitcode is not None
        return process.exitcode, output_path.read_text()


def espalier(folder: Path, stage: str, *arguments: str, config: str = "demo.yaml") -> str:
    """Run a stage; its output."""
    code, output = outcome(folder, stage, *arguments, config=config)
    assert code == 0, output
    return output


def failure(stage: str, *arguments: str) -> str:
    """The one line of a stage that ends with exit code 2, in this process."""
    done = CliRunner().invoke(app, command(stage, *arguments)[3:])
    lines = done.stderr.strip().splitlines()
    assert (done.exit_code, len(lines)) == (2, 1) and lines[0].startswith("espalier: "), done.output
    return lines[0]


def refusal(stage: str, *arguments: str) -> str:
    """The one line of a stage that ends with exit code 2 and leaves every file as it was."""
    before = contents()
    line = failure(stage, *arguments)
    assert contents() == before
    return line


def contents() -> dict[Path, bytes]:
    """All files of all runs."""
    return {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}


def patch(name: str, replacement: Callable[[Any], Any]) -> None:
    """Put `replacement(what stands there)` in the place of a function or method by its dotted
    name."""
    owner = pkgutil.resolve_name(name.rpartition(".")[0])
    attribute = name.rpartition(".")[2]
    setattr(owner, attribute, replacement(getattr(owner, attribute)))


def at_call(name: str, number: int, happens: Callable[[], object]) -> None:
    """In the process of a stage: something happens when a function is called for the `number`-th
    time."""
    calls = count(1)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if next(calls) == number:
                happens()
            return function(*arguments, **named)

        return call

    patch(name, watched)


def evaluation_of(folder: Path, name: str = "demo") -> dict[str, Any]:
    """What a run's evaluation found."""
    return json.loads((folder / "runs" / name / "evaluation.json").read_text())


def versions(folder: Path, model: str = "espalier-selector") -> list[Any]:
    """The versions of a model in the registry of a folder's store."""
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db").search_model_versions(
        f"name = '{model}'"
    )
