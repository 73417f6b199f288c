"""Verifiers: which drafted tokens to keep, and the one token to add, so that the text still follows the target.

A new verifier is one small class in a file of its own and one entry in `VERIFIERS`.
"""

from data_gen.verification.base import Verdict, Verifier
from data_gen.verification.naive_tree import NaiveTree
from data_gen.verification.specinfer import SpecInfer
from data_gen.verification.traversal import Traversal

VERIFIERS: dict[str, type[Verifier]] = {cls.name: cls for cls in (NaiveTree, SpecInfer, Traversal)}


def get_verifier(name: str, style: str = "iid") -> Verifier:
    """The verifier called `name`; ValueError where there is none, or it is not lossless for drafts of that style."""
    if name not in VERIFIERS:
        raise ValueError(f"unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
    if style not in VERIFIERS[name].styles:
        raise ValueError(f"{name} is not lossless for style {style!r}; it is for {', '.join(VERIFIERS[name].styles)}")
    return VERIFIERS[name]()


__all__ = ["VERIFIERS", "Verdict", "Verifier", "get_verifier"]
