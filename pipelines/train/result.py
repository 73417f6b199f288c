"""The result of training, as later stages read it; and the chosen module as an artefact directory,
which must decide as the trained module does.

Legend: R roots, A actions, F scalars, N ways to decide.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import timed, traces_folder
from pipelines.latency.stage import load_profile
from pipelines.pair.source import source_of
from pipelines.run import provenance, require
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import Setting
from selector.export.torchscript import load_script
from selector.export.writer import write_artefact
from selector.latency import LatencyProfile
from selector.runtime.artefact import Features
from selector.runtime.selector import Policy, Selector, load_selector
from selector.schema import HIDDEN_STATES, SCALARS_KEY, InputError, sha256
from selector.train.data import Texts, Timed, offering
from selector.train.module import SelectorModule
from selector.train.replay import Ratio
from selector.train.tuning import decide

# decisions, about: that many of the artefact must be those of the trained network
COMPARED = 50_000
TIE = 1e-3  # tokens; the artefact sums in another order than the module


@dataclass(frozen=True)
class Case:
    """What training decided for a sampling setting, or for a batch size and a feature level of a
    log; and what it was compared with."""

    # JSON has no infinity
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    setting: Setting
    static: Setting  # the best static tree
    rule: Setting  # the lookup rule
    # speeds over the best static tree
    network_ratio: Ratio
    rule_ratio: Ratio
    # where one length serves all requests of a step: the price of time, in tokens per second
    common: float = 0.0
    # of a log, the lookup rule that copies alone and always as much, as engines' own n-grams do
    copies: Setting | None = None


@dataclass(frozen=True)
class TrainedSelector:
    """A trained network, and what it decides in every case, or its rule, or the static tree."""

    objective: str
    feature_level: str
    checkpoint: str  # in the folder `training`
    run_id: str  # of MLflow
    cases: list[Case]
    kept: Ratio  # the mean speed, over cases, of what decides over the best static tree


@dataclass(frozen=True)
class Result:
    """What training found, by name of the selector."""

    # JSON has no infinity
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    chosen: str
    selectors: dict[str, TrainedSelector]

    @property
    def best(self) -> TrainedSelector:
        return self.selectors[self.chosen]


RESULT = TypeAdapter(Result)
CASE = TypeAdapter(Case)


def inputs(config: Config, profile: LatencyProfile) -> dict[str, Any]:
    shards = read_manifest(traces_folder(config))["shards"]
    return {
        "train": config.train.model_dump(mode="json"),
        "result": [column.name for column in fields(Case)],
        "seed": config.seed,
        "stride": config.data.stride,
        "scalars": source_of(config).schema.fingerprint,
        "traces": {name: shard["sha256"] for name, shard in shards.items()},
        "latency": profile.to_json(),
    }


def known_digest(config: Config) -> dict[str, str]:
    """`decision_digest` of the run; for a log on which nothing can be trained, why."""
    why = source_of(config).why_untrained
    if why:
        return {"untrained": why}
    return decision_digest(config, load_result(config))


def result_path(config: Config) -> Path:
    return config.folder / "training" / "result.json"


def load_result(config: Config) -> Result:
    """InputError unless the stage is finished and was run with this config."""
    require(config, "train", inputs(config, load_profile(config)))
    return RESULT.validate_json(result_path(config).read_bytes())


def _checkpoint_of(config: Config, result: Result) -> Path:
    return config.folder / "training" / result.best.checkpoint


def load_module(config: Config, result: Result) -> SelectorModule:
    """The chosen module; InputError where its checkpoint is damaged, or a weight is not finite."""
    path = _checkpoint_of(config, result)
    try:
        module = SelectorModule.load_from_checkpoint(path, map_location="cpu").eval()
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InputError(f"{path} is damaged: run the train stage again") from error
    # their scale is infinite
    unseen_F = torch.tensor([not scalar.learned for scalar in module.schema.scalars])
    for key, values in module.state_dict().items():
        is_valid = values.isfinite()
        if key.endswith("scale_F"):
            is_valid = is_valid | unseen_F
        if not is_valid.all():
            raise InputError(f"{path}: a weight is not finite: run the train stage again")
    return module


def decision_digest(config: Config, result: Result) -> dict[str, str]:
    """Checksums of all that determines the decisions: the chosen checkpoint, and how it decides."""
    return {
        "training": sha256(_checkpoint_of(config, result)),
        "decisions": sha256(result_path(config)),
    }


def build(
    config: Config,
    folder: Path,
    splits: dict[str, Texts],
    evaluation: Any = None,
    plain: Collection[str] = (),
) -> Selector:
    """Write the artefact of the chosen module, with an evaluation's figures; it decodes plainly
    under the settings with the labels `plain`. InputError if it chooses other actions than the
    trained module."""
    result = load_result(config)
    profile = load_profile(config)
    module = load_module(config, result)
    verifier = config.train.verifier
    texts = offering(splits, module.space)["validation"]
    first_root_X = texts.size_X.cumsum(0) - texts.size_X
    texts = texts.take((first_root_X * len(result.best.cases) < COMPARED).nonzero()[:, 0])
    facts: dict[str, Any] = {
        "pair": {**source_of(config).names, "fingerprint": profile.pair},
        "run_id": result.best.run_id,
        "metrics": {
            "validation/replay": asdict(result.best.kept),
            "actions_compared": int((~texts.unknown_R).sum()),
            "evaluation": evaluation,
        },
        "provenance": provenance(config),
    }
    settings = []
    for case in result.best.cases:
        setting = case.setting
        if setting.label in plain:
            setting = replace(setting.static_only(), action=EMPTY)
        settings.append(setting)

    def check(written: Path) -> None:
        selector = load_selector(written)
        script = load_script(written)
        differing = 0
        for setting in selector.settings:
            case = timed(texts, setting.sampling, verifier, profile, setting.batch)
            differing += count_differing(module, Policy(setting, selector), script, case)
        if differing:
            raise InputError(f"{folder}: {differing} of its actions are not the trained module's")

    # the median static tree is drafted at roots without features, whatever the sampling setting
    trees = sorted((setting.action for setting in settings), key=lambda action: action.nodes)
    fallback = trees[len(settings) // 2]
    rows = [setting.row() for setting in settings]
    return write_artefact(
        folder, module, profile, verifier, fallback, rows, facts, check, texts.tokens
    )


@torch.no_grad()
def count_differing(
    module: SelectorModule, policy: Policy, script: torch.nn.Module, case: Timed
) -> int:
    """The number of roots at which the trained module, the artefact's TorchScript or its path for
    one root chooses an action that is worse than the best one by more than `TIE`."""
    setting = policy.setting
    first = module.schema.levels[0]
    rows = (~case.texts.unknown_R).nonzero()[:, 0]
    predictions = module.predictions(case.texts, setting)
    trained_R = decide(case, predictions, setting, not module.is_regressor).action_R[rows]
    scalars, hidden = case.texts.features(rows, module.is_full)
    scalars[:, module.schema.index("batch")] = setting.batch
    first_view = {SCALARS_KEY: scalars[:, : module.schema.first]}
    whole_view = {SCALARS_KEY: scalars, **dict(zip(HIDDEN_STATES, hidden, strict=False))}
    views = []
    if first in (setting.level, *setting.feature_levels):
        views.append(first_view)
    if setting.level != first:
        views.append(whole_view)
    action_R, scores_RA = _in_turn(script, views, module.space)
    single = [_answer(policy, views, row) for row in range(len(rows))]
    single_R = torch.tensor([module.space.index(action) for action in single])
    lost_NR = [
        scores_RA.amax(-1) - scores_RA.gather(-1, chosen_R.unsqueeze(-1))[:, 0]
        for chosen_R in (trained_R, action_R, single_R)
    ]
    return int((torch.stack(lost_NR) > TIE).any(0).sum())


def _answer(policy: Policy, views: list[Features], row: int) -> Action:
    """The action at one root; a later view is asked only where an earlier one is not enough."""
    for view in views:
        answer = policy.select({name: values[row] for name, values in view.items()})
        if answer is not None:
            return answer
    raise RuntimeError("a selector decides with all features")


def _in_turn(
    ask: torch.nn.Module, views: list[Features], space: ActionSpace
) -> tuple[torch.Tensor, torch.Tensor]:
    action_R, scores_RA = ask(views[0])
    for view in views[1:]:
        later_R, later_RA = ask(view)
        asked_R = space.needs_draft_A[action_R]
        action_R = torch.where(asked_R, later_R, action_R)
        scores_RA = torch.where(asked_R[:, None], later_RA, scores_RA)
    return action_R, scores_RA
