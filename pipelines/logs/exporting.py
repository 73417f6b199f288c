"""Exports a log's selector as an artefact directory, and times its decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from data_gen.texts.logs import LoggedText
from pipelines.config import Config
from pipelines.logs.labelling import VERIFIER
from pipelines.logs.tuned import Tuning
from pipelines.run import provenance
from pipelines.train.golden import golden
from pipelines.train.judging import law_of
from pipelines.train.packaging import count_differing
from selector.export.write import write_artefact
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector
from selector.runtime.tokens import TokenStatistics
from selector.schema import LOG, InputError
from selector.train.data import Timed
from selector.train.module import SelectorModule

TIMED_DECISIONS = 2000
CONTEXT = 8000  # tokens of context at which decisions are timed
COMPARED_ROOTS = 4096  # of each mode


def export(
    config: Config,
    module: SelectorModule,
    profile: LatencyProfile,
    tunings: Sequence[Tuning],
    tokens: TokenStatistics,
    run_id: str,
    test: Timed | None = None,
) -> Selector:
    """Write the artefact directory, with a mode for every batch size and level.

    Args:
        run_id: of the MLflow run.
        test: texts on which the artefact must decide as the trained network does, else InputError; None: no comparison.
    """

    def check(folder: Path) -> None:
        if test is None:
            return
        timed = {batch: test.on(profile.at_batch(batch)) for batch in {tuning.batch for tuning in tunings}}
        predicted = {level: module.scores(test.texts, level) for level in LOG.levels}
        if differing := count_differing(module, folder, lambda mode: timed[mode.batch], predicted, COMPARED_ROOTS):
            raise InputError(f"{folder}: {differing} of its actions are not the network's")

    facts: dict[str, Any] = {
        "pair": {"target": "of the log", "draft": profile.pair.partition(":")[2], "fingerprint": profile.pair},
        "run_id": run_id,
        "metrics": {"evaluation": None},
        "provenance": provenance(config),
    }
    modes = [
        replace(mode, joint=tuning.joint[level], **law_of(config.sampling[0])).row()
        for tuning in tunings
        for level, mode in tuning.selector.items()
    ]
    folder, fallback = config.folder / "selector", tunings[0].fixed.action
    made = folder, module, profile, VERIFIER, fallback, modes, facts, check
    return write_artefact(*made, tokens=tokens, golden=golden)


def decision_seconds(selector: Selector, texts: Sequence[LoggedText], sampling: Sampling) -> dict[str, float]:
    """The median time of a decision in Python by level, features included, after `CONTEXT` tokens of joined texts."""
    tokens = np.resize(np.concatenate([text.tokens for text in texts]), CONTEXT + TIMED_DECISIONS).tolist()
    found: dict[str, float] = {"context": CONTEXT}
    for level in LOG.levels:
        known = DrafterKnowledge(tokens[:CONTEXT], sampling, selector.tokens)
        temperature, top_p, top_k, min_p = sampling.law
        asked, taken = selector.at(temperature, top_p, level=level, top_k=top_k, min_p=min_p), []
        for token in tokens[CONTEXT:]:
            begin = time.perf_counter()
            known.committed([token], [1.0])
            asked.select(known.features(level))
            taken.append(time.perf_counter() - begin)
        found[level] = float(np.median(taken))
    return found
