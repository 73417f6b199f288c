"""The decisions of the engines' plug-ins, from token ids alone.

The selector is one that `espalier logs` trained without a drafter; it decides at the level `text` for each request how
many tokens of its own text are copied, perhaps none.

Legend: N tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from selector.files import first_line
from selector.runtime.selector import load_selector
from selector.schema import LOG, TEXT, InputError

NAME = "espalier"  # of the entry in an engine's configuration, which holds `OPTIONS`
OPTIONS = {"selector": str | Path, "temperature": int | float, "top_p": int | float}


class TextSelector:
    """Decides for an engine whose requests have one sampling setting, with an artefact of `espalier logs`. InputError
    for an artefact that cannot be read, is not a log's or drafts, and for a setting that is out of range."""

    def __init__(self, selector: str | Path, temperature: float = 0.0, top_p: float = 1.0) -> None:
        self._selector, self._sampling = load_selector(selector), Sampling(temperature, top_p)
        if self._selector.schema != LOG:
            raise InputError(f"{selector}: plug-ins see token ids alone; train a selector for that: espalier logs")
        if any(action.drafts for action in self._selector.actions):
            raise InputError(f"{selector}: it was trained beside a drafter; train it with logs.drafter=none")
        self._at = cache(lambda batch: self._selector.at(temperature, top_p, None, batch, TEXT))
        self._at(1)  # checks the setting

    @classmethod
    def of(cls, options: object) -> TextSelector:
        """From an engine's configuration, a mapping with `OPTIONS`; InputError where it has none, or others."""
        given = dict(options) if isinstance(options, Mapping) else {}
        if "selector" not in given or any(not isinstance(own, OPTIONS.get(key, ())) for key, own in given.items()):
            raise InputError(f"{NAME}: its options are {', '.join(OPTIONS)}, a path and two numbers, not {options}")
        return cls(**given)

    def text(self, ids: Sequence[int] | NDArray[Any], prompt: int) -> DrafterKnowledge:
        """A request's text, whose first `prompt` tokens are its prompt."""
        tokens: list[int] = np.asarray(ids, np.int64).tolist()
        known = DrafterKnowledge(tokens[:prompt], self._sampling, self._selector.tokens)
        known.committed(tokens[prompt:])
        return known

    def copies(self, texts: Sequence[DrafterKnowledge], most: Sequence[int]) -> list[list[int]]:
        """For requests that are decoded together, the tokens that each copies, at most `most` of them."""
        for text in texts:
            text.batch = len(texts)
        tuned, features = self._at(len(texts)), [text.features(TEXT) for text in texts]
        chosen = [tuned.select(features[0])] if len(texts) == 1 else tuned.select_jointly(features)
        lengths = [action.L1 if action is not None and action.copies else 0 for action in chosen]
        limited = zip(texts, lengths, most, strict=True)
        return [text.text.index.proposal(min(length, limit)) for text, length, limit in limited]


def grow(text: DrafterKnowledge, ids_N: NDArray[Any]) -> bool:
    """Add what `ids_N` has beyond a text; False, and nothing is added, where it is not a continuation of it."""
    own, ids = text.text.index.tokens, ids_N.tolist()
    if ids[: len(own)] != own:
        return False
    text.committed(ids[len(own) :])
    return True


@contextmanager
def no_harm() -> Iterator[None]:
    """A decision that fails must not end a server: nothing is drafted then, and the log says so once for each error."""
    try:
        yield
    except Exception as error:
        _log_once(f"no draft: {type(error).__name__}: {first_line(error)}")


@cache
def _log_once(message: str) -> None:
    logging.getLogger(NAME).exception(message)
