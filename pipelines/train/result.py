"""The result of training, as later stages read it; and the chosen module as an artefact directory,
which must decide as the trained module does.

Legend: R roots, A actions, F scalars, N ways to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_gen.models.checkpoints import revision
from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import timed, traces_folder
from pipelines.latency.stage import load_profile
from pipelines.pair.log import OF_LOG, why_untrained
from pipelines.pair.stage import pair_names
from pipelines.run import provenance, read_json, require
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import Mode
from selector.export.torchscript import load_script
from selector.export.writer import write_artefact
from selector.latency import LatencyProfile
from selector.runtime.artefact import Features
from selector.runtime.selector import Selector, Tuned, load_selector
from selector.sampling import Sampling
from selector.schema import HIDDEN_STATES, LOG, PAIR, SCALARS_KEY, InputError, sha256
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.tuning import decide

COMPARED = 12  # texts of a log on which the artefact must decide as the trained network does
TIE = 1e-3  # tokens; the artefact sums in another order than the module


def inputs(config: Config, profile: LatencyProfile) -> dict[str, Any]:
    return {
        "train": config.train.model_dump(mode="json"),
        "seed": config.seed,
        "stride": config.data.stride,
        "scalars": (LOG if config.logs.files else PAIR).fingerprint,
        "traces": {
            name: s["sha256"] for name, s in read_manifest(traces_folder(config))["shards"].items()
        },
        "latency": profile.to_json(),
    }


def known_digest(config: Config) -> dict[str, str]:
    """`decision_digest` of the run; for a log on which nothing can be trained, why."""
    return (
        {"untrained": why}
        if (why := why_untrained(config))
        else decision_digest(config, load_result(config))
    )


def load_result(config: Config) -> dict[str, Any]:
    """What training found; InputError unless the stage is finished and was run with this config."""
    require(config, "train", inputs(config, load_profile(config)))
    return read_json(config.folder / "training" / "result.json", "train")


def chosen_of(result: dict[str, Any]) -> dict[str, Any]:
    return result["selectors"][result["chosen"]]


def _checkpoint_of(config: Config, result: dict[str, Any]) -> Path:
    return config.folder / "training" / chosen_of(result)["checkpoint"]


def load_module(config: Config, result: dict[str, Any]) -> SelectorModule:
    """The chosen module; InputError where its checkpoint is damaged, or a weight is not finite."""
    path = _checkpoint_of(config, result)
    try:
        module = SelectorModule.load_from_checkpoint(path, map_location="cpu").eval()
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InputError(f"{path} is damaged: run the train stage again") from error
    # their scale is infinite
    unseen_F = torch.tensor([not scalar.learned for scalar in module.schema.scalars])
    for key, values in module.state_dict().items():
        if not (values.isfinite() | (unseen_F if key.endswith("scale_F") else False)).all():
            raise InputError(f"{path}: a weight is not finite: run the train stage again")
    return module


def decision_digest(config: Config, result: dict[str, Any]) -> dict[str, str]:
    """Checksums of all that determines the decisions: the chosen checkpoint, and how it decides."""
    return {
        "training": sha256(_checkpoint_of(config, result)),
        "decisions": sha256(config.folder / "training" / "result.json"),
    }


def build(
    config: Config,
    folder: Path,
    splits: dict[str, Texts],
    evaluation: Any = None,
    plain: Collection[Sampling] = (),
) -> Selector:
    """Write the artefact of the chosen module, with an evaluation's figures; it decodes plainly
    under the sampling settings `plain`. InputError if it chooses other actions than the trained
    module."""
    result, profile = load_result(config), load_profile(config)
    module, chosen = load_module(config, result), chosen_of(result)
    texts = splits["validation"]
    texts = texts.take(torch.arange(len(texts))[:COMPARED]) if config.logs.files else texts
    further_metrics = {"actions_compared": int((~texts.unknown_R).sum()), "evaluation": evaluation}
    if config.logs.files:
        pair: dict[str, Any] = {"target": "of the log", "draft": profile.pair.removeprefix(OF_LOG)}
    else:
        pair = dict(zip(("target", "draft"), pair_names(config), strict=True))
        pair["revisions"] = {role: revision(name) for role, name in pair.items()}
    facts: dict[str, Any] = {
        "pair": {**pair, "fingerprint": profile.pair},
        "run_id": chosen["run_id"],
        "metrics": {**chosen["metrics"], **further_metrics},
        "provenance": provenance(config),
    }
    verifier, modes = config.train.verifier, []
    for row, mode in ((row, Mode.of(row)) for row in chosen["modes"]):
        modes.append(
            replace(mode.static_only(), action=EMPTY).row() if mode.sampling in plain else row
        )

    def check(written: Path) -> None:
        def texts_of(mode: Mode) -> Timed:
            return timed(texts, mode.sampling, verifier, profile, mode.batch)

        if differing := count_differing(module, written, texts_of):
            raise InputError(f"{folder}: {differing} of its actions are not the trained module's")

    # the median static tree is drafted at roots without features, whatever the sampling setting
    fallback = sorted(
        (Action.of(mode["action"]) for mode in modes), key=lambda action: action.nodes
    )[len(modes) // 2]
    return write_artefact(
        folder, module, profile, verifier, fallback, modes, facts, check, texts.tokens
    )


@torch.no_grad()
def count_differing(module: SelectorModule, folder: Path, texts_of: Callable[[Mode], Timed]) -> int:
    """The number of roots, in the texts of all modes, at which the trained module, the artefact's
    TorchScript or its path for one root chooses an action that is worse than the best one by more
    than `TIE`."""
    differing, selector, script, first = (
        0,
        load_selector(folder),
        load_script(folder),
        module.schema.levels[0],
    )
    for mode in selector.modes:
        case = texts_of(mode)
        rows = (~case.texts.unknown_R).nonzero()[:, 0]
        trained_R = decide(
            case, module.predictions(case.texts, mode), mode, not module.is_regressor
        ).action_R[rows]
        scalars, hidden = case.texts.features(rows, module.is_full)
        scalars[:, module.schema.index("batch")] = mode.batch
        views = [{SCALARS_KEY: scalars, **dict(zip(HIDDEN_STATES, hidden, strict=False))}]
        if first in (mode.level, *mode.feature_levels):
            views.insert(0, {SCALARS_KEY: scalars[:, : module.schema.first]})
        views = views[:1] if mode.level == first else views
        action_R, scores_RA = _in_turn(script, views, module.space)
        chosen = trained_R, action_R, _one_by_one(Tuned(mode, selector), views, module.space)
        lost_NR = torch.stack(
            [
                scores_RA.amax(-1) - scores_RA.gather(-1, chosen_R.unsqueeze(-1))[:, 0]
                for chosen_R in chosen
            ]
        )
        differing += int((lost_NR > TIE).any(0).sum())
    return differing


def _one_by_one(tuned: Tuned, views: list[Features], space: ActionSpace) -> torch.Tensor:
    actions = []
    for row in range(len(views[0][SCALARS_KEY])):
        answers = (
            tuned.select({name: values[row] for name, values in view.items()}) for view in views
        )
        actions.append(space.index(next(filter(None, answers))))
    return torch.tensor(actions)


def _in_turn(
    ask: torch.nn.Module, views: list[Features], space: ActionSpace
) -> tuple[torch.Tensor, torch.Tensor]:
    action_R, scores_RA = ask(views[0])
    for view in views[1:]:
        (later_R, later_RA), asked_R = ask(view), space.needs_draft_A[action_R]
        action_R = torch.where(asked_R, later_R, action_R)
        scores_RA = torch.where(asked_R[:, None], later_RA, scores_RA)
    return action_R, scores_RA
