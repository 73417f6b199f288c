"""What copying there is in texts: whether the target can copy at all, and how much of each kind repeats earlier text.

    .venv/bin/python -m pipelines.studies.repeats configs/workloads.yaml

Prints the target's loss on random tokens and on the same tokens when they come again. Then, for every kind of prompt
and every sampling setting, the share of positions in the target's texts that are inside a repeat: the last tokens up to
there, eight or more, stand in the text before.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.table import Table

from data_gen.lookup import LookupIndex
from data_gen.models import ModelPair
from data_gen.prompts import Prompt
from data_gen.sampling import Sampling
from data_gen.texts import Text, written_by_target
from pipelines.common.console import console
from pipelines.common.prompts import encode, prompts_of
from pipelines.config import Config, load_config
from pipelines.pair.language_model import copy_losses
from pipelines.pair.loading import load_pair
from selector.potential import LONG_REPEAT

TEXTS = 30  # of each kind, for each sampling setting


def main(config: Config) -> None:
    pair = load_pair(config)
    once, again = copy_losses(pair.target, config.prompts.tokens, config.seed)
    console.print(f"loss on {config.prompts.tokens} random tokens {once:.2f}, when they come again {again:.2f}")
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts_of(config, pair, "train"):
        by_kind.setdefault(prompt.kind, []).append(prompt)
    samplings = [setting.build() for setting in config.sampling]
    table = Table("prompts", "tokens of a prompt", *(f"{s}: in repeats, tokens of a text" for s in samplings))
    for kind, prompts in by_kind.items():
        begun = [encode(config, pair, prompt) for prompt in prompts[:TEXTS]]
        cells = [_cell(config, pair, begun, sampling) for sampling in samplings]
        table.add_row(kind, f"{sum(map(len, begun)) / len(begun):.0f}", *cells)
    console.print(table)


def _cell(config: Config, pair: ModelPair, prompts: list[list[int]], sampling: Sampling) -> str:
    """Share of positions inside long repeats, and the mean number of tokens written."""
    texts = written_by_target(pair, prompts, config.data.tokens, sampling, config.seed)
    inside = [flag for text in texts for flag in inside_repeats(text)]
    return f"{sum(inside) / len(inside):.0%}, {len(inside) / len(texts):.0f}"


def inside_repeats(text: Text) -> list[bool]:
    """For every position of the continuation: whether the last tokens up to it, `LONG_REPEAT` or more, stood before."""
    index = LookupIndex(text.tokens[: text.start + 1])
    inside = []
    for token in text.tokens[text.start + 1 :]:
        index.extend([token])
        inside.append(index.match >= LONG_REPEAT)
    return inside


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[2:]))
