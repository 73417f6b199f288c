"""`espalier STAGE [--config FILE] [section.key=value ...] [--plan]`."""

from __future__ import annotations

import importlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from selector.schema import InputError

STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
StageName = StrEnum("StageName", [*STAGES, "demo"])  # type: ignore[misc]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def espalier(
    stage: Annotated[StageName, typer.Argument(help="what to run; `demo` runs all stages in order")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value", show_default=False)] = None,
    config: Annotated[Path, typer.Option(help="the run's YAML file")] = Path("configs/demo.yaml"),
    plan: Annotated[bool, typer.Option("--plan", help="print what would be done, with sizes, and do nothing")] = False,
) -> None:
    """Learn where a speculative decoder's draft tree should branch: from a pair of models to a selector."""
    from pipelines.config import load_config

    resolved = load_config(config, overrides or [])
    for name in STAGES if stage == "demo" else (stage.value,):
        module = importlib.import_module(f"pipelines.{name}")
        if plan:
            for line in module.plan(resolved):
                print(f"{name}: {line}")
        else:
            module.run(resolved)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, an interruption exit code 130."""
    try:
        app()
    except InputError as error:
        print(f"espalier: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("espalier: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
