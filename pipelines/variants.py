"""What the `studies` stage compares: variants of the selector, what each is trained on, and where it is judged.

Legend: B roots, S samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from pipelines.config import Config, Train
from pipelines.prompts import prompts_of
from pipelines.train import traces_module
from selector.data import Roots, TracesModule, kind_number, met_in_decoding, of_setting
from selector.runtime import LatencyProfile, gpu_like
from selector.schema import CONTEXT, SCALAR_NAMES, TRACE_SCALARS, TRUNK_STATE

FEATURES = {
    "target": ("target_hidden_prev",),
    "draft": ("draft_hidden_prev", "draft_hidden_root"),
    "divergences": tuple(name for name in TRACE_SCALARS if name not in {scalar.name for scalar in CONTEXT}),
    "context": tuple(scalar.name for scalar in CONTEXT),
    "trunk": (TRUNK_STATE,),
}
MIN_PROMPTS = 2  # of the validation split under each setting: fewer have no error


@dataclass(frozen=True)
class Place:
    """Roots to train on or to be judged on, and whose times count: everything and the run's own where nothing is said.

    Attributes:
        kind, temperature: of the prompts, or of the sampling settings.
        gpu_like: draft share of a synthetic profile.
    """

    name: str = "all"
    kind: str | None = None
    temperature: float | None = None
    gpu_like: float | None = None

    def holds_B(self, roots: Roots) -> Tensor:
        """Which roots belong to it, bool [B]."""
        inside_B = torch.ones(len(roots), dtype=torch.bool)
        if self.kind is not None:
            inside_B &= roots.kind_B == kind_number(self.kind)
        if self.temperature is not None:
            inside_B &= (roots.scalars[:, SCALAR_NAMES.index("temperature")] - self.temperature).abs() < 1e-4
        return inside_B


ALL = Place()


@dataclass(frozen=True)
class Variant:
    """One training, and the places where it is judged.

    Attributes:
        train: the section it is trained by.
        left_out: features that it is not shown.
        trained: where its roots come from; `elsewhere`: from everywhere else instead.
        share: of the training prompts.
        half: whether labels are those of the first half of the samples.
    """

    group: str
    name: str
    train: Train
    objective: str = "regressor"
    left_out: tuple[str, ...] = ()
    trained: Place = ALL
    elsewhere: bool = False
    share: float = 1.0
    half: bool = False
    places: tuple[Place, ...] = (ALL,)


def variants(config: Config, places: list[Place]) -> list[Variant]:
    """The full regressor first, which is judged everywhere; then what each group of the config asks for."""
    studies, train = config.studies, config.train
    clocks = [place for place in places if place.gpu_like is not None]
    result = [Variant("full", "full", train, places=tuple(places))]
    if studies.policy:
        result.append(Variant("objective", "policy", train, "policy", places=(ALL, *clocks)))
        result += [
            Variant("profile", f"policy for {clock.name}", train, "policy", trained=clock, places=(ALL, clock))
            for clock in clocks
        ]
    result += [Variant("features", f"without {name}", train, left_out=FEATURES[name]) for name in studies.features]
    result += [Variant("width", f"width x {factor:g}", scaled(train, factor)) for factor in studies.widths]
    result += [Variant("roots", f"{share:g} of the prompts", train, share=share) for share in studies.shares]
    if studies.half_samples:
        samples = config.data.samples
        result.append(Variant("samples", f"{samples // 2} of {samples} samples", train, half=True))
    shifts = [place for place in places if place.kind is not None or place.temperature is not None]
    result += [
        Variant("shift", f"without {place.name}", train, trained=place, elsewhere=True, places=(place,))
        for place in shifts
    ]
    return result


def scaled(train: Train, factor: float) -> Train:
    """The section with networks of other widths, at least 4 each."""

    def times(width: int) -> int:
        return max(4, round(factor * width))

    widths = {key: tuple(times(width) for width in getattr(train, key)) for key in ("hidden", "trunk_hidden")}
    return train.model_copy(update={"width": times(train.width), **widths})


def candidates(config: Config) -> list[Place]:
    """All places that the config asks for, whether or not there are roots for them."""
    studies, places = config.studies, [ALL]
    kinds = sorted({prompt.kind for prompt in prompts_of(config, "train")}) if studies.kinds else []
    temperatures = sorted({setting.temperature for setting in config.sampling}) if studies.temperatures else []
    places += [Place(f"prompts of {kind}", kind=kind) for kind in kinds if len(kinds) > 1]
    places += [Place(f"temperature {t:g}", temperature=t) for t in temperatures if len(temperatures) > 1]
    return places + [Place(f"gpu_like_1/{1 / share:g}", gpu_like=share) for share in studies.gpu_like]


class Grounds:
    """The run's traces, place by place.

    Args:
        config: of the run.
        profile: the run's own.
    """

    def __init__(self, config: Config, profile: LatencyProfile) -> None:
        self.config, self.profile = config, profile
        self.own = traces_module(config, profile)

    def at(self, place: Place, elsewhere: bool = False) -> TracesModule:
        """Both splits of a place, or of everywhere else."""
        traces = self.own if place.gpu_like is None else self._on(place.gpu_like)
        splits = [roots.rows((place.holds_B(roots) ^ elsewhere).nonzero().flatten()) for roots in _splits(traces)]
        return traces.with_roots(*splits)

    @cache  # noqa: B019 - one object lives as long as the stage
    def _on(self, draft_share: float) -> TracesModule:
        """The traces with the times of a synthetic profile."""
        profile = gpu_like(self.profile.pair, self.config.verifiers, draft_share)
        return traces_module(self.config, profile)

    def for_training(self, variant: Variant) -> TracesModule:
        """What a variant is trained on; its validation roots, by which training stops, keep all their labels."""
        traces = self.at(variant.trained, variant.elsewhere)
        train = of_prompts(traces.train, variant.share, self.config.seed)
        return traces.with_roots(first_half(train) if variant.half else train, traces.validation)

    def usable(self, place: Place) -> bool:
        """Whether there is something to train on elsewhere, and prompts enough here to be judged by."""
        here = self.at(place)
        settings = here.train.setting_B.unique().tolist()
        judged = [met_in_decoding(of_setting(here.validation, setting)) for setting in settings]
        prompts = [len(roots.prompt_B.unique()) for roots in judged]
        alone = place.kind is None and place.temperature is None
        others = alone or all(len(roots) > 0 for roots in _splits(self.at(place, elsewhere=True)))
        return others and min(prompts, default=0) >= MIN_PROMPTS


def _splits(traces: TracesModule) -> tuple[Roots, Roots]:
    return traces.train, traces.validation


def of_prompts(roots: Roots, share: float, seed: int) -> Roots:
    """The roots of a share of the prompts; smaller shares are parts of larger ones."""
    prompts = roots.prompt_B.unique()
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))
    kept = prompts[order[: math.ceil(share * len(prompts))]]
    return roots.rows(torch.isin(roots.prompt_B, kept).nonzero().flatten())


def first_half(roots: Roots) -> Roots:
    """The roots as training would see them, at the root and along the trunk, had half of the samples been drafted."""
    samples = roots.trunk_BSA.shape[1] // 2
    along = [name for name in vars(roots) if "_BS" in name]
    halves = {name: getattr(roots, name)[:, :samples] for name in along}
    return replace(roots, mean_BA=roots.half_BA, every_mean_BO=roots.every_half_BO, **halves)
