"""`espalier STAGE [--config FILE] [section.key=value ...] [--plan]`."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout
from typer.core import TyperGroup

from selector.files import unwritable
from selector.schema import InputError

STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
ALL, SMALL, LOGS = "demo", "quick", "logs"
STAGES_OF = {  # commands of several stages
    ALL: STAGES,
    SMALL: [name for name in STAGES if name != "export"],
    LOGS: STAGES[1:],  # no pair
}
SIZES = (  # of the stages in small
    "data.texts=128",
    "data.seconds=20",
    "data.tokens=32",
    "data.texts_per_shard=2",
    "latency.repeats=3",
    "train.objectives=[regressor]",
    "train.epochs=4",
    "evaluate.prompts=2",
    "evaluate.rounds=1",
    "evaluate.assisted=false",
    "evaluate.clocks=[]",
)
ABOUT = {  # the stages without options of their own
    "pair": "check that the pair loads, and write the prompts",
    "data": "write texts, or read logged ones, and label every position",
    "train": "train selectors and tune their decisions by replay",
    "evaluate": "decode held-out prompts with every method; replay held-out texts",
    "report": "write tables and plots",
    "compare": "the papers' tables: verifiers, static trees and selectors by replay",
    SMALL: "whether speculation pays on this machine: the stages on a few short texts, in minutes",
    "distil": "train a draft for a target that has none",
    ALL: f"the stages {', '.join(STAGES)}, in this order",
}
# the disk is full or not writable
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
DEMO = Path("configs/demo.yaml")

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="see docs/configuration.md"),
]
File = Annotated[
    Path | None,
    typer.Option("--config", help="the run's YAML file [configs/demo.yaml; logs: none]"),
]
Plan = Annotated[
    bool, typer.Option("--plan", help="print what would be done, with sizes, and do nothing")
]


class OneLine(TyperGroup):
    """A user's mistake gives one line and exit code 2; an interruption gives exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        code = 2
        try:
            return super().invoke(ctx)
        except InputError as error:
            message = str(error)
        except typer.TyperException as error:
            message = error.format_message()
        except OSError as error:
            if error.errno not in DISK:
                raise
            message = str(unwritable("a file of the run", error))
        except KeyboardInterrupt:
            message = "interrupted; the same command goes on from here"
            code = 130
        print(f"espalier: {message}", file=sys.stderr)
        raise typer.Exit(code)


app = typer.Typer(
    cls=OneLine,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="espalier STAGE [--config FILE] [section.key=value ...] [--plan]",
)


def _version(asked: bool) -> None:
    if asked:
        print(f"espalier {metadata.version('espalier-decoding')}")
        raise typer.Exit


@app.callback()
def espalier(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


def _add(stage: str) -> None:
    @app.command(stage, help=ABOUT[stage])
    def command(words: Words = None, config: File = None, plan: Plan = False) -> None:
        run(stage, config, words or [], plan)


for stage_name in ABOUT:
    _add(stage_name)


@app.command(help="time decoding steps and decisions on this machine")
def latency(
    words: Words = None,
    config: File = None,
    plan: Plan = False,
    timings: Annotated[
        str | None,
        typer.Option(
            "--from", help="read an engine's own step times, a CSV file or a plug-in's .jsonl"
        ),
    ] = None,
) -> None:
    run("latency", config, _overrides(words, {"latency.timings": timings}), plan)


@app.command(help="package the selector for an engine")
def export(
    words: Words = None,
    config: File = None,
    plan: Plan = False,
    engine: Annotated[str | None, typer.Option(help="write settings of this engine, too")] = None,
) -> None:
    run("export", config, _overrides(words, {"export.engine": engine}), plan)


@app.command(help="from an engine's logs to a selector, without a model")
def logs(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="FILE... [SECTION.KEY=VALUE]...")
    ] = None,
    config: File = None,
    name: Annotated[
        str | None, typer.Option(help="the run's name; its folder is runs/NAME")
    ] = None,
    plan: Plan = False,
    test: Annotated[
        list[str] | None, typer.Option(help="a held-out log; may be given several times")
    ] = None,
    timings: Annotated[
        str | None, typer.Option(help="the engine's step times: a CSV file or a plug-in's .jsonl")
    ] = None,
) -> None:
    files = []
    settings = []
    for word in words or []:
        if "=" not in word or Path(word).exists():
            files.append(word)
        else:
            settings.append(word)
    options = {"name": name, "logs.files": files, "logs.test": test, "latency.timings": timings}
    run(LOGS, config, _overrides(settings, options), plan)


@app.command(help="does a verifier of yours keep the target's law?")
def check_verifier(
    words: Annotated[list[str], typer.Argument(metavar="MODULE:NAME [style=..]")],
) -> None:
    from data_gen.verification.checking import check_named

    raise typer.Exit(0 if check_named(words) else 1)


def _overrides(words: list[str] | None, options: dict[str, Any]) -> list[str]:
    overrides = list(words or [])
    for key, value in options.items():
        if value:
            overrides.append(f"{key}={json.dumps(value)}")
    return overrides


def run(stage: str, file: Path | None, overrides: list[str], plan: bool) -> None:
    """Resolve the config, then run or plan one stage, or all of them."""
    # takes seconds, and `--help` needs none of it
    from pipelines.config import load_config

    if file is None and stage != LOGS:
        file = DEMO
    if stage == SMALL:
        overrides = [*SIZES, *overrides]
    config = load_config(file, overrides, stage == LOGS)
    if stage == SMALL:
        from pipelines.pair.stage import in_small

        config = in_small(config)
    if stage == LOGS and not config.logs.files:
        raise InputError("logs.files: name at least one log: espalier logs FILES.. --timings FILE")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # warnings and errors of libraries stay
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    modules = {}
    for name in STAGES_OF.get(stage, [stage]):
        modules[name] = importlib.import_module(f"pipelines.{name}.stage")
    if plan:
        from pipelines.plans import planned

        print(*planned(config, modules), sep="\n")
        return
    from pipelines.plans import outdated
    from pipelines.run import record_path
    from pipelines.terminal import console

    with only_one(config.folder):
        records = {name: _bytes(record_path(config, name)) for name in modules}
        for module in modules.values():
            module.run(config)
        anew = [name for name in modules if records[name] != _bytes(record_path(config, name))]
        words = outdated(config, anew, modules)
        if words:
            console.print(words, soft_wrap=True)


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a run's folder until the block or the process ends; InputError where another process has
    the lock."""
    path = folder / ".lock"
    lock = FileLock(path, blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as busy:
        raise InputError(
            f"{folder}: another espalier is at work there; wait, or choose another name="
        ) from busy
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # a run that was refused leaves nothing behind
            folder.rmdir()
            folder.parent.rmdir()
