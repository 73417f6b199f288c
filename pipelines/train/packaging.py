"""The chosen module as an artefact directory, which must decide as the trained module does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_gen.models.checkpoints import revision
from pipelines.config import Config
from pipelines.data.recorded import timed
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import pair_names
from pipelines.run import provenance
from pipelines.train.result import chosen_of, load_module, load_result
from selector.actions import Action, ActionSpace
from selector.decision import Mode
from selector.export.write import load_script, write_artefact
from selector.latency import LatencyProfile
from selector.runtime.artefact import Features
from selector.runtime.selector import Selector, Tuned, load_selector
from selector.runtime.tokens import TokenStatistics
from selector.schema import HIDDEN_STATES, SCALARS_KEY, InputError
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.tuning import decide

TIE = 1e-3  # tokens: the two forms sum in different orders


def build(config: Config, folder: Path, splits: dict[str, Texts], metrics: dict[str, Any] | None = None) -> Selector:
    """Write the artefact of the chosen module, with further metrics; InputError if it does not choose as the trained
    module does."""
    result, profile = load_result(config), load_profile(config)
    module, chosen = load_module(config, result["chosen"], result), chosen_of(result)
    names = dict(zip(("target", "draft"), pair_names(config), strict=True))
    texts, modes = splits["validation"], chosen["modes"]
    own = {"actions_compared": int((~texts.unknown_R).sum()), "evaluation": None}
    revisions = {role: revision(name) for role, name in names.items()}
    facts: dict[str, Any] = {
        "pair": {**names, "revisions": revisions, "fingerprint": profile.pair},
        "run_id": chosen["run_id"],
        "metrics": {**chosen["metrics"], **own, **(metrics or {})},
        "provenance": provenance(config),
    }
    machine = config.train.verifier, profile
    return package(folder, module, *machine, modes, facts, lambda mode: timed(texts, mode.sampling, *machine))


def package(
    folder: Path,
    module: SelectorModule,
    verifier: str,
    profile: LatencyProfile,
    modes: list[dict[str, Any]],
    facts: dict[str, Any],
    texts_of: Callable[[Mode], Timed],
    tokens: TokenStatistics | None = None,
) -> Selector:
    """Write an artefact; InputError if it does not choose as the module does on the texts of each of its modes. The
    arguments are those of `write_artefact` and `count_differing`."""

    def check(written: Path) -> None:
        if differing := count_differing(module, written, texts_of):
            raise InputError(f"{folder}: {differing} of its actions are not the trained module's")

    # the median static tree is drafted at roots without features, whatever the sampling setting
    fallback = sorted((Action.of(mode["action"]) for mode in modes), key=lambda action: action.nodes)[len(modes) // 2]
    return write_artefact(folder, module, profile, verifier, fallback, modes, facts, check, tokens)


@torch.no_grad()
def count_differing(module: SelectorModule, folder: Path, texts_of: Callable[[Mode], Timed]) -> int:
    """The number of roots at which the trained module, the artefact's TorchScript or its path for one root chooses an
    action that is worse than the best one by more than `TIE`; of the texts of each of its modes."""
    differing, selector, script, first = 0, load_selector(folder), load_script(folder), module.schema.levels[0]
    for mode in selector.modes:
        mine = texts_of(mode)
        rows = (~mine.texts.unknown_R).nonzero()[:, 0]
        trained_R = decide(mine, module.predictions(mine.texts, mode), mode, not module.is_regressor).action_R[rows]
        scalars, hidden = mine.texts.features(rows, module.is_full)
        scalars[:, module.schema.index("batch")] = mode.batch
        views = [{SCALARS_KEY: scalars, **dict(zip(HIDDEN_STATES, hidden, strict=False))}]
        if first in (mode.level, *mode.feature_levels):
            views.insert(0, {SCALARS_KEY: scalars[:, : module.schema.first]})
        views = views[:1] if mode.level == first else views
        action_R, scores_RA = _in_turn(script, views, module.space)
        chosen = trained_R, action_R, _one_by_one(Tuned(mode, selector), views, module.space)
        lost_NR = torch.stack([scores_RA.amax(-1) - scores_RA.gather(-1, a.unsqueeze(-1))[:, 0] for a in chosen])
        differing += int((lost_NR > TIE).any(0).sum())
    return differing


def _one_by_one(tuned: Tuned, views: list[Features], space: ActionSpace) -> torch.Tensor:
    actions = []
    for row in range(len(views[0][SCALARS_KEY])):
        answers = (tuned.select({name: values[row] for name, values in view.items()}) for view in views)
        actions.append(space.index(next(answer for answer in answers if answer is not None)))
    return torch.tensor(actions)


def _in_turn(ask: torch.nn.Module, views: list[Features], space: ActionSpace) -> tuple[torch.Tensor, torch.Tensor]:
    action_R, scores_RA = ask(views[0])
    for view in views[1:]:
        (later_R, later_RA), asked_R = ask(view), space.needs_draft_A[action_R]
        action_R = torch.where(asked_R, later_R, action_R)
        scores_RA = torch.where(asked_R[:, None], later_RA, scores_RA)
    return action_R, scores_RA
