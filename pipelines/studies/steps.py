"""What a decoding step asks of the machine, eager and without host waits: operators, readings, tokens per second.

    .venv/bin/python -m pipelines.studies.steps configs/demo.yaml   # after `make pair`

For fixed trees at temperature 1: operators and readings of a step, counted; then held-out prompts decoded by the eager
decoder, by the static one, and by the static one with compiled passes, in turn on each prompt and in another order on
each: tokens per second as a ratio to the eager decoder, with 95% intervals over source files. Compiling (a minute or
two, with g++) is not in the times.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from data_gen.decoding.decoder import Decoder, FixedTree
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import Loop
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from pipelines.config import load_config
from pipelines.evaluate.comparison import speed
from pipelines.pair.loading import encode, load_pair, prompts_of
from pipelines.run import console
from pipelines.statistics import source_weights
from pipelines.studies.generation import ratio
from selector.actions import Action
from tests.waits import Operators, Readings

PROMPTS, COUNTED = 30, 8
EAGER, STATIC, COMPILED = "eager", "static", "static, compiled"
TREES = (
    (Action(1, 5, 0), "traversal"),
    (Action(2, 2, 4), "traversal"),
    (Action(4, 0, 8), "specinfer"),
    (Action(4, 0, 8), "traversal"),
    (Action(4, 0, 8), "lifted_uniform"),
)


def main(file: str, *overrides: str) -> None:
    config = load_config(Path(file), list(overrides))
    torch.set_num_threads(config.pair.threads or torch.get_num_threads())
    pair = load_pair(config)
    prompts = prompts_of(config, pair, "test", PROMPTS)
    texts = [encode(config, pair, prompt) for prompt in prompts]
    sources = sorted({prompt.source for prompt in prompts})
    weights = source_weights(len(sources), config.evaluate.bootstrap, config.seed)
    length = max(map(len, texts)) + config.evaluate.tokens
    table = Table("tree, verifier", "decoder", "operators a step", "readings a step", "tokens/s over eager")
    for action, verifier in TREES:
        rows: dict[str, list[dict[str, Any]]] = {EAGER: [], STATIC: [], COMPILED: []}
        made = decoders(pair, action, verifier, length)
        counts = {name: counted(decoder, texts[0]) for name, decoder in made.items() if name != COMPILED}
        for decoder in made.values():
            decoder.decode(texts[0], config.evaluate.tokens, torch.Generator().manual_seed(0))  # warms up, compiles
        orders = itertools.cycle(itertools.permutations(made))
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            for name in next(orders):
                generator = torch.Generator(device=pair.device).manual_seed(number)
                begin = time.perf_counter()
                tokens = made[name].decode(text, config.evaluate.tokens, generator).tokens
                seconds = time.perf_counter() - begin
                rows[name].append({"source": prompt.source, "seconds": seconds, "tokens": len(tokens)})
        speeds = {name: speed(own, sources, weights) for name, own in rows.items()}
        for name in made:
            operators, readings = counts.get(name, ("", "1"))
            faster = "" if name == EAGER else ratio(speeds[name] / speeds[EAGER])
            table.add_row(f"{action}, {verifier}", name, operators, readings, faster)
    console.print(table)


def decoders(pair: ModelPair, action: Action, verifier: str, length: int) -> dict[str, Loop]:
    """The three that are compared, for texts of `length` tokens."""
    arguments = pair, Sampling(1.0), get_verifier(verifier), FixedTree(action)
    return {
        EAGER: Decoder(*arguments),
        STATIC: GraphDecoder(*arguments, length),
        COMPILED: GraphDecoder(*arguments, length, compiled=True),
    }


def counted(decoder: Loop, prompt: list[int]) -> tuple[str, str]:
    """Operators and readings of a step, means over some steps after the first."""
    steps: Iterator[Any] = decoder.steps(prompt, torch.Generator(device=decoder.pair.device).manual_seed(0))
    next(steps)
    with Readings() as readings, Operators() as operators:
        for _ in range(COUNTED):
            next(steps)
    return f"{operators.calls / COUNTED:.0f}", f"{(readings.count + operators.reads) / COUNTED:.0f}"


if __name__ == "__main__":
    main(*sys.argv[1:])
