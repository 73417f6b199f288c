"""Exports a log's selector as an artefact directory, and times its decisions.

Legend: R roots, A actions, F scalars.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from data_gen.texts.logs import LoggedText
from pipelines.config import Config
from pipelines.logs.labelling import VERIFIER
from pipelines.logs.tuned import Tuning
from pipelines.run import provenance
from pipelines.train.judging import law_of
from selector.export.write import write_artefact
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector, load_selector
from selector.runtime.tokens import TokenStatistics
from selector.schema import BATCH_AT, LOG, SCALARS_KEY, InputError
from selector.train.data import Timed
from selector.train.module import SelectorModule
from selector.train.tuning import decide

TIMED_DECISIONS = 2000
CONTEXT = 8000  # tokens of context at which decisions are timed
TOLERANCE = 1e-3  # in tokens, because the artefact sums in another order than the network
COMPARED_ROOTS = 4096


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
        if test is not None:
            _compare(load_selector(folder), module, test, tunings)

    facts: dict[str, Any] = {
        "pair": {"target": "of the log", "draft": profile.pair.partition(":")[2], "fingerprint": profile.pair},
        "run_id": run_id,
        "metrics": {"evaluation": None},
        "provenance": provenance(config),
    }
    modes = [
        {
            **replace(mode, joint=tuning.joint[level], **law_of(config.sampling[0])).row(),
            "mean_efficiency": tuning.mean_efficiency,
        }
        for tuning in tunings
        for level, mode in tuning.selector.items()
    ]
    folder, fallback = config.folder / "selector", tunings[0].fixed.action
    return write_artefact(folder, module, profile, VERIFIER, fallback, modes, facts, check, tokens=tokens)


def _compare(selector: Selector, module: SelectorModule, test: Timed, tunings: Sequence[Tuning]) -> None:
    """InputError where the artefact's decisions are not the network's, at some roots of every batch size and level."""
    rows = torch.linspace(0, len(test.texts.length_R) - 1, COMPARED_ROOTS).long().unique()
    predicted = {level: module.scores(test.texts, level) for level in LOG.levels}
    for tuning in tunings:
        timed = test.on(selector.latency.at_batch(tuning.batch))
        for level, mode in tuning.selector.items():
            expected_R = decide(timed, predicted, mode).action_R[rows]
            scalars_RF = timed.texts.scalars_RF[rows].clone()
            scalars_RF[:, BATCH_AT] = tuning.batch
            width = LOG.first if level == LOG.levels[0] else len(LOG.scalars)
            found_R, scores_RA = selector.module({SCALARS_KEY: scalars_RF[:, :width]})
            lost_R = scores_RA.amax(-1) - scores_RA.gather(-1, expected_R.unsqueeze(-1))[:, 0]
            if differing := int(((found_R != expected_R) & (lost_R > TOLERANCE)).sum()):
                place = f"batch {tuning.batch}, {level}"
                raise InputError(f"{place}: {differing} of the artefact's actions are not the network's")


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
