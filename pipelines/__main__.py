"""The console script, and `python -m pipelines`."""

from pipelines.cli import app as main

if __name__ == "__main__":
    main()
