"""`espalier STAGE [--config FILE] [section.key=value ...] [--plan]`."""

from __future__ import annotations

import ast
import difflib
import errno
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from selector.schema import InputError

STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
APART = ("quick", "logs")  # no part of the way from a pair to a selector
STUDIES = ("audit", "bench")  # questions of ours
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)  # full, or not for us to write to
ALL = "demo"  # all stages, in order
DEMO = Path("configs/demo.yaml")
USAGE = "espalier STAGE [--config FILE] [section.key=value ...] [--plan]\n\nStages:"
USAGE_OF = "espalier {stage} [--config FILE] [section.key=value ...] [--plan]\n"
OPTIONS = """Options:
  --config FILE  the run's YAML file (configs/demo.yaml; logs: none)
  --name NAME    of the run's folder, runs/NAME
  --plan         print what would be done, with sizes, and do nothing
  --test FILE    logs: a held-out log; may be given several times
  --timings FILE logs: the engine's step times by batch size, a CSV file
  --from FILE    latency: read an engine's own step times, a CSV file
  --engine NAME  export: write the table of vllm, sglang or tensorrt-llm
  --help         of a stage: what it does, and the keys that it reads, with defaults"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(add_help_option=False)
def espalier(
    stage: Annotated[str, typer.Argument()] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value", show_default=False)] = None,
    config: Annotated[Path | None, typer.Option(help="the run's YAML file")] = None,
    name: Annotated[str, typer.Option("--name", help="of the run's folder")] = "",
    plan: Annotated[bool, typer.Option("--plan", help="print what would be done, with sizes, and do nothing")] = False,
    timings: Annotated[str, typer.Option("--from", help="latency: an engine's own step times, a CSV file")] = "",
    engine: Annotated[str, typer.Option("--engine", help="export: vllm, sglang or tensorrt-llm")] = "",
    test: Annotated[list[str] | None, typer.Option("--test", help="logs: a held-out log")] = None,
    step_times: Annotated[str, typer.Option("--timings", help="logs: the engine's step times")] = "",
    help_: Annotated[bool, typer.Option("--help", help="what the stage does, and the keys that it reads")] = False,
) -> None:
    """Learn where a speculative decoder's draft tree should branch: from a pair of models to a selector.

    A mistake of the user's is one line and exit code 2; an interruption is exit code 130, and the same command goes on.
    """
    try:
        if help_ or not stage:
            print(usage(stage))
        else:
            given, files = parted(stage, overrides or [])
            flags: dict[str, str | list[str]] = {
                "name": name,
                "latency.timings": timings,
                "export.engine": engine,
                "logs.files": files,
                "logs.test": test or [],
                "logs.timings": step_times,
            }
            run(stage, config, [*given, *flagged(stage, flags)], plan)
    except InputError as error:
        print(f"espalier: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except OSError as error:
        if error.errno not in DISK:
            raise
        from selector.files import unwritable

        print(f"espalier: {unwritable('a file of the run', error)}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        print("espalier: interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from error


def parted(stage: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Overrides, and the files that the stage `logs` is given before or after them."""
    if stage != "logs":
        return words, []
    files = [word for word in words if "=" not in word or Path(word).exists()]
    return [word for word in words if word not in files], files


def run(stage: str, file: Path | None, overrides: list[str], plan: bool) -> None:
    """Resolve the config, then run or plan one stage, or all of them."""
    check_name(stage)
    from pipelines.config import load_config  # seconds to import: after what needs no torch

    if stage == "logs":
        from pipelines.logs.defaults import BASE

        config = load_config(file, overrides, BASE)
    else:
        config = load_config(file or DEMO, overrides)
    _quiet_libraries()
    modules = {name: importlib.import_module(module_of(name)) for name in (STAGES if stage == ALL else (stage,))}
    if plan:
        for name, module in modules.items():
            for line in module.plan(config):
                print(f"{name}: {line}")
        return
    with only_one(config.folder):
        for module in modules.values():
            module.run(config)


def flagged(stage: str, flags: dict[str, str | list[str]]) -> list[str]:
    """Flags as overrides of the keys that they set; InputError where they belong to another stage."""
    given = {key: value for key, value in flags.items() if value}
    for key in given:
        owner = key.partition(".")[0]
        if "." in key and stage not in (owner, ALL):
            raise InputError(f"{key} is a key of the {owner} stage")
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """One process of a machine at a time works in a run's folder. The lock is free once it has ended, however it did.

    Raises:
        InputError: another one is at work there.
    """
    from filelock import FileLock, Timeout

    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        with FileLock(Path(tempfile.gettempdir()) / f"espalier-{name}.lock", timeout=0):
            yield
    except Timeout as error:
        raise InputError(
            f"{folder}: another espalier is at work there; wait for it, or choose another name="
        ) from error


def check_name(stage: str) -> None:
    """InputError where there is no such stage; names the nearest one."""
    names = [*STAGES, *APART, *STUDIES, ALL]
    if stage not in names:
        close = difflib.get_close_matches(stage, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"stages are {', '.join(names)}"
        raise InputError(f"unknown stage {stage!r}; {hint}")


def module_of(stage: str) -> str:
    return f"pipelines.studies.{stage}" if stage in STUDIES else f"pipelines.{stage}.stage"


def usage(stage: str) -> str:
    """What `--help` prints: all stages, or one with the keys that it reads."""
    if not stage:
        lines = [f"  {name:<9} {_summary(name)}" for name in (*STAGES, *APART, *STUDIES)]
        return "\n".join([USAGE, *lines, f"  {ALL:<9} the first {len(STAGES)} in order", "", OPTIONS])
    check_name(stage)
    from pipelines.config.reference import READS, parts

    names = STAGES if stage == ALL else (stage,)
    read = {"", *(section for name in names for section in READS[name])}
    lines = [USAGE_OF.format(stage=stage), *(f"  {_summary(name)}" for name in names), "", OPTIONS]
    for part in parts():
        if part.name.split(".")[0] in read and part.keys:
            lines += ["", f"{part.name or 'run'}: {part.meaning.splitlines()[0]}"]
            lines += [f"  {key.name} = {key.default}\n      {key.meaning}" for key in part.keys]
    return "\n".join(lines)


def _summary(stage: str) -> str:
    """The first paragraph of a stage's module."""
    spec = importlib.util.find_spec(module_of(stage))
    assert spec is not None and spec.origin is not None
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).removeprefix(f"Stage `{stage}`: ")


def _quiet_libraries() -> None:
    """Progress is ours to show; warnings and errors of the libraries stay."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
