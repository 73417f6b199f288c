"""One file per stage, a strict config, one command line."""
