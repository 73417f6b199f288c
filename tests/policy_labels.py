"""SpecInfer's policy of `compare` for equation 11, learned from survivals that a regressor with hidden states expects.

`python -m tests.policy_labels configs/papers.yaml [key=value ..]`, after `make papers` with the same keys, prints its
speed over Traversal's best root trees, as a mean over cells and in the least one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pipelines.compare.cells import HERE, HIDDEN, OF, PRINTED, RIVAL, TREES, Network, replays
from pipelines.compare.stage import IDEAL, SECTIONS, all_clocks, over_cells, with_expected
from pipelines.config import load_config
from pipelines.data.recorded import load_traces, settings_of
from pipelines.latency.stage import load_profile
from pipelines.tracking import mlflow_run, nested_run
from pipelines.train.fitting import OWN, module_of, seen
from pipelines.train.judging import statics
from pipelines.train.stage import trained
from selector.train.data import Timed
from selector.train.module import SelectorModule, learned_rows
from selector.train.replay import jackknifed

NAME = "specinfer"


@torch.no_grad()
def main(path: str, *overrides: str) -> None:
    config = load_config(Path(path), list(overrides))
    profile, folder = load_profile(config), config.folder / "comparing"
    splits, settings = load_traces(config, profile.pair), settings_of(config)
    clocks = {HERE: profile, IDEAL: all_clocks(config, profile)[IDEAL]}

    def regressor(actions: str) -> SelectorModule:
        own = Network(NAME, actions)
        space = OF[actions].to_json()
        module = module_of(config, "regressor", *seen(own.level, splits["train"]), space=space)
        module.load_state_dict(torch.load(folder / f"{', '.join(own)}.pt"))
        return module.eval()

    expected, full = with_expected(splits, regressor(TREES), NAME), regressor(HIDDEN)
    for split in OWN:
        texts = expected[split]
        for rows in learned_rows(texts, config.data.stride if split == "train" else 1).split(1 << 14):
            passed = torch.ones(len(rows), 1)
            texts.survivals[NAME][rows] = full.network(*texts.features(rows, True), passed).exp().half()
    own = config.model_copy(update={"train": config.train.model_copy(update={"verifier": NAME})})
    space = OF[TREES].to_json()
    module = module_of(own, "policy", *seen(config.data.features, splits["train"]), space=space)
    timed = {
        split: [Timed(expected[split].setting_of(each), NAME, clocks[IDEAL]) for each in settings] for split in OWN
    }
    name = "policy, hidden states' survivals"
    with mlflow_run(config, "compare", SECTIONS) as mlflow, nested_run(mlflow, name) as run, torch.enable_grad():
        given = timed["validation"], statics(timed["train"]), folder / name, run.info.run_id
        module = trained(own, module, expected, *given)
    found = [replays(NAME, each, splits, clocks, {}, {IDEAL: module})[IDEAL, PRINTED] for each in settings]
    kept = [torch.load(folder / f"replay {RIVAL[0]} {str(each).replace('/', ' of ')}.pt") for each in settings]
    rivals = [each[IDEAL, RIVAL[1]] for each in kept]
    texts_of = [splits["test"].setting_of(each) for each in settings]
    cells = [(str(each), kind) for each, texts in zip(settings, texts_of, strict=True) for kind in texts.kind_X]
    names, sources = list(dict.fromkeys(cells)), [source for texts in texts_of for source in texts.source_X]
    cell_X = torch.tensor([names.index(cell) for cell in cells])
    source_X = torch.tensor([sorted(set(sources)).index(source) for source in sources])
    columns_X4 = torch.cat([torch.cat(found, 1)[:2], torch.cat(rivals, 1)[:2]]).T
    mean = over_cells(columns_X4, cell_X, source_X)
    least = min(jackknifed(columns_X4[cell_X == n], source_X[cell_X == n]).value for n in range(len(names)))
    print(f"{mean.value:.4f} ±{mean.error:.4f}, least {least:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
