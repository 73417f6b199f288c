"""The decisions of the engines' plug-ins, from token ids alone.

The selector is one that `espalier logs` trained; it decides at the level `text`. What it decides depends on the engine:

    copies   for each request, the tokens that are copied from its own text, perhaps none
    length   one length for all requests of a batch, whose chains a drafter then drafts

Legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from selector.actions import Action, Lookup
from selector.runtime.artefact import Features
from selector.runtime.selector import load_selector
from selector.runtime.tokens import TokenStatistics
from selector.runtime.tuned import Tuned
from selector.schema import LOG, TEXT, InputError

OPTIONS = ("selector", "temperature", "top_p")  # that an engine's configuration may hold under the name `espalier`


class Text:
    """The token ids of one request, to which new ones are added."""

    def __init__(self, ids_N: NDArray[Any], prompt: int, sampling: Sampling, tokens: TokenStatistics) -> None:
        self.known = DrafterKnowledge(ids_N[:prompt].tolist(), sampling, tokens)
        self.known.committed(ids_N[prompt:].tolist())
        self._ids_N = ids_N.copy()  # with which `grow` compares engines' rows

    def __len__(self) -> int:
        return len(self.known.text.index)

    def grow(self, ids_N: NDArray[Any]) -> bool:
        """Add what `ids_N` has beyond the text; False, and nothing is added, where it is not a continuation of it."""
        count = len(self)
        if len(ids_N) < count or ids_N[count - 1] != self._ids_N[-1] or not np.array_equal(ids_N[:count], self._ids_N):
            return False
        self.known.committed(ids_N[count:].tolist())
        self._ids_N = ids_N.copy()
        return True


class TextSelector:
    """Decides for an engine whose requests have one sampling setting.

    Args:
        folder: an artefact directory of `espalier logs`.

    Raises:
        InputError: the artefact cannot be read or is not one of a log, or the setting is out of range.
    """

    def __init__(self, folder: str | Path, temperature: float = 0.0, top_p: float = 1.0) -> None:
        self._selector, self._sampling = load_selector(folder), Sampling(temperature, top_p)
        if self._selector.schema != LOG:
            raise InputError(f"{folder}: plug-ins see token ids alone; train a selector for that: espalier logs")
        chains = {action.nodes for action in self._selector.actions if isinstance(action, Action)}
        self.longest_chain, self._folder = max(chains), folder
        self._at = lru_cache(maxsize=None)(self._tuned)
        self._tuned(1, ())  # checks the setting

    @classmethod
    def of(cls, options: object) -> TextSelector:
        """From an engine's configuration, a mapping with `OPTIONS`; InputError where it lacks or has others."""
        if not isinstance(options, Mapping) or "selector" not in options or not set(options) <= set(OPTIONS):
            raise InputError(f"espalier: the engine's configuration needs the keys {', '.join(OPTIONS)}, got {options}")
        return cls(**{"folder" if key == "selector" else key: value for key, value in options.items()})

    def of_copies(self) -> TextSelector:
        """Itself; InputError where it was trained for an engine that also drafts chains, which would be chosen here."""
        if self.longest_chain > 0:
            raise InputError(f"{self._folder}: it was trained beside a drafter; train it with logs.drafter=none")
        return self

    def of_chains(self, lengths: Sequence[int]) -> TextSelector:
        """Itself; InputError where it does not know chains of some lengths."""
        if max(lengths) > self.longest_chain:
            raise InputError(f"{self._folder}: chains of {max(lengths)} tokens; it knows up to {self.longest_chain}")
        return self

    def text(self, ids: Sequence[int] | NDArray[Any], prompt: int) -> Text:
        """A request's text, whose first `prompt` tokens are its prompt."""
        return Text(np.asarray(ids, np.int64), prompt, self._sampling, self._selector.tokens)

    def copies(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        """For requests that are decoded together, the tokens that each copies, at most `most` of them."""
        tuned = self._at(len(texts), ())
        features = self._features(texts)
        chosen = [tuned.select(features[0])] if len(texts) == 1 else tuned.select_jointly(features)
        lengths = [action.length if isinstance(action, Lookup) else 0 for action in chosen]
        return [
            text.known.text.index.proposal(min(length, limit))
            for text, length, limit in zip(texts, lengths, most, strict=True)
        ]

    def length(self, texts: Sequence[Text], lengths: Sequence[int]) -> int:
        """The best of some lengths for chains that all requests of a batch draft."""
        return self._at(len(texts), tuple(lengths)).select_common(self._features(texts)).nodes

    def _features(self, texts: Sequence[Text]) -> list[Features]:
        for text in texts:
            text.known.batch = len(texts)
        return [text.known.features(TEXT) for text in texts]

    def _tuned(self, batch: int, lengths: tuple[int, ...]) -> Tuned:
        """For so many requests, and for chains of some lengths; for all actions where there are none."""
        shapes = [(1, length, 0) for length in lengths] or None
        return self._selector.at(*self._sampling.law[:2], shapes=shapes, batch=batch, level=TEXT)
