"""Texts: prompts, the texts that the target writes, and logs of an engine."""
