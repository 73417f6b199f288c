"""From an artefact directory to decisions."""

from selector.runtime.selector import Selector, Tuned, load_selector

__all__ = ["Selector", "Tuned", "load_selector"]
