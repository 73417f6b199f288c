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
from selector.data import Texts
from selector.decision import Mode
from selector.export import write_artefact
from selector.module import SelectorModule
from selector.runtime import LatencyProfile, Selector
from selector.schema import HIDDEN_STATES, SCALARS_KEY, InputError
from selector.tuning import actions_of

TIE = 1e-3  # tokens: the two ways to choose sum in another order
SPACE = ActionSpace.default()


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
        sees = module.hparams["sees"]
        trained_R = actions_of(mine, module.scores(mine.texts), mode, mine.seconds(sees), not module.is_regressor)[rows]
        scalars, hidden = mine.texts.features(rows, module.is_full)
        features = {SCALARS_KEY: scalars, **dict(zip(HIDDEN_STATES, hidden, strict=False))}
        exported_R, scores_RA = selector.module(features)
        fast = selector.at(mode.temperature, mode.top_p)
        for row, (trained, exported) in enumerate(zip(trained_R.tolist(), exported_R.tolist(), strict=True)):
            one = {name: values[row] for name, values in features.items()}
            quick = SPACE.index(fast.select(one))
            best = scores_RA[row].max() - TIE
            differing += any(float(scores_RA[row, action]) < best for action in (trained, exported, quick))
    return differing
