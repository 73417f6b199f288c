"""The decisions of the engines' plug-ins, from token ids alone.

The selector is one that `espalier logs` trained. It decides at the level `text` for each request
how many tokens of its own text are copied, or how many a draft model drafts, perhaps none.

Legend: N tokens.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.engines.steps import NAME, Step, StepTimer, WayOut, log_once
from data_gen.features.root import DrafterKnowledge, features_of
from data_gen.models.sampling import Sampling
from selector.actions import COPY, EMPTY, IID, Action
from selector.decision import NETWORK, Setting
from selector.files import first_line, unwritable
from selector.runtime.selector import Policy, Selector, load_selector
from selector.runtime.tokens import TokenStatistics
from selector.schema import LOG, TEXT, InputError

OPTIONS = {  # of the entry `NAME` in an engine's configuration
    "selector": str | Path,
    "temperature": int | float,
    "top_p": int | float,
    "draft": str,
    "draft_cache_gib": int | float,
    "steps": str | Path,
    "way_out": bool,
}
LENGTHS = (0, 1, 2, 4, 8, 16)  # of drafts without a selector
BYTES = 2**23  # of recorded steps, some 80,000
CACHE_GIB = 1.0  # of a draft model's keys and values
BEYOND = 2  # times as many requests as a setting's may be decided by it
# of tokens after texts, by their lengths
Chains = Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[int]]]


class TextSelector:
    """Decides for an engine whose requests have one sampling setting, with an artefact of
    `espalier logs`; `chains` drafts, where the log had a drafter (`CachedDrafter.chains`).

    Nothing is drafted for a while where that is slower than plain decoding, unless `way_out` is
    False (`WayOut`), and nothing for more than `BEYOND` times as many requests as the selector
    knows. Every step becomes a line of the file `steps`; after `BYTES` the file is
    renamed to `.1` and begins anew. Without a selector drafts of all lengths take turns, so that a
    server's steps tell its times. InputError for an artefact that cannot be read or is not a log's,
    that drafts where nothing else does, for a setting that is out of range, and for a file that
    cannot be written."""

    def __init__(
        self,
        selector: str | Path | None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        chains: Chains | None = None,
        steps: str | Path | None = None,
        way_out: bool = True,
    ) -> None:
        self._sampling = Sampling(temperature, top_p)
        self._chains: Chains = chains or _no_chains
        self._tokens = TokenStatistics.empty()
        self._timer = StepTimer()
        self._record: RotatingFileHandler | None = None
        if steps is not None:
            try:
                self._record = RotatingFileHandler(steps, maxBytes=BYTES, backupCount=1)
            except OSError as error:
                raise unwritable(steps, error) from error
        self._way_out: Callable[[int], WayOut] | None = None
        self._at: Callable[[int], Policy]
        if selector is None:
            styles = (COPY, IID) if chains else (COPY,)
            drafts = [Action(1, length, 0, style) for length, style in product(LENGTHS, styles)]
            in_turn = random.Random(0)
            self._at = lambda batch: Policy(Setting(self._sampling, in_turn.choice(drafts)))
            return
        loaded = load_selector(selector)
        if loaded.schema != LOG:
            raise InputError(
                f"{selector}: plug-ins see token ids alone; train a selector for that: espalier "
                "logs"
            )
        if chains is None and drafts_at(loaded, temperature, top_p):
            raise InputError(
                f"{selector}: it drafts: name its `draft` model, or train it with logs.drafter=none"
            )
        self._tokens = loaded.tokens
        self._times = cache(loaded.latency.step_times)
        at = partial(loaded.at, temperature, top_p, level=TEXT)
        self._at = cache(lambda batch: self._known(at(batch=batch), batch))
        self._at(1)  # checks the setting
        if way_out:
            self._way_out = cache(lambda about: WayOut())  # by the power of two of requests

    @classmethod
    def of(cls, options: object, load: Callable[[str, float], Chains]) -> TextSelector:
        """From an engine's configuration, a mapping with `OPTIONS`, where `load` is given the name
        of a draft model and the size of its KV cache in GiB; InputError where it has none, or
        others."""
        settings = dict(options) if isinstance(options, Mapping) else {}
        wrong = [
            key for key, value in settings.items() if not isinstance(value, OPTIONS.get(key, ()))
        ]
        if wrong or not {"selector", "steps"} & settings.keys():
            kinds = "a path, two numbers, a model's name, a number, a path and a bool"
            raise InputError(
                f"{NAME}: its options are {', '.join(OPTIONS)}: {kinds}, not {options}"
            )
        settings.setdefault("selector", None)
        draft = settings.pop("draft", None)
        cache_gib = settings.pop("draft_cache_gib", CACHE_GIB)
        selector = settings["selector"]
        sampling = {name: settings[name] for name in ("temperature", "top_p") if name in settings}
        chains = None
        if draft is not None:
            if selector is None or drafts_at(load_selector(selector), **sampling):
                chains = load(draft, cache_gib)
            else:
                words = "the selector copies alone here: its draft model is not loaded"
                logging.getLogger(NAME).warning(words)
        return cls(**settings, chains=chains)

    def text(self, ids: Sequence[int] | NDArray[Any], prompt: int) -> DrafterKnowledge:
        """A request's text, whose first `prompt` tokens are its prompt, or a part of it."""
        tokens: list[int] = np.asarray(ids, np.int64).tolist()
        knowledge = DrafterKnowledge(tokens[:prompt], self._sampling, self._tokens, start=prompt)
        knowledge.committed(tokens[prompt:])
        return knowledge

    def drafts(
        self, texts: Sequence[DrafterKnowledge], most: Sequence[int], alone: bool = True
    ) -> list[list[int]]:
        """For requests that are decoded together, the tokens that each copies or drafts, at most
        `most` of them; to be asked in every step. They are not `alone` where the last step has read
        a prompt, too."""
        step = self._timer.ended(texts)
        if step is not None and alone:
            with no_harm():
                self._note(step)
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
        drafts = [copied or drafted for copied, drafted in zip(copies, chains, strict=True)]
        self._timer.begin(texts, drafts, max(chain_lengths, default=0))
        return drafts

    def _known(self, policy: Policy, batch: int) -> Policy:
        """The policy for so many requests; the one that drafts nothing where its setting is of far
        fewer, whose step times say nothing of these."""
        most = BEYOND * policy.setting.batch
        if batch <= most:
            return policy
        log_once(f"the selector decides for up to {most} requests; no draft with more")
        return Policy(Setting(self._sampling, EMPTY))

    def _note(self, step: Step) -> None:
        if self._record is not None:
            line = json.dumps(step._asdict())
            self._record.handle(logging.makeLogRecord({"msg": line}))
        if self._way_out is not None:
            times = self._times(step.batch)
            promised = np.interp(step.context, times.lengths_L, times.target_LV[:, 0])
            self._way_out(round(math.log2(step.batch))).add(step, float(promised))

    def _actions(self, texts: Sequence[DrafterKnowledge]) -> Sequence[Action | None]:
        for text in texts:
            text.batch = len(texts)
        policy = self._at(len(texts))
        about = round(math.log2(len(texts)))
        if self._way_out is not None and not self._way_out(about).may_draft():
            return [EMPTY] * len(texts)
        if not policy.feature_levels:  # a static tree, of no token where nothing pays, needs none
            return [policy.select(None)] * len(texts)
        features = features_of(texts, *policy.feature_levels)
        return policy.select_jointly(features)


def drafts_at(selector: Selector, temperature: float = 0.0, top_p: float = 1.0) -> bool:
    """Whether a log's selector may draft with a model under a sampling, for some number of
    requests."""
    batches = {setting.batch for setting in selector.settings if setting.level == TEXT}
    for batch in batches:
        setting = selector.at(temperature, top_p, batch=batch, level=TEXT).setting
        choices = {setting.action}
        if setting.decider == NETWORK:
            choices.update(selector.actions[a] for a in setting.positions(selector.space))
        if any(action.drafts for action in choices):
            return True
    return False


def _no_chains(texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    return [[] for _ in texts]


@contextmanager
def no_harm() -> Iterator[None]:
    """A decision that fails drafts nothing and must not end a server; one line says so once for
    each error."""
    try:
        yield
    except Exception as error:
        log_once(f"no draft: {type(error).__name__}: {first_line(error)}")
