"""The console script and `python -m pipelines`. If a package of the pipeline is missing, one line names it."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from pipelines.cli import main as command_line
    except ModuleNotFoundError as error:
        print(
            f"espalier: {error.name} is not installed: pip install '.[pipeline]' in Espalier's repository",
            file=sys.stderr,
        )
        sys.exit(2)
    command_line()


if __name__ == "__main__":
    main()
