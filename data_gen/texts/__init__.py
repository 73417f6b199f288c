"""Texts: prompts, the texts that the target samples, and logs of an engine."""
