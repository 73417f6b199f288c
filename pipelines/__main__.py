"""`python -m pipelines`, and the console script: the command line, where more than the runtime is installed."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from pipelines.cli import main as command_line
    except ModuleNotFoundError as error:
        print(f"espalier: {error.name} is not installed: pip install 'espalier[pipeline]'", file=sys.stderr)
        sys.exit(2)
    command_line()


if __name__ == "__main__":
    main()
