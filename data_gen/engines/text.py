"""The decisions of the engines' plug-ins, from token ids alone.

The selector is one that `espalier logs` trained. It decides at the level `text` for each request
how many tokens of its own text are copied, or how many a draft model drafts, perhaps none.

Legend: N tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from selector.actions import Action
from selector.files import first_line
from selector.runtime.selector import load_selector
from selector.schema import LOG, TEXT, InputError

NAME = "espalier"  # of the entry in an engine's configuration, which holds `OPTIONS`
OPTIONS = {"selector": str | Path, "temperature": int | float, "top_p": int | float, "draft": str}
# of tokens after texts, by their lengths
Chains = Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[int]]]


class TextSelector:
    """Decides for an engine whose requests have one sampling setting, with an artefact of
    `espalier logs`; `chains` drafts, where the log had a drafter (`CachedDrafter.chains`).
    InputError for an artefact that cannot be read or is not a log's, that drafts where nothing else
    does, and for a setting that is out of range."""

    def __init__(
        self,
        selector: str | Path,
        temperature: float = 0.0,
        top_p: float = 1.0,
        chains: Chains | None = None,
    ) -> None:
        self._selector = load_selector(selector)
        self._sampling = Sampling(temperature, top_p)
        if self._selector.schema != LOG:
            raise InputError(
                f"{selector}: plug-ins see token ids alone; train a selector for that: espalier "
                "logs"
            )
        if chains is None and any(action.drafts for action in self._selector.actions):
            raise InputError(
                f"{selector}: it drafts: name its `draft` model, or train it with logs.drafter=none"
            )
        self._chains: Chains = chains or _no_chains
        self._at = cache(lambda batch: self._selector.at(temperature, top_p, None, batch, TEXT))
        self._at(1)  # checks the setting

    @classmethod
    def of(cls, options: object, load: Callable[[str], Chains]) -> TextSelector:
        """From an engine's configuration, a mapping with `OPTIONS`, where `load` is given the name
        of a draft model; InputError where it has none, or others."""
        settings = dict(options) if isinstance(options, Mapping) else {}
        wrong = [
            key for key, value in settings.items() if not isinstance(value, OPTIONS.get(key, ()))
        ]
        if wrong or "selector" not in settings:
            wanted = f"{', '.join(OPTIONS)}: a path, two numbers and a model's name"
            raise InputError(f"{NAME}: its options are {wanted}, not {options}")
        draft = settings.pop("draft", None)
        chains = None
        if draft is not None:
            chains = load(draft)
        return cls(**settings, chains=chains)

    def text(self, ids: Sequence[int] | NDArray[Any], prompt: int) -> DrafterKnowledge:
        """A request's text, whose first `prompt` tokens are its prompt."""
        tokens: list[int] = np.asarray(ids, np.int64).tolist()
        knowledge = DrafterKnowledge(tokens[:prompt], self._sampling, self._selector.tokens)
        knowledge.committed(tokens[prompt:])
        return knowledge

    def drafts(self, texts: Sequence[DrafterKnowledge], most: Sequence[int]) -> list[list[int]]:
        """For requests that are decoded together, the tokens that each copies or drafts, at most
        `most` of them."""
        copies: list[list[int]] = []
        chain_lengths: list[int] = []
        for text, action, longest in zip(texts, self._actions(texts), most, strict=True):
            copied: list[int] = []
            chain_length = 0
            if action is not None:
                length = min(action.L1, longest)
                if action.copies:
                    copied = text.text.index.proposal(length)
                else:
                    chain_length = length
            copies.append(copied)
            chain_lengths.append(chain_length)
        chains = self._chains([text.text.index.tokens for text in texts], chain_lengths)
        return [copied or drafted for copied, drafted in zip(copies, chains, strict=True)]

    def _actions(self, texts: Sequence[DrafterKnowledge]) -> Sequence[Action | None]:
        for text in texts:
            text.batch = len(texts)
        policy = self._at(len(texts))
        if not policy.feature_levels:  # a static tree, of no token where nothing pays, needs none
            return [policy.select(None)] * len(texts)
        features = [text.features(*policy.feature_levels) for text in texts]
        if len(texts) == 1:
            return [policy.select(features[0])]
        return policy.select_jointly(features)


def _no_chains(texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    return [[] for _ in texts]


def grow(text: DrafterKnowledge, ids_N: NDArray[Any]) -> bool:
    """Add what `ids_N` has beyond a text; False, and nothing is added, where it is not a
    continuation of it."""
    tokens = text.text.index.tokens
    ids = ids_N.tolist()
    if ids[: len(tokens)] != tokens:
        return False
    text.committed(ids[len(tokens) :])
    return True


@contextmanager
def no_harm() -> Iterator[None]:
    """A decision that fails drafts nothing and must not end a server; one line says so once for
    each error."""
    try:
        yield
    except Exception as error:
        _log_once(f"no draft: {type(error).__name__}: {first_line(error)}")


_log_once = cache(logging.getLogger(NAME).error)
