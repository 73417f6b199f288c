"""The stages as users run them: a strict config, one folder for each stage, one command line."""
