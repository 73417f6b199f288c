"""From an artefact directory to decisions."""

from selector.runtime.selector import load_selector

__all__ = ["load_selector"]
