"""The stages as users run them: a strict config, one room per stage, one command line."""
