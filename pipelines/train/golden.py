"""Golden vectors: the features and the decisions at some roots of a fixed text, for engines that compute them anew.

Legend: N tokens after the prompt, V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_gen.features.root import Accepted, DrafterKnowledge, RootKnowledge
from data_gen.models.pair import ModelRows
from data_gen.models.sampling import Sampling
from selector.decision import Mode
from selector.runtime.artefact import Features
from selector.runtime.selector import Selector, Tuned
from selector.schema import EARLY, HIDDEN_STATES, LIGHT, LOG, MATCH, SCALARS_KEY

V, PROMPT, N = 8, 6, 40
ROOTS = (1, 2, 7, 20, 40)  # numbers of committed tokens
PERIOD, CHANGED = 11, 0.1  # the text repeats itself, except for this share of its tokens


class Text(NamedTuple):
    """A text over V tokens; the target's most probable token is the next one, which every sampling law allows."""

    prompt: list[int]
    tokens: list[int]  # the N tokens after it
    hits: list[int]  # whether an engine's own drafter predicted each of them, 1 or 0
    target_logits: list[list[float]]  # after the prompt's last token, and after each of the others
    draft_logits: list[list[float]]


def fixed_text() -> Text:
    """The same text for every artefact."""
    rng = np.random.default_rng(0)
    tokens = np.resize(rng.integers(V, size=PERIOD), PROMPT + N)
    tokens = np.where(rng.random(len(tokens)) < CHANGED, rng.integers(V, size=len(tokens)), tokens)
    target, draft = rng.normal(scale=2, size=(2, N + 1, V)).round(2)
    target[np.arange(N), tokens[PROMPT:]] = target[:N].max(-1) + 0.5
    hits = draft[:N].argmax(-1) == tokens[PROMPT:]
    both = target.round(2).tolist(), draft.tolist()
    return Text(tokens[:PROMPT].tolist(), tokens[PROMPT:].tolist(), hits.astype(int).tolist(), *both)


def golden(selector: Selector) -> dict[str, Any]:
    """What an artefact's `golden.json` holds; `docs/engines.md` describes it."""
    text = fixed_text()
    along = _of_log if selector.schema == LOG else _of_pair
    settings = []
    for mode in selector.modes:
        tuned, roots = Tuned(mode, selector), []
        for committed, views in along(text, selector, mode):
            asked = [views[level] for level in mode.asked] or [views[mode.level or LIGHT]]
            answers = [None if (choice := tuned.select(view)) is None else list(choice) for view in asked]
            scalars = [float(f"{value:.9g}") for value in views[mode.level or LIGHT][SCALARS_KEY].tolist()]
            roots.append({"committed": committed, "scalars": scalars, "answers": answers})
        asked_of = {"batch": mode.batch, "level": mode.level, "feature_levels": list(mode.asked)}
        settings.append({"sampling": asdict(mode.sampling), **asked_of, "roots": roots})
    return {**text._asdict(), "settings": settings}


def _of_pair(text: Text, selector: Selector, mode: Mode) -> Iterator[tuple[int, dict[str, Features]]]:
    sampling, levels = Sampling(**asdict(mode.sampling)), (MATCH, EARLY, selector.config.feature_level)
    widths = [selector.widths.get(name, 1) for name in HIDDEN_STATES[:2]]
    target = _rows(text.target_logits, sampling, widths[0])
    draft = list(_rows(text.draft_logits, sampling.draft, widths[1]).each())
    knowledge = RootKnowledge(text.prompt, sampling, levels)
    knowledge.passed(draft[:1])
    for n, token in enumerate(text.tokens, start=1):
        knowledge.committed(Accepted(target, [n - 1]), [token])
        knowledge.passed([draft[n]])
        if n in ROOTS:
            views = {level: dict(knowledge.features(level) or {}) for level in levels}
            yield n, {**views, LIGHT: views[levels[-1]]}


def _of_log(text: Text, selector: Selector, mode: Mode) -> Iterator[tuple[int, dict[str, Features]]]:
    knowledge = DrafterKnowledge(text.prompt, Sampling(**asdict(mode.sampling)), selector.tokens, mode.batch)
    for n, (token, hit) in enumerate(zip(text.tokens, text.hits, strict=True), start=1):
        knowledge.committed([token], [hit])
        if n in ROOTS:
            views: dict[str, Features] = {level: knowledge.features(level) for level in LOG.levels}
            yield n, {**views, MATCH: views[mode.level]}


def _rows(logits: list[list[float]], sampling: Sampling, width: int) -> ModelRows:
    logits_NV: Tensor = torch.tensor(logits)
    return ModelRows(sampling.probabilities(logits_NV), logits_NV, torch.zeros(len(logits), width))
