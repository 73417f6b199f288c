"""The time of a decision at one root in every format, in turn, so that all see the same machine.

    python -m tests.selector.decision_times [runs/demo/selector]

Without an artefact it takes one of the usual size that has learnt nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from selector.export.write import load_script
from selector.runtime.selector import load_selector
from selector.schema import LIGHT
from selector.train.module import SelectorModule
from tests.selector import exported, synthetic

CALLS = 2000


def usual_size(folder: Path) -> None:
    """An artefact with the network that training makes unless the config says otherwise."""
    made, data = SelectorModule("regressor", LIGHT, [], {}), synthetic.texts(repeats=0.1)
    made.begin_at(data, "traversal", (~data.unknown_R).nonzero()[:, 0])
    exported.module_of = lambda *_: made.eval()  # type: ignore[assignment]
    exported.export(folder)


def timed(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return 1e6 * (perf_counter() - begin)


@torch.no_grad()
def main(folder: Path) -> None:
    selector, script = load_selector(folder), load_script(folder)
    mode = next(each for each in selector.modes if each.decides)
    tuned = selector.at(mode.temperature, mode.top_p)
    data, rows = exported.roots_of(mode, LIGHT, count=1)
    features = exported.one_by_one(exported.batch_of(data, rows, LIGHT))[0]
    calls: dict[str, Callable[[], object]] = {
        "Tuned.select (NumPy)": lambda: tuned.select(features),
        "selector.pt (TorchScript)": lambda: script(features),
    }
    micros = np.array([[timed(call) for call in calls.values()] for _ in range(CALLS)])[CALLS // 10 :]
    for name, (median, late) in zip(calls, np.percentile(micros, (50, 99), axis=0).T, strict=True):
        print(f"{name:28s} median {median:7.1f} us   99th percentile {late:7.1f} us")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        if not sys.argv[1:]:
            usual_size(Path(place) / "selector")
        main(Path(sys.argv[1] if sys.argv[1:] else Path(place) / "selector"))
