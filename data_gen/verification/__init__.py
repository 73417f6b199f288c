"""Verifiers: which drafted tokens to keep, and the one token to add, so that the text still follows the target.

A new verifier is one small class in a file of its own and one entry in `VERIFIERS`.
"""

from data_gen.verification.base import Verdict, Verifier
from data_gen.verification.naive_tree import NaiveTree
from data_gen.verification.specinfer import SpecInfer
from data_gen.verification.traversal import Traversal

VERIFIERS: dict[str, type[Verifier]] = {cls.name: cls for cls in (NaiveTree, SpecInfer, Traversal)}


def get_verifier(name: str) -> Verifier:
    """The verifier called `name`; ValueError that lists the names where there is none."""
    if name not in VERIFIERS:
        raise ValueError(f"unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
    return VERIFIERS[name]()


__all__ = ["VERIFIERS", "Verdict", "Verifier", "get_verifier"]
