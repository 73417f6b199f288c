"""Verifiers decide which drafted tokens are kept, and add one token, so that the text follows the
target's law.

A new verifier is one small class and one entry in `VERIFIERS`, or in `STYLED` if it is not for
i.i.d. drafts.
"""

from data_gen.verification.acceptance import optimal_acceptance
from data_gen.verification.base import BottomUp, Verdict, Verifier
from data_gen.verification.best import LiftedBest
from data_gen.verification.greedy import Greedy, LiftedGreedy
from data_gen.verification.k_seq import LiftedSpecTr, LiftedUniform, SpecTr
from data_gen.verification.khisti import Khisti
from data_gen.verification.one_path import Block, GreedyBlock, Naive, OnePath
from data_gen.verification.priority import LiftedPriority, Priority
from data_gen.verification.traversal import NSS, NaiveTree, SpecInfer, Traversal
from selector.actions import GREEDY

_TOP_DOWN: tuple[type[Verifier], ...] = (NSS, Naive, NaiveTree, SpecTr, SpecInfer, Khisti, Priority)
_BOTTOM_UP: tuple[type[Verifier], ...] = (
    Block,
    GreedyBlock,
    Traversal,
    LiftedSpecTr,
    LiftedPriority,
    LiftedUniform,
    LiftedBest,
)
# all are lossless for i.i.d. drafts
VERIFIERS = {cls.name: cls for cls in (*_TOP_DOWN, *_BOTTOM_UP)}
_GREEDY: tuple[type[Verifier], ...] = (Greedy, LiftedGreedy)
STYLED = {cls.name: cls for cls in _GREEDY}  # lossless for other drafts only

# The verifier of trees whose tokens are certain given the text, as copies and shapes by rank are.
# On these no verifier accepts more: a path is accepted with the target's probability of it.
CERTAIN: Verifier = NSS()


def get_verifier(name: str, style: str = "iid") -> Verifier:
    """The verifier of that name; ValueError if there is none, or if it is not lossless for drafts
    of that style."""
    verifiers = VERIFIERS | STYLED
    if name not in verifiers:
        raise ValueError(f"unknown verifier {name!r}; known are {', '.join(verifiers)}")
    return verifiers[name](style)


def styled(verifier: Verifier, style: str) -> Verifier:
    """The verifier of trees of a style, beside `verifier` for the others: the same rule where it is
    lossless for the style, else the style's bottom-up or top-down rule, whichever `verifier` is."""
    if style == verifier.style:
        return verifier
    rule = verifier.chain if isinstance(verifier, OnePath) else verifier
    if style in rule.styles:
        return type(rule)(style)
    if isinstance(rule, BottomUp):
        return LiftedGreedy(style) if style == GREEDY else Traversal(style)
    return Greedy(style) if style == GREEDY else SpecInfer(style)


def at_every_level(verifier: Verifier) -> Verifier:
    """The verifier of trees that branch at every level: the same one, but its chain's rule in place
    of GBV, which compares whole paths."""
    return Traversal() if isinstance(verifier, GreedyBlock) else verifier


__all__ = [
    "CERTAIN",
    "STYLED",
    "VERIFIERS",
    "Verdict",
    "Verifier",
    "at_every_level",
    "get_verifier",
    "optimal_acceptance",
    "styled",
]
