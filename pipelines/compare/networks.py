"""The networks that `compare` trains; a stopped stage goes on after those that are finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pipelines.compare.cells import (
    ALL_ACTIONS,
    BOTTOM_UP,
    HIDDEN,
    PRINTED,
    SELECTORS,
    TREES,
    Contender,
    actions_of,
    of_verifier,
    space_of,
)
from pipelines.config import Config
from pipelines.evaluate.table import HERE
from pipelines.run import Parts
from pipelines.train.fitting import OWN, fitted, module_of
from pipelines.train.judging import space_that_pays, statics, timed_cases
from pipelines.train.stage import trained
from selector.actions import ActionSpace
from selector.latency import LatencyProfile
from selector.schema import FULL, LIGHT
from selector.train.data import Texts
from selector.train.module import SelectorModule

IDEAL = "eq. 11, draft pass 1/10"


@dataclass(frozen=True)
class Networks:
    """Makes them from a run's traces, for the latency profiles of some machines."""

    config: Config
    profiles: Mapping[str, LatencyProfile]
    splits: Mapping[str, Texts]
    parts: Parts

    def of(self, verifier: str) -> dict[str, list[Contender]]:
        """A verifier's networks by machine: regressors, and unless it is bottom-up one of the
        policy objective; none unless the config asks for some."""
        contenders: dict[str, list[Contender]] = {machine: [] for machine in self.profiles}
        if not self.config.evaluate.networks:
            return contenders
        regressors = {}
        for actions in actions_of(verifier, self.config.data.features):
            regressors[actions] = self._regressor(verifier, actions)
        for machine, of_machine in contenders.items():
            for actions, module in regressors.items():
                of_machine.append(Contender(SELECTORS[actions], actions, module))
            if verifier not in BOTTOM_UP:
                policy = self._policy_of_ddte(verifier, machine, regressors[TREES])
                of_machine.append(Contender(PRINTED, TREES, policy))
        return contenders

    def _regressor(self, verifier: str, actions: str) -> SelectorModule:
        space = space_of(actions, self.splits["train"], ())
        if actions == ALL_ACTIONS:
            space = self.parts.get(f"actions, {verifier}", lambda: self._that_pay(verifier))
        labelled = of_verifier(self.splits, verifier, space)
        level = FULL if actions == HIDDEN else LIGHT
        module = module_of(self.config, "regressor", level, labelled["train"])
        train = partial(fitted, self.config, module, labelled, verifier, [])
        return self._kept(f"{verifier}, {actions}", module, train)

    def _that_pay(self, verifier: str) -> ActionSpace:
        """The actions that pay on this machine, or by equation 11."""
        profiles = [self.profiles[machine] for machine in (HERE, IDEAL)]
        return space_that_pays(self._config_of(verifier), self.splits["train"], profiles)

    def _policy_of_ddte(
        self, verifier: str, machine: str, regressor: SelectorModule
    ) -> SelectorModule:
        """Equation 12, trained for one machine and a verifier's labels, with the hidden states that
        the traces have."""
        config = self._config_of(verifier)
        labelled = of_verifier(self.splits, verifier, ActionSpace.default())
        module = module_of(config, "policy", config.data.features, labelled["train"])

        def train(folder: Path, run_id: str) -> SelectorModule:
            expected = with_expected(labelled, regressor, verifier)
            profile = self.profiles[machine]
            validation = timed_cases(config, expected["validation"], profile)
            bases = statics(timed_cases(config, expected["train"], profile))
            return trained(config, module, expected, validation, bases, folder, run_id)

        return self._kept(f"{verifier}, policy, {machine}", module, train)

    def _config_of(self, verifier: str) -> Config:
        train = self.config.train.model_copy(update={"verifier": verifier})
        return self.config.model_copy(update={"train": train})

    def _kept(
        self, name: str, module: SelectorModule, train: Callable[[Path, str], SelectorModule]
    ) -> SelectorModule:
        """An untrained module as `train` returns it, which is given a folder and an MLflow run."""
        import mlflow  # takes seconds

        def make() -> dict[str, Tensor]:
            with mlflow.start_run(run_name=name, nested=True) as nested:
                return train(self.parts.folder / name, nested.info.run_id).state_dict()

        module.load_state_dict(self.parts.get(name, make))
        return module.eval()


@torch.no_grad()
def with_expected(
    labelled: Mapping[str, Texts], module: SelectorModule, verifier: str
) -> dict[str, Texts]:
    """The texts with a regressor's survivals for labels, which are of one text: the logarithm
    punishes their noise."""
    relabelled = dict(labelled)
    for split in OWN:
        outputs = [log_survivals.exp().half() for log_survivals in module.outputs(labelled[split])]
        relabelled[split] = replace(labelled[split], survivals={verifier: torch.cat(outputs)})
    return relabelled
