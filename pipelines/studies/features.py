"""What some features gain: a selector beside one that does not see them, on the same traces.

    python -m pipelines.studies.features CONFIG SCALAR[,SCALAR ..] [section.key=value ...]

Both are trained on the training texts, tuned on the validation texts and replayed on the test texts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces, settings_of
from pipelines.latency.profile import load_profile
from pipelines.run import console
from pipelines.tracking import mlflow_run
from pipelines.train.fitting import module_of
from pipelines.train.judging import by_setting, judge, statics
from pipelines.train.stage import trained
from selector.schema import LIGHT, PAIR, InputError
from selector.train.data import SPLITS, Texts
from selector.train.replay import Replayed, ratio_of_speeds
from selector.train.tuning import replay_mode


def without(texts: Texts, names: Sequence[str]) -> Texts:
    """The texts with these scalars 0 everywhere: the network then makes nothing of them."""
    scalars_RF = texts.scalars_RF.clone()
    scalars_RF[:, [PAIR.index(name) for name in names]] = 0
    return replace(texts, scalars_RF=scalars_RF)


def main(config: Config, names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in PAIR.names]:
        raise InputError(f"{unknown[0]}: no scalar of `selector.schema.PAIR`")
    profile = load_profile(config)
    splits = load_traces(config, profile.pair)
    fewer = {name: without(texts, names) for name, texts in splits.items()}
    pairs = zip(settings_of(config), replays(config, splits), replays(config, fewer), strict=True)
    console.print(
        f"test texts, replayed: speed with {', '.join(names)} over speed without (± one standard error)", soft_wrap=True
    )
    for setting, mine, other in pairs:
        gain = ratio_of_speeds(mine, other, splits["test"].setting_of(setting).source_number_X)
        console.print(f"{setting}: {gain}", highlight=False)


def replays(config: Config, splits: dict[str, Texts]) -> list[Replayed]:
    """The test texts of each sampling setting, with the network's decisions at all roots that have features."""
    profile = load_profile(config)
    train, validation, test = (by_setting(config, splits[name], profile) for name in SPLITS)
    bases, module = statics(train), module_of(config, "regressor", LIGHT, [])
    with mlflow_run(config, "features", ("train",)) as mlflow, tempfile.TemporaryDirectory() as folder:
        run_id = mlflow.active_run().info.run_id
        module = trained(config, module, splits, validation, bases, Path(folder), run_id)
    modes = [judged.mode for judged in judge(module, validation, bases)]
    both = zip(test, modes, strict=True)
    return [replay_mode(own, module.predictions(own.texts, mode), mode) for own, mode in both]


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[3:]), sys.argv[2].split(","))
