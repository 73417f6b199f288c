"""Models from GGUF files."""

from __future__ import annotations

from selector.schema import InputError


def resolved(name: str, role: str) -> str:
    """The directory or hub id of a model: what a GGUF file is converted to, or the name itself.

    Raises:
        InputError: the file is missing or cannot be converted; names the role.
    """
    if name == "smollm2" or name.endswith(".gguf"):
        raise InputError(f"pair.{role}: {name} cannot be converted yet")
    return name
