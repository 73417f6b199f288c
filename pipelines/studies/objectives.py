"""Compares training objectives: DDTE's policy as printed, variants of its objective, and the regressor.

    .venv/bin/python -m pipelines.studies.objectives configs/demo.yaml data.features=full [data.stride=4] [--averaged=4]

Trains each on the traces of a run, after its stage `data`, with several seeds. The best static tree and the lookup rule
are chosen on the training texts, the best epoch and the way of deciding on the validation texts. Prints two Markdown
tables of the speed on the held-out texts: over the lookup rule and over the static tree, with the times of decisions.
± is one standard error over sources of the mean over seeds; in brackets is the standard deviation over seeds.

The printed objective takes a logarithm of expected labels, and a label along a text is one draw of them. With
`--averaged=4` it is also trained on mean labels over four continuations of every root that is learned from. They take
a fifth of a second for each; a stride leaves roots out, for all objectives alike.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytorch_lightning as pl
import torch
from rich.progress import track
from torch import Tensor

from data_gen.models.sampling import Sampling
from data_gen.texts.recorded import read_rows
from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import load_pair
from pipelines.run import console
from pipelines.studies.ceiling import DEPTH, expected_along
from pipelines.tracking import mlflow_run, nested_run
from pipelines.train.fitting import POLICY_NETWORK, RATE
from pipelines.train.judging import by_setting, judge, statics, tune_rules
from pipelines.train.stage import hidden_widths, trained
from selector.actions import ActionSpace
from selector.decision import Mode
from selector.schema import LIGHT
from selector.train.data import SPLITS, Texts, Timed
from selector.train.module import Batch, SelectorModule, learned_rows
from selector.train.replay import Replayed, ratio_of_speeds
from selector.train.tuning import replay_mode

SEEDS = (1, 2, 3)


class OneBase(SelectorModule):
    """A policy whose speed is divided by one speed for each sampling setting: that of the static tree on all texts."""

    bases: Sequence[Mode]

    def ratios(self, batch: Batch) -> Tensor:
        at = [self.schema.index(name) for name in ("temperature", "top_p")]
        setting_B2, speed_B = batch.scalars_BF[:, at], torch.zeros_like(batch.base_speed_B)
        for base in self.bases:
            speed_B[(setting_B2 == torch.tensor(base.setting)).all(-1)] = base.speed
        return super().ratios(replace(batch, base_speed_B=speed_B))


class NoLogarithm(OneBase):
    """A policy that maximises the mean of these ratios, which is linear in the labels; no term for the worst roots."""

    def loss(self, batch: Batch) -> Tensor:
        return -self.ratios(batch).mean()


@dataclass(frozen=True)
class Variant:
    """An objective, the class that computes its loss, whether the network is that of the light regressor, and whether
    labels are means over continuations."""

    objective: str = "policy"
    kind: type[SelectorModule] = SelectorModule
    small: bool = False
    averaged: bool = False

    def module(self, config: Config, texts: Texts, bases: Sequence[Mode]) -> SelectorModule:
        """An untrained module."""
        pl.seed_everything(config.seed, verbose=False)
        level, network = (LIGHT, config.train.network) if self.small else (config.data.features, POLICY_NETWORK)
        module = self.kind(self.objective, level, hidden_widths(texts, level), network, RATE)
        if isinstance(module, OneBase):
            module.bases = bases
        return module


VARIANTS = {
    "DDTE's policy, as printed": Variant(),
    "one base speed for all roots": Variant(kind=OneBase),
    "one base speed, no logarithm": Variant(kind=NoLogarithm),
    "as printed, with the regressor's network": Variant(small=True),
    "one base speed, with the regressor's network": Variant(kind=OneBase, small=True),
    "one base speed, no logarithm, with the regressor's network": Variant(kind=NoLogarithm, small=True),
    "regressor": Variant("regressor", small=True),
}
AVERAGED = {
    "DDTE's policy, as printed, averaged labels": Variant(averaged=True),
    "as printed, with the regressor's network, averaged labels": Variant(small=True, averaged=True),
}


@dataclass
class Averaged(Texts):
    """Texts whose lookups have mean labels, too, float32 [R, D]."""

    copied_RD: Tensor = field(default_factory=lambda: torch.zeros(0))

    def labels(self, verifier: str, rows: Tensor | slice, space: ActionSpace) -> Tensor:
        labels_RS = super().labels(verifier, rows, space)
        labels_RS[:, space.tree_survivals :] = self.copied_RD[rows]
        return labels_RS


def averaged(config: Config, texts: Texts, rollouts: int) -> Averaged:
    """Training texts whose labels are means over continuations, at the roots that are learned from.

    Greedy text is certain, so its labels stay.
    """
    pair, verifier, known_R = load_pair(config), config.train.verifier, torch.zeros(len(texts.text_R), dtype=torch.bool)
    known_R[learned_rows(texts, config.data.stride)] = True
    survivals_RS = texts.survivals[verifier].clone()
    copied_RD = (texts.foretold_R.unsqueeze(-1) > torch.arange(DEPTH)).float()
    table = read_rows(traces_folder(config), "train")
    for x in track(range(len(texts)), "labelling continuations", console=console):
        sampling = Sampling(*texts.settings[texts.setting_X[x]])
        rows = (known_R & (texts.text_R == x)).nonzero()[:, 0]
        if sampling.temperature > 0 and len(rows) > 0:
            numbers = texts.number_R[rows].tolist()
            trees_RS, mean_RD = expected_along(pair, table.slice(x, 1), sampling, config, numbers, rollouts)
            survivals_RS[rows], copied_RD[rows] = trees_RS.to(survivals_RS.dtype), mean_RD.float()
    own = {each.name: getattr(texts, each.name) for each in fields(texts)}
    return Averaged(**own | {"survivals": {**texts.survivals, verifier: survivals_RS}, "copied_RD": copied_RD})


def main(config: Config, seeds: Sequence[int] = SEEDS, rollouts: int = 0) -> None:
    profile, verifier = load_profile(config), config.train.verifier
    splits = load_traces(config, profile.pair)
    train, validation, held_out = (by_setting(config, splits[name], profile) for name in SPLITS)
    bases = statics(config, train)
    rules = [rule[verifier] for rule in tune_rules(train, {verifier: bases})]
    rivals = {
        name: [replay_mode(own, {}, mode) for own, mode in zip(held_out, modes, strict=True)]
        for name, modes in (("lookup rule", rules), ("best static tree", bases))
    }
    variants = VARIANTS | (AVERAGED if rollouts else {})
    means = {**splits, "train": averaged(config, splits["train"], rollouts)} if rollouts else splits
    found: dict[str, list[list[Replayed]]] = {}  # by variant, then setting, then seed
    with mlflow_run(config, "objectives", ("train",)) as mlflow, tempfile.TemporaryDirectory() as folder:
        for name, variant in variants.items():
            each = []
            for seed in seeds:
                with nested_run(mlflow, f"{name}, seed {seed}") as nested:
                    own = config.model_copy(update={"seed": seed})
                    module, at = variant.module(own, splits["train"], bases), Path(folder, name, str(seed))
                    learned = means if variant.averaged else splits
                    module = trained(own, module, learned, validation, bases, at, nested.info.run_id)
                each.append(replays(module, validation, bases, held_out))
            found[name] = [list(seeds_of) for seeds_of in zip(*each, strict=True)]
    heads = " | ".join(str(Sampling(*own.setting)) for own in held_out)
    for rival, replayed in rivals.items():
        console.print(f"\n| speed over the {rival} | {heads} |\n|---{'|---' * len(held_out)}|", soft_wrap=True)
        for name, own_replays in found.items():
            cells = [
                ratio(mine, other, texts.texts.source_number_X)
                for mine, other, texts in zip(own_replays, replayed, held_out, strict=True)
            ]
            console.print(f"| {' | '.join([name, *cells])} |", soft_wrap=True, highlight=False)


def replays(
    module: SelectorModule, validation: list[Timed], bases: list[Mode], held_out: list[Timed]
) -> list[Replayed]:
    """The held-out texts of each setting as the module decodes them, tuned on the validation texts."""
    modes = [judged.mode for judged in judge(module, validation, bases)]
    return [
        replay_mode(own, module.predictions(own.texts, mode), mode, not module.is_regressor)
        for own, mode in zip(held_out, modes, strict=True)
    ]


def ratio(seeds: Sequence[Replayed], other: Replayed, source_X: Tensor) -> str:
    """The speed over another's: of the mean time over seeds with its standard error over sources, and in brackets the
    standard deviation over seeds."""
    mean = replace(seeds[0], seconds_X=torch.stack([each.seconds_X for each in seeds]).mean(0))
    scatter = [each.speed / other.speed for each in seeds]
    spread = f" ({statistics.stdev(scatter):.3f})" if len(scatter) > 1 else ""
    return f"{ratio_of_speeds(mean, other, source_X)}{spread}"


if __name__ == "__main__":
    means = [each for each in sys.argv[2:] if each.startswith("--averaged=")]
    own = load_config(Path(sys.argv[1]), [each for each in sys.argv[2:] if each not in means])
    main(own, rollouts=int(means[-1].partition("=")[2]) if means else 0)
