"""A loaded selector: it makes the decisions of an artefact directory and needs only torch and
NumPy.

Legend: B roots, A actions, T trees, F scalars, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from selector.actions import Action
from selector.decision import Setting, nearest
from selector.files import read_tensors
from selector.latency import LatencyProfile
from selector.runtime import artefact
from selector.runtime.artefact import ArtefactConfig, Features, checked
from selector.runtime.network import Network
from selector.runtime.policy import Loaded, Policy, covered, warn_once
from selector.runtime.tokens import TokenStatistics
from selector.sampling import Sampling
from selector.schema import DRAFTER, LOG, SCALARS_KEY, InputError

__all__ = ["Policy", "Selector", "load_selector"]
Shape = Action | tuple[int | str, ...]  # K, L1, L2 and perhaps a style
ASKED_BY = ("temperature", "top_p", "batch")  # scalars that tell which setting decides


class Selector(Loaded):
    """A loaded selector.

    Attributes:
        actions: the action table; `scores` follows its order.
        feature_levels: the level of the features that `select` and `scores` take: `light`, `full`
            or `drafter`.
        fallback: the action for a root without features.
        latency: the profile that the decisions are based on.
        tokens: statistics by token, for the features of a log's selector.
        widths: of the features, by name.
    """

    def __init__(
        self,
        network: Network,
        latency: LatencyProfile,
        settings: Sequence[Setting],
        tokens: TokenStatistics | None = None,
    ) -> None:
        super().__init__(network, latency)
        self.settings = list(settings)
        self.fallback = self.config.fallback
        self.feature_levels: tuple[str, ...] = (self.config.feature_level,)
        self.tokens = TokenStatistics.empty() if tokens is None else tokens
        self._policies: dict[tuple[float, float, float, bool], Policy] = {}

    def __repr__(self) -> str:
        config = self.config
        names = dict.fromkeys(str(setting.sampling) for setting in self.settings)
        return (
            f"Selector({config.pair['target']} / {config.pair['draft']}, {self.verifier}; "
            f"a {config.objective} with {config.feature_level} features, "
            f"{len(self.actions)} actions; {'; '.join(names)})"
        )

    def select(self, features: Features | None) -> Action:
        """The action for one root; `fallback` without features. The setting that is nearest to the
        features' sampling and number of requests decides, as `Policy.select`.

        `features` are `{name: tensor}` as in the schema, float32 [F] and [D], or the scalars of its
        first level alone. Raises InputError where one is missing, of another shape or dtype, or not
        finite, or a setting is out of range.
        """
        if features is None:
            return self.fallback
        policy = self._policy_of(checked(features, self.widths, 1, self.schema.first))
        chosen = policy.select(features)
        assert chosen is not None
        return chosen

    def scores(self, features: Features) -> Tensor:
        """Scores of all actions, float32 [A], or [B, A] for a batch. The highest is chosen.

        Those of a regressor are `E - price T` in tokens. Actions that may not be chosen have
        `decision.NEVER`. Raises InputError as `select`.
        """
        read = checked(features, self.widths, 2, self.schema.first)
        if read[SCALARS_KEY].dim() == 1:
            return torch.from_numpy(self._policy_of(read).scores(read))
        scores = []
        for values in zip(*read.values(), strict=True):
            root = dict(zip(read, values, strict=True))
            scores.append(self.scores(root))
        return torch.stack(scores)

    def _policy_of(self, read: Features) -> Policy:
        scalars_F = read[SCALARS_KEY].numpy()
        temperature, top_p, batch = (scalars_F[self.schema.index(name)].item() for name in ASKED_BY)
        early = len(scalars_F) == self.schema.first
        asked = temperature, top_p, batch, early
        if asked not in self._policies:
            level = self.schema.levels[0 if early else 1]
            settings = [setting for setting in self.settings if setting.level in ("", level)]
            setting = nearest(settings or self.settings, Sampling(temperature, top_p), batch)
            if early and len(setting.feature_levels) > 1:  # there will be no more at this root
                setting = replace(setting, feature_levels=setting.feature_levels[:1])
            self._policies[asked] = Policy(setting, self)
        return self._policies[asked]

    def at(
        self,
        temperature: float,
        top_p: float = 1.0,
        shapes: Iterable[Shape] | None = None,
        batch: int = 1,
        level: str | None = None,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> Policy:
        """The selector under the setting that is nearest to a sampling and a number of requests.

        Where no setting covers that sampling (`Sampling.covers`), the lookup rule and the static
        tree of the nearest one decide: they lose less there than a network outside of its training
        data. A warning says so, once.

        Args:
            shapes: the actions that an engine can draft, `(K, L1, L2)` or `(K, L1, L2, style)`;
                those that the selector does not have are left out. None for all.
            level: of the features, `text` or `drafter`, for a log's selector; None for `drafter`.

        Raises:
            InputError: the setting, the batch or the level is out of range, no tree is left, or a
                shape is not in the action space.
        """
        asked = Sampling(temperature, top_p, top_k, min_p)
        if self.schema == LOG:
            level = level or DRAFTER
        settings = [setting for setting in self.settings if level is None or setting.level == level]
        if not settings:
            raise InputError(f"level {level}: this selector has none of that level")
        setting = nearest(settings, asked, batch)
        if not covered(setting, asked):
            setting = setting.without_network()
        if shapes is not None:
            setting = self._restricted(setting, shapes)
        return Policy(setting, self)

    def _restricted(self, setting: Setting, shapes: Iterable[Shape]) -> Setting:
        whole = replace(self.space, delayed=None)  # an engine may draft trees that are not chosen
        try:
            draftable = {whole.actions[whole.index(Action.of(shape))] for shape in shapes}
        except (ValueError, TypeError) as error:
            raise InputError(f"shapes: {error}") from error
        positions = {a for a, action in enumerate(self.space) if action in draftable}
        if min(positions, default=len(self.actions)) >= len(self.space.trees):
            raise InputError("shapes: no tree is left")
        speed_T = self.config.static_speeds(setting, self.latency)
        return setting.restricted(self.space, positions, speed_T)

    def check_pair(
        self, target: str, draft: str, device: str = "", weights: Sequence[str] = ()
    ) -> None:
        """Warn, once, where the models or the machine are not those that the selector was trained
        for.

        Args:
            target, draft: directories or hub ids of the models that decode. Of paths the last part
                is compared, and only where the weights are not known.
            device: as `LatencyProfile.device`, of which the part before the first comma is
                compared; "" if not known.
            weights: as `LatencyProfile.weights`, of the models that decode.
        """
        trained = [str(self.config.pair.get(role)) for role in ("target", "draft")]
        same = [Path(name).name for name in trained] == [Path(target).name, Path(draft).name]
        if weights and self.latency.weights:
            same = list(weights) == self.latency.weights
        if not same:
            warn_once(
                f"the selector was trained for {' and '.join(trained)}; {target} and {draft}, or "
                "other weights of these, decode"
            )
        timed_on = self.latency.device.partition(",")[0]
        decodes_on = device.partition(",")[0]
        if decodes_on not in ("", timed_on):
            warn_once(f"the selector has the step times of {timed_on}; {decodes_on} decodes")


def load_selector(
    folder: str | Path, latency: str | Path | LatencyProfile | None = None
) -> Selector:
    """Reads an artefact directory.

    Args:
        folder: the directory, the id of a repository on the hub, or `models:/name/version` or
            `models:/name@alias` of MLflow's registry.
        latency: another machine's profile, whose step times, static trees and price of time are
            used; all actions are then allowed. None for the directory's own.

    Raises:
        InputError: a file is missing, damaged or of another schema version, the download fails, or
            the profile is of another pair or lacks the verifier.
    """
    folder = artefact.local_folder(folder)
    artefact.check_files(folder)
    config = artefact.read_config(folder / "config.json")
    artefact_profile = LatencyProfile.load(folder / "latency.json")
    profile = artefact_profile
    if isinstance(latency, LatencyProfile):
        profile = latency
    elif latency is not None:
        profile = LatencyProfile.load(Path(latency))
    if profile.pair != config.pair["fingerprint"]:
        raise InputError(f"{folder}: the latency profile was measured with another pair")
    settings = list(config.settings)
    if profile != artefact_profile:
        settings = [_moved(config, setting, profile, artefact_profile) for setting in settings]
    network = Network(read_tensors(folder / "model.safetensors"), config)
    return Selector(network, profile, settings, TokenStatistics.load(folder))


def _moved(
    config: ArtefactConfig, setting: Setting, latency: LatencyProfile, before: LatencyProfile
) -> Setting:
    if config.verifier not in latency.verify:
        raise InputError(
            f"the latency profile of {latency.device} has no times for {config.verifier}"
        )
    speed_T = config.static_speeds(setting, latency)
    speed_before_T = config.static_speeds(setting, before)
    best = int(speed_T.argmax())
    ratio = float(speed_T[best] / speed_before_T[config.space.index(setting.action)])
    return replace(setting.faster(ratio), action=config.space.trees[best], allowed=())
