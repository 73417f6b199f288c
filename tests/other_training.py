"""The best selector of `compare`, trained with another seed, and for each kind of work on the other kinds alone.

`python -m tests.other_training configs/papers.yaml [key=value ..]`, after `make papers` with the same keys, prints its
speed over Traversal's best root trees on each clock, as a mean over cells and in the least one.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch

from pipelines.compare.cells import BOTH, KEPT, RIVAL, Network, of_verifier, replays
from pipelines.compare.stage import SECTIONS, all_clocks, over_cells
from pipelines.config import load_config
from pipelines.data.recorded import load_traces, settings_of
from pipelines.latency.stage import load_profile
from pipelines.tracking import mlflow_run, nested_run
from pipelines.train.fitting import fitted, module_of, seen
from selector.train.data import Texts
from selector.train.module import SelectorModule
from selector.train.replay import jackknifed

OWN = Network("lifted_uniform", BOTH)
METHODS = f"selector, {BOTH}", f"selector, {BOTH}{KEPT}"


def part(texts: Texts, kind: str, same: bool) -> Texts:
    return texts.take(torch.tensor([(own == kind) == same for own in texts.kind_X]).nonzero()[:, 0])


def main(path: str, *overrides: str) -> None:
    config = load_config(Path(path), list(overrides))
    profile = load_profile(config)
    torch.set_num_threads(1)
    splits, settings = load_traces(config, profile.pair), settings_of(config)
    every, folder = all_clocks(config, profile), config.folder / "comparing"

    def trained(name: str, seed: int, texts: dict[str, Texts]) -> SelectorModule:
        own = config.model_copy(update={"seed": seed})
        module = module_of(
            own, "regressor", *seen(OWN.level, texts["train"]), space=of_verifier(texts, *OWN)["train"].space.to_json()
        )
        if (folder / name / "best.ckpt").exists():
            return SelectorModule.load_from_checkpoint(folder / name / "best.ckpt", map_location="cpu").eval()
        with nested_run(mlflow, name) as run:
            return fitted(own, module, of_verifier(texts, *OWN), OWN.verifier, [], folder / name, run.info.run_id)

    def replayed(module: SelectorModule, texts: dict[str, Texts], kind: str = "") -> None:
        """Fill in what the module does with all held-out texts, or those of a kind."""
        for number, sampling in enumerate(settings):
            own_X = torch.tensor([not kind or each == kind for each in splits["test"].setting_of(sampling).kind_X])
            own = replays(OWN.verifier, sampling, texts, every, {OWN: module}, {})
            for place in found:
                found[place][number][:, own_X] = own[place]

    each = [splits["test"].setting_of(sampling) for sampling in settings]
    cells = [(str(sampling), kind) for sampling, own in zip(settings, each, strict=True) for kind in own.kind_X]
    names, sources = list(dict.fromkeys(cells)), [source for own in each for source in own.source_X]
    cell_X = torch.tensor([names.index(cell) for cell in cells])
    source_X = torch.tensor([sorted(set(sources)).index(source) for source in sources])
    rivals = [torch.load(folder / f"replay {RIVAL[0]} {str(own).replace('/', ' of ')}.pt") for own in settings]
    found = {
        place: [torch.zeros(3, len(own), dtype=torch.float64) for own in each] for place in product(every, METHODS)
    }

    def show(what: str) -> None:
        for clock, method in found:
            rival_3X = torch.cat([own[clock, RIVAL[1]] for own in rivals], 1)
            columns_X4 = torch.cat([torch.cat(found[clock, method], 1)[:2], rival_3X[:2]]).T
            ratio = {n: jackknifed(columns_X4[cell_X == i], source_X[cell_X == i]) for i, n in enumerate(names)}
            least = min(ratio, key=lambda name: ratio[name].value)
            means = {
                kind: [own.value for (_, k), own in ratio.items() if k == kind]
                for kind in sorted(set(splits["test"].kind_X))
            }
            of_kinds = ", ".join(f"{kind} {sum(own) / len(own):.3f}" for kind, own in means.items())
            mean = over_cells(columns_X4, cell_X, source_X)
            over = f"{mean.value:.3f} ±{mean.error:.3f}, least {ratio[least].value:.3f} {least}"
            print(f"{what}, {clock}, {method}: {over}; {of_kinds}", flush=True)

    with mlflow_run(config, "compare", SECTIONS) as mlflow:
        replayed(trained("second seed", config.seed + 1, splits), splits)
        show("second seed")
        for kind in sorted(set(splits["test"].kind_X)):
            others = {name: part(texts, kind, False) for name, texts in splits.items()}
            module = trained(f"without {kind}", config.seed, others)
            replayed(module, others | {"test": part(splits["test"], kind, True)}, kind)
        show("unseen kinds")


if __name__ == "__main__":
    main(*sys.argv[1:])
