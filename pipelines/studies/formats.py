"""What one decision takes in each format of an exported selector: `python -m pipelines.studies.formats CONFIG`.

In loops of their own, one thread. Features at hand: roots of the validation texts one at a time, formats in turn.
Features included: texts that the target writes, a root after every few tokens, asked as in decoding. Between two passes
of a model the same calls take several times as long (`decide` in `latency.json`).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.table import Table

from data_gen.features import Accepted, ModelRow, ModelRows, RootKnowledge
from data_gen.sampling import Sampling
from data_gen.texts import rows_along, written_by_target
from pipelines.common.console import console
from pipelines.common.prompts import encode, prompts_of
from pipelines.config import Config, load_config
from pipelines.data.traces import load_traces, timed
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import load_pair
from selector.artefact import Features
from selector.compiled import PACKAGE, run_package
from selector.plain import PlainSelector
from selector.runtime import Tuned, load_selector
from selector.schema import EARLY, HIDDEN_STATES, SCALARS_KEY

ROUNDS = 2000
TEXTS, ROUNDS_OF_TEXTS, STEP = 8, 6, 4
Ask = Callable[[Features], object]


def main(file: str, *overrides: str) -> None:
    """Time every format that the run's artefact has, under its first sampling setting in which a network decides."""
    config = load_config(Path(file), list(overrides))
    torch.set_num_threads(1)
    folder, profile = config.folder / "selector", load_profile(config)
    selector = load_selector(folder)
    mode = next((mode for mode in selector.modes if mode.decides), selector.modes[0])
    texts = load_traces(config, profile.pair)["validation"]
    mine = timed(texts, (mode.temperature, mode.top_p), selector.verifier, profile).texts
    rows = (~mine.unknown_R).nonzero()[:, 0]
    scalars, hidden = mine.features(rows, len(selector.widths) > 1)
    batch = {SCALARS_KEY: scalars, **dict(zip(HIDDEN_STATES, hidden, strict=False))}
    plain, tuned = PlainSelector(folder), selector.at(mode.temperature, mode.top_p)
    asked: dict[str, Ask] = {
        "Tuned.select (Numba)": tuned.select,
        "selector.pt (TorchScript)": selector.module,
        "model.safetensors (NumPy)": lambda root: plain.decide(
            root[SCALARS_KEY].numpy()[None], [root[name].numpy()[None] for name in root if name in HIDDEN_STATES]
        ),
    }
    if (folder / PACKAGE).exists():
        package = run_package(folder / PACKAGE, selector.widths)
        asked["selector.pt2 (compiled)"] = lambda root: package({name: row[None] for name, row in root.items()})
    table = Table("format", "median, µs", "99th percentile, µs", title="One decision, features at hand")
    for name, seconds in times(asked, batch).items():
        ordered = sorted(seconds)
        table.add_row(name, f"{statistics.median(ordered) * 1e6:.0f}", f"{ordered[int(0.99 * ROUNDS)] * 1e6:.0f}")
    console.print(table)
    if mode.decides:
        sampling = next(s for s in config.sampling if (s.temperature, s.top_p) == (mode.temperature, mode.top_p))
        whole = Table("asked with", "median, µs", "99th percentile, µs", title="One decision, features included")
        for sees, seconds in with_features(config, tuned, sampling.build()).items():
            ordered = sorted(seconds)
            whole.add_row(
                sees, f"{statistics.median(ordered) * 1e6:.0f}", f"{ordered[int(0.99 * len(ordered))] * 1e6:.0f}"
            )
        console.print(whole)


@torch.inference_mode()
def with_features(config: Config, tuned: Tuned, sampling: Sampling) -> dict[str, list[float]]:
    """Seconds of each decision, by what it is asked with; where a selector is asked twice, the second follows the
    first."""
    pair = load_pair(config)
    prompts = [encode(config, pair, prompt) for prompt in prompts_of(config, pair, "validation", TEXTS)]
    texts = written_by_target(pair, prompts, config.data.tokens, sampling, config.seed)
    found: dict[str, list[float]] = {sees: [] for sees in tuned.sees}
    for number, text in enumerate(texts * ROUNDS_OF_TEXTS):
        blocks = zip(*rows_along(pair, text, sampling), strict=True)
        target, draft = (ModelRows(*map(torch.cat, zip(*parts, strict=True))) for parts in blocks)
        knowledge = RootKnowledge(text.tokens[: text.start + 1], sampling, tuned.sees)
        passed = 0
        for begin in range(0, len(text.tokens) - text.start - STEP, STEP):
            root = text.start + begin + STEP
            nodes, following = list(range(begin, begin + STEP)), text.tokens[root + 1 - STEP : root + 1]
            knowledge.committed(Accepted(target, nodes), following)
            for sees in tuned.sees:
                if sees != EARLY:
                    rows = (each[passed : begin + STEP + 1] for each in draft)
                    knowledge.passed(ModelRow(*row) for row in zip(*rows, strict=True))
                    passed = begin + STEP + 1
                start = time.perf_counter()
                tuned.select(knowledge.features(sees, root + 1))
                if number >= len(texts):  # the first round warms up
                    found[sees].append(time.perf_counter() - start)
    return found


def times(asked: dict[str, Ask], batch: Features) -> dict[str, list[float]]:
    """Seconds of each call, formats in turn."""
    found: dict[str, list[float]] = {name: [] for name in asked}
    with torch.inference_mode():
        for root in roots(batch):
            for name, ask in asked.items():
                begin = time.perf_counter()
                ask(root)
                found[name].append(time.perf_counter() - begin)
    return {name: seconds[len(seconds) - ROUNDS :] for name, seconds in found.items()}


def roots(batch: Features) -> Iterator[Features]:
    """One root after another, again from the start where there are too few; a tenth more than are timed."""
    count = len(batch[SCALARS_KEY])
    for n in range(ROUNDS + ROUNDS // 10):
        yield {name: rows[n % count].clone() for name, rows in batch.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
