"""`espalier check-verifier MODULE:NAME [style=..]`: whether anybody's verifier keeps the target's law.

NAME is a function `law(tree, target_probs_NV, draft_probs_NV)` that returns P(accepted node, extra token), which is
checked exactly; a function `verify(tree, target_probs_NV, draft_probs_NV, generator)` that draws an accepted node and
an extra token, which is checked by chi-square; or a class of `data_gen.verification.Verifier`. Trees are `DraftTree`s.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from data_gen.verification import STYLES, Verifier
from data_gen.verification.checking import ALARM, CASES, Fault, check_draws, check_law
from data_gen.verification.worlds import TOP_K
from selector.actions import IID
from selector.schema import InputError

DRAWS = 4000


def run(words: Sequence[str]) -> bool:
    """Check and print what was found; whether the verifier is right. InputError for what cannot be checked."""
    place, *others = words
    style = others[0].removeprefix("style=") if others else IID
    if len(others) > 1 or style not in (*STYLES, TOP_K):
        styles = ", ".join((*STYLES, TOP_K))
        raise InputError(f"check-verifier: after MODULE:NAME comes style=.., a style among {styles}")
    fault, how = checked(named(place, style), style)
    print(fault or f"right: {how}, on {len(CASES)} kinds of trees of style {style}")
    return fault is None


def named(place: str, style: str) -> Any:
    """The object at MODULE:NAME, from the working directory, too; a class of verifiers is made for the style."""
    module, _, name = place.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
        return found(style) if isinstance(found, type) and issubclass(found, Verifier) else found
    except Exception as error:  # whatever the import of somebody's module raises
        raise InputError(f"check-verifier: {place}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)


def checked(verifier: Any, style: str) -> tuple[Fault | None, str]:
    """The first fault, and how it was looked for."""
    law = getattr(verifier, "law", verifier)
    if not callable(law):
        raise InputError(f"check-verifier: {verifier!r:.60} is neither a function nor a verifier")
    exact = len(inspect.signature(law).parameters) == 3
    how = "the law of the text is the target's, exactly"
    if not exact:
        how = f"{DRAWS} draws each differ no more than chance allows (false alarms: {ALARM:g})"
    try:
        return check_law(law, style) if exact else check_draws(verifier, style, DRAWS), how
    except InputError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise InputError(f"check-verifier: the verifier raises {type(error).__name__}: {error}") from error
