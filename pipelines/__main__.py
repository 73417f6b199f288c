"""The console script, and `python -m pipelines`."""

from pipelines.cli import main

if __name__ == "__main__":
    main()
