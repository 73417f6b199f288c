"""`espalier STAGE [--config FILE] [section.key=value ...] [--plan]`."""

from __future__ import annotations

import ast
import difflib
import errno
import importlib
import importlib.util
import json
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from selector.files import unwritable
from selector.schema import InputError

STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
APART = ("quick", "logs", "distil")  # stages that stand alone
ALL = "demo"  # all of STAGES, in order
CHECK = "check-verifier"  # a tool without config or run
NAMES = (*STAGES, *APART, ALL)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)  # the disk is full or not writable
DEMO = Path("configs/demo.yaml")
USAGE = "espalier {stage} [--config FILE] [section.key=value ...] [--plan]\n"
OPTIONS = """Options:
  --config FILE  the run's YAML file (configs/demo.yaml; logs: none)
  --name NAME    the run's name; its folder is runs/NAME
  --plan         print what would be done, with sizes, and do nothing
  --test FILE    logs: a held-out log; may be given several times
  --timings FILE logs: the engine's step times by batch size, a CSV file
  --from FILE    latency: read an engine's own step times, a CSV file
  --engine NAME  export: write settings of an engine (export.engine)
  --help         of a stage: what it does, and the keys that it reads
  --version      print the version"""

KEYS = "Keys that it reads (docs/configuration.md has defaults and meanings):"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(add_help_option=False)
def espalier(
    stage: Annotated[str, typer.Argument()] = "",
    words: Annotated[list[str] | None, typer.Argument()] = None,
    config: Annotated[Path | None, typer.Option()] = None,
    name: Annotated[str, typer.Option()] = "",
    plan: Annotated[bool, typer.Option("--plan")] = False,
    timings: Annotated[str, typer.Option("--from")] = "",
    engine: Annotated[str, typer.Option()] = "",
    test: Annotated[list[str] | None, typer.Option()] = None,
    step_times: Annotated[str, typer.Option("--timings")] = "",
    help_: Annotated[bool, typer.Option("--help")] = False,
    version: Annotated[bool, typer.Option("--version")] = False,
) -> None:
    """Run one stage, or all of them (`OPTIONS`). A user's mistake gives one line and exit code 2; an interruption gives
    exit code 130, and the same command continues."""
    try:
        if version:
            print(f"espalier {metadata.version('espalier-decoding')}")
            return
        if help_ or not stage:
            print(usage(stage))
            return
        if stage == CHECK:
            from pipelines import check_verifier

            raise typer.Exit(0 if check_verifier.run(words or []) else 1)
        files = [word for word in words or [] if stage == "logs" and ("=" not in word or Path(word).exists())]
        overrides = [word for word in words or [] if word not in files]
        flags = {"name": name, "latency.timings": timings or step_times, "export.engine": engine, "logs.files": files}
        overrides += _flags(stage, flags | {"logs.test": test})
        run(stage, config, overrides, plan)
    except InputError as error:
        _exit(str(error), 2, error)
    except OSError as error:
        if error.errno not in DISK:
            raise
        _exit(str(unwritable("a file of the run", error)), 2, error)
    except KeyboardInterrupt as error:
        _exit("interrupted; the same command goes on from here", 130, error)


def _exit(message: str, code: int, cause: BaseException) -> None:
    print(f"espalier: {message}", file=sys.stderr)
    raise typer.Exit(code) from cause


def _flags(stage: str, flags: dict[str, Any]) -> list[str]:
    """The flags that are set, as overrides of their keys; InputError where one belongs to another stage."""
    given = {key: value for key, value in flags.items() if value}
    for key in given:
        owner = key.partition(".")[0]
        if "." in key and stage not in (owner, ALL) and (stage, key) != ("logs", "latency.timings"):
            raise InputError(f"{key} is a key of the {owner} stage")
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def run(stage: str, file: Path | None, overrides: list[str], plan: bool) -> None:
    """Resolve the config, then run or plan one stage, or all of them."""
    _check_name(stage)
    from pipelines.config import LOGS_BASE, load_config  # takes seconds, and a misspelt stage needs none of it

    config = load_config(file, overrides, LOGS_BASE) if stage == "logs" else load_config(file or DEMO, overrides)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # warnings and errors of libraries stay
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    modules = {name: importlib.import_module(module_of(name)) for name in _stages(stage)}
    if plan:
        from pipelines.planning import planned

        print(*planned(config, modules), sep="\n")
        return
    with only_one(config.folder):
        for module in modules.values():
            module.run(config)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a run's folder until the block or the process ends. What is made for the lock alone is removed again.

    Raises:
        InputError: another process has the lock, or its file cannot be made.
    """
    made, path = [each for each in (folder, folder.parent) if not each.exists()], folder / ".lock"
    lock = FileLock(path, blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as busy:
        raise InputError(f"{folder}: another espalier is at work there; wait, or choose another name=") from busy
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise InputError(f"{path}: a link or a folder is where the run's lock belongs: remove it") from error
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise unwritable(path, error) from error
        warnings.warn(f"{path}: no locks on this file system: run one command at a time", stacklevel=2)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        for each in made:
            with suppress(OSError):  # it holds the run's files
                each.rmdir()


def usage(stage: str) -> str:
    """What `--help` prints: all stages, or one stage with the names of the keys that it reads."""
    if not stage:
        lines = [f"  {name:<9} {declared_by(name)[0]}" for name in (*STAGES, *APART)]
        lines.append(f"  {ALL:<9} the first {len(STAGES)} in order")
        lines.append(f"  {CHECK} MODULE:NAME [style=..]: does a verifier of yours keep the target's law?")
        return "\n".join([USAGE.format(stage="STAGE"), "Stages:", *lines, "", OPTIONS])
    if stage == CHECK:
        from pipelines import check_verifier

        return str(check_verifier.__doc__)
    _check_name(stage)
    from pipelines.config import parts

    declared = [declared_by(name) for name in _stages(stage)]
    read = {"name", "seed", *(key for _, sections in declared for key in sections)}
    lines = [
        USAGE.format(stage=stage),
        *(f"  {summary}" for summary, _ in declared),
        "",
        *OPTIONS.splitlines(),
        "",
        KEYS,
    ]
    for part in parts():
        keys = [key.name.rpartition(".")[2] for key in part.keys if key.name.partition(".")[0] in read]
        if keys:
            lines.append(f"  {part.name or 'the run'}: {', '.join(keys)}")
    return "\n".join(folded for line in lines for folded in _folded(line))


def _folded(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, 80, subsequent_indent=indent, break_on_hyphens=False) if len(line) > 80 else [line]


def _check_name(stage: str) -> None:
    if stage not in NAMES:
        close = difflib.get_close_matches(stage, NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"stages are {', '.join(NAMES)}"
        raise InputError(f"unknown stage {stage!r}; {hint}")


def _stages(name: str) -> tuple[str, ...]:
    return STAGES if name == ALL else (name,)


def module_of(stage: str) -> str:
    return f"pipelines.{stage}.stage"


def declared_by(stage: str) -> tuple[str, tuple[str, ...]]:
    """The first paragraph of a stage's module, and its `SECTIONS`: from its source, because an import takes seconds."""
    spec = importlib.util.find_spec(module_of(stage))
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    summary = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split()).removeprefix(f"Stage `{stage}`: ")
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    sections = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "SECTIONS")
    return summary, ast.literal_eval(sections)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
