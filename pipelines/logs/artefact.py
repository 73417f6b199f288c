"""A log's selector as an artefact directory, and what one of its decisions takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from data_gen.texts.logs import LoggedText
from pipelines.config import Config
from pipelines.logs.judging import Tuning
from pipelines.logs.texts import VERIFIER
from pipelines.run import provenance
from selector.export.write import write_artefact
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector, load_selector
from selector.runtime.tokens import TokenStatistics
from selector.schema import BATCH_AT, LOG, SCALARS_KEY, InputError
from selector.train.data import Timed
from selector.train.module import SelectorModule
from selector.train.tuning import decide

TRIED = 2000  # decisions that are timed
AT = 8000  # tokens of context at which they are
TIE = 1e-3  # tokens: the two ways to choose sum in another order
CHECKED = 4096  # roots at which the artefact is compared with the trained network


def export(
    config: Config,
    module: SelectorModule,
    profile: LatencyProfile,
    tunings: Sequence[Tuning],
    tokens: TokenStatistics,
    run_id: str,
    test: Timed | None = None,
) -> Selector:
    """Write the directory, with a mode for every batch size and level.

    Args:
        run_id: of the MLflow run.
        test: texts on which the artefact must decide as the trained network does; None where none can be replayed.
    """

    def check(folder: Path) -> None:
        if test is not None:
            compare(load_selector(folder), module, test, tunings)

    middle = tunings[0].fixed.action
    facts: dict[str, Any] = {
        "pair": {"target": "of the log", "draft": profile.pair.partition(":")[2], "fingerprint": profile.pair},
        "run_id": run_id,
        "metrics": {"evaluation": None},
        "provenance": provenance(config),
    }
    modes = [row for tuning in tunings for row in tuning.rows()]
    folder = config.folder / "selector"
    return write_artefact(folder, module, profile, VERIFIER, middle, modes, facts, check, tokens=tokens)


def compare(selector: Selector, module: SelectorModule, test: Timed, tunings: Sequence[Tuning]) -> None:
    """That the artefact decides as the trained network does, at some roots of every batch size and level.

    Raises:
        InputError: it does not; says at how many roots.
    """
    rows = torch.linspace(0, len(test.texts.length_R) - 1, CHECKED).long().unique()
    for tuning in tunings:
        timed = test.on(selector.latency.at_batch(tuning.batch))
        for level in LOG.levels:
            mode = tuning.selector[level]
            own = {level: module.scores(timed.texts, level)}
            expected_R = decide(timed, own, mode).action_R[rows]
            scalars_RF = timed.texts.scalars_RF[rows].clone()
            scalars_RF[:, BATCH_AT] = tuning.batch
            width = LOG.first if level == LOG.levels[0] else len(LOG.scalars)
            found_R, scores_RA = selector.module({SCALARS_KEY: scalars_RF[:, :width]})
            lost_R = scores_RA.amax(-1) - scores_RA.gather(-1, expected_R.unsqueeze(-1))[:, 0]
            differing = int(((found_R != expected_R) & (lost_R > TIE)).sum())
            if differing:
                raise InputError(
                    f"batch {tuning.batch}, {level}: {differing} of the artefact's actions are not the network's"
                )


def decision_seconds(selector: Selector, texts: Sequence[LoggedText], sampling: Sampling) -> dict[str, float]:
    """Median time of a decision in Python, features included, by level, late in a long text.

    Texts are joined until they are as long as `AT`, for a decision's time depends on the context's length alone.
    """
    tokens = np.concatenate([text.tokens for text in texts])
    tokens = np.resize(tokens, AT + TRIED).tolist()
    found: dict[str, float] = {"context": AT}
    for level in LOG.levels:
        known = DrafterKnowledge(tokens[:AT], sampling, selector.tokens)
        asked, taken = selector.at(sampling.temperature, sampling.top_p, level=level), []
        for token in tokens[AT:]:
            begin = time.perf_counter()
            known.committed([token], [1.0])
            asked.select(known.features(level))
            taken.append(time.perf_counter() - begin)
        found[level] = float(np.median(taken))
    return found
