"""`espalier STAGE [--config FILE] [section.key=value ...] [--plan]`."""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from selector.schema import InputError

STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
APART = ("quick",)  # no part of the way to a selector
STUDIES = ("audit", "bench")  # questions of ours
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)  # full, or not for us to write to
ALL = "demo"  # all stages, in order

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def espalier(
    stage: Annotated[
        str, typer.Argument(help=f"{', '.join(STAGES)}; {ALL}: these in order; {', '.join(APART + STUDIES)}")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value", show_default=False)] = None,
    config: Annotated[Path, typer.Option(help="the run's YAML file")] = Path("configs/demo.yaml"),
    plan: Annotated[bool, typer.Option("--plan", help="print what would be done, with sizes, and do nothing")] = False,
) -> None:
    """Learn where a speculative decoder's draft tree should branch: from a pair of models to a selector.

    A mistake of the user's is one line and exit code 2; an interruption is exit code 130, and the same command goes on.
    """
    try:
        run(stage, config, overrides or [], plan)
    except InputError as error:
        print(f"espalier: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"espalier: {error.filename or 'a file'}: {error.strerror}; what was there is as it was", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        print("espalier: interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from error


def run(stage: str, file: Path, overrides: list[str], plan: bool) -> None:
    """Resolve the config, then run or plan one stage, or all of them."""
    names = [*STAGES, *APART, *STUDIES, ALL]
    if stage not in names:
        close = difflib.get_close_matches(stage, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"stages are {', '.join(names)}"
        raise InputError(f"unknown stage {stage!r}; {hint}")
    from pipelines.config import load_config  # seconds to import: after what needs no torch

    config = load_config(file, overrides)
    _quiet_libraries()
    for name in STAGES if stage == ALL else (stage,):
        module = importlib.import_module(f"pipelines.studies.{name}" if name in STUDIES else f"pipelines.{name}.stage")
        if plan:
            for line in module.plan(config):
                print(f"{name}: {line}")
        else:
            module.run(config)


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
