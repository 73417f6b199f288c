"""The chosen module as an artefact directory, which must decide as the trained module does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipelines.common.stage import provenance
from pipelines.config import Config
from pipelines.data.traces import timed
from pipelines.export.tiers import limited_modes
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import pair_names
from pipelines.train.result import chosen_of, load_module, load_result
from selector.actions import Action, ActionSpace
from selector.artefact import Features
from selector.data import Texts
from selector.decision import Mode, without_draft
from selector.export import write_artefact
from selector.module import SelectorModule
from selector.runtime import LatencyProfile, Selector
from selector.schema import EARLY, EARLY_SCALARS, HIDDEN_STATES, SCALARS_KEY, InputError
from selector.tuning import decided

TIE = 1e-3  # tokens: the two ways to choose sum in another order
SPACE = ActionSpace.with_lookups()


def build(config: Config, folder: Path, splits: dict[str, Texts], evaluation: dict[str, Any] | None = None) -> Selector:
    """Write the artefact of the chosen module; InputError if it does not choose as the trained module does.

    Args:
        evaluation: the summary of its evaluation, where there is one.
    """
    result, profile = load_result(config), load_profile(config)
    module, chosen = load_module(config, result["chosen"], result), chosen_of(result)
    target, draft = pair_names(config)
    texts = splits["validation"]
    modes, tiers = chosen["modes"], None
    if config.export.tiers is not None:
        modes, tiers = limited_modes(config, module, texts, modes, profile)
    facts: dict[str, Any] = {
        "pair": {"target": target, "draft": draft, "fingerprint": profile.pair},
        "run_id": chosen["run_id"],
        "metrics": {
            **chosen["metrics"],
            "actions_compared": int((~texts.first_R).sum()),
            "evaluation": evaluation,
            **({} if tiers is None else {"tiers": tiers}),
        },
        "provenance": provenance(config),
    }

    def check(selector: Selector) -> None:
        differing = count_differing(config, module, selector, texts, profile)
        if differing:
            raise InputError(f"{folder}: {differing} of its actions are not the trained module's")

    # one answer for a root without features, whatever the sampling setting: the median static tree
    fallback = sorted((Action(*mode["action"]) for mode in modes), key=lambda action: action.nodes)[len(modes) // 2]
    return write_artefact(folder, module, profile, config.train.verifier, fallback, modes, facts, check)


@torch.no_grad()
def count_differing(
    config: Config, module: SelectorModule, selector: Selector, texts: Texts, profile: LatencyProfile
) -> int:
    """Roots at which the exported file, or its fast path, and the trained module choose differently; ties apart."""
    differing = 0
    for entry in selector.config["modes"]:
        mode = Mode.of(entry)
        mine = timed(texts, (mode.temperature, mode.top_p), config.train.verifier, profile)
        rows = (~mine.texts.first_R).nonzero()[:, 0]
        trained_R = decided(mine, module.opinions(mine.texts, mode), mode, not module.is_regressor).action_R[rows]
        scalars, hidden = mine.texts.features(rows, module.is_full)
        views = [{SCALARS_KEY: scalars, **dict(zip(HIDDEN_STATES, hidden, strict=False))}]
        if EARLY in mode.sees:
            views.insert(0, {SCALARS_KEY: scalars[:, : len(EARLY_SCALARS)]})
        scores_RA, exported_R = _in_turn(selector, views)
        fast = selector.at(mode.temperature, mode.top_p)
        for row, (trained, exported) in enumerate(zip(trained_R.tolist(), exported_R.tolist(), strict=True)):
            answers = (fast.select({name: values[row] for name, values in view.items()}) for view in views)
            quick = SPACE.index(next(answer for answer in answers if answer is not None))
            best = scores_RA[row].max() - TIE
            differing += any(float(scores_RA[row, action]) < best for action in (trained, exported, quick))
    return differing


def _in_turn(selector: Selector, views: list[Features]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and actions of the exported file, asked with one view after the other as an engine asks."""
    action_R, scores_RA = selector.module(views[0])
    for view in views[1:]:
        needs_draft_A = torch.tensor([not without_draft(action) for action in SPACE])
        later_R, later_RA = selector.module(view)
        asked_R = needs_draft_A[action_R]
        action_R, scores_RA = (
            torch.where(asked_R, later_R, action_R),
            torch.where(asked_R[:, None], later_RA, scores_RA),
        )
    return scores_RA, action_R
