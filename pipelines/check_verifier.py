"""`espalier check-verifier MODULE:NAME [style=..] [draws=..]`: whether anybody's verifier keeps the target's law.

NAME is a function `law(tree, target_probs_NV, draft_probs_NV)` that returns P(accepted node, extra token), which is
checked exactly; a function `verify(tree, target_probs_NV, draft_probs_NV, generator)` that draws an accepted node and
an extra token, which is checked by chi-square; or a class of `data_gen.verification.Verifier`. Trees are `DraftTree`s.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from data_gen.verification import STYLES, Verifier
from data_gen.verification.checking import ALARM, CASES, Fault, check_draws, check_law
from data_gen.verification.worlds import TOP_K
from selector.actions import IID
from selector.schema import InputError

DRAWS = 4000


def run(words: Sequence[str]) -> bool:
    """Check and print what was found; whether the verifier is right. InputError for what cannot be checked."""
    options = {"style": IID, "draws": str(DRAWS)}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in options:
            raise InputError(f"check-verifier: {word}: the options are style=.. and draws=..")
        options[key] = value
    style = options["style"]
    if not words or style not in (*STYLES, TOP_K):
        styles, given = ", ".join((*STYLES, TOP_K)), " ".join(words) or "nothing"
        raise InputError(f"check-verifier needs MODULE:NAME, and a style among {styles}; got {given}")
    if not options["draws"].isdigit() or int(options["draws"]) < 100:
        raise InputError(f"check-verifier: draws={options['draws']}: at least 100 are needed")
    fault, how = checked(named(words[0], style), style, int(options["draws"]))
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


def checked(verifier: Any, style: str, draws: int = DRAWS) -> tuple[Fault | None, str]:
    """The first fault, and how it was looked for."""
    check: Callable[[], Fault | None]
    law = getattr(verifier, "law", verifier)
    if not callable(law):
        raise InputError(f"check-verifier: {verifier!r:.60} is neither a function nor a verifier")
    if len(inspect.signature(law).parameters) == 3:
        check, how = (lambda: check_law(law, style)), "the law of the text is the target's, exactly"
    else:
        check = lambda: check_draws(verifier, style, draws)  # noqa: E731
        how = f"{draws} draws each differ no more than chance allows (false alarms: {ALARM:g})"
    try:
        return check(), how
    except InputError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raise InputError(f"check-verifier: the verifier raises {type(error).__name__}: {error}") from error
