"""How fast texts are labelled, and how much memory that takes, on a finished run's pair and texts.

    .venv/bin/python -m pipelines.studies.labelling configs/demo.yaml

With `pair.threads` threads. Roots per second with and without the models' passes, for all of the run's verifiers and
all actions, and for chains alone; and the peak of memory while texts of several lengths are labelled.
"""

from __future__ import annotations

import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import torch

from data_gen.models import ModelPair
from data_gen.sampling import Sampling
from data_gen.text_labels import TextLabeller
from data_gen.texts import Text, rows_along, written_by_target
from pipelines.common.console import console
from pipelines.common.prompts import encode, prompts_of
from pipelines.config import Config, load_config
from pipelines.pair.loading import load_pair

TEXTS = 12  # for each sampling setting
LENGTHS = (128, 256, 512, 1024)  # labelled tokens of the texts whose memory is measured


def main(config: Config) -> None:
    pair = load_pair(config)
    for setting in config.sampling:
        texts = _texts(config, pair, setting.build(), TEXTS, config.data.tokens)
        for branching in (True, False):
            seconds, passes, roots = (
                sum(column)
                for column in zip(*(timed(config, pair, t, setting.build(), branching) for t in texts), strict=True)
            )
            what = f"{len(config.verifiers)} verifiers, all actions" if branching else "chains alone"
            console.print(
                f"{setting.build()}, {what}: {roots / seconds:,.0f} roots/s, "
                f"{roots / (seconds + passes):,.0f} with both models' passes"
            )
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # a peak is that of a process: a new one each
        for length in LENGTHS:
            peak = pool.apply(_peak, (config, length))
            console.print(
                f"texts of {length} labelled tokens: {peak / 1e6:.0f} MB more at the peak than before labelling"
            )


def _texts(config: Config, pair: ModelPair, sampling: Sampling, count: int, tokens: int) -> list[Text]:
    prompts = [encode(config, pair, prompt) for prompt in prompts_of(config, pair, "train", count)]
    return written_by_target(pair, prompts, tokens + 16, sampling, config.seed)


@torch.inference_mode()
def timed(config: Config, pair: ModelPair, text: Text, sampling: Sampling, branching: bool) -> tuple[float, float, int]:
    """Seconds of labelling, seconds of the passes, and roots of one text."""
    tokens_T = torch.tensor(text.tokens[text.start :])
    labeller = TextLabeller(tokens_T, config.verifiers, 1, torch.Generator().manual_seed(0), branching=branching)
    start = time.perf_counter()
    labelling = 0.0
    for block in rows_along(pair, text, sampling):
        passed = time.perf_counter()
        labeller.add(block.target.probs_NV, block.draft.probs_NV)
        labelling += time.perf_counter() - passed
    passed = time.perf_counter()
    labeller.survivals()
    labelling += time.perf_counter() - passed
    return labelling, time.perf_counter() - start - labelling, labeller.roots


def _peak(config: Config, length: int) -> float:
    """Bytes that one text of so many tokens adds to the peak of a process."""
    pair = load_pair(config)
    sampling = config.sampling[-1].build()
    text = _texts(config, pair, sampling, 1, length)[0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timed(config, pair, text, sampling, True)
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[2:]))
