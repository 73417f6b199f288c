"""transformers' `generate()` with the exported selector, beside plain and assisted generation, prompts interleaved.

    .venv/bin/python -m pipelines.studies.generation configs/demo.yaml   # after `make demo`

Fifty held-out prompts, each method on each of them, in an order of the prompt's own: tokens per second as a ratio to
plain generation, with 95% intervals over source files, and at temperature 0 whether the text is plain generation's.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from data_gen.generate import speculative_generate
from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from pipelines.config import Config, load_config
from pipelines.evaluate.assisted import quiet
from pipelines.evaluate.comparison import speed
from pipelines.pair.loading import encode, load_pair, prompts_of
from pipelines.run import console
from pipelines.statistics import interval, source_weights
from selector.runtime.selector import load_selector

PROMPTS = 50
PLAIN, ASSISTED, OURS = "plain", "assisted", "with the selector"


def main(file: str, *overrides: str) -> None:
    config = load_config(Path(file), list(overrides))
    torch.set_num_threads(config.pair.threads or torch.get_num_threads())
    pair, selector = load_pair(config), load_selector(config.folder / "selector")
    prompts = prompts_of(config, pair, "test", PROMPTS)
    sources = sorted({prompt.source for prompt in prompts})
    weights = source_weights(len(sources), config.evaluate.bootstrap, config.seed)
    methods: dict[str, dict[str, Any]] = {
        PLAIN: {},
        ASSISTED: {"assistant_model": pair.draft},
        OURS: {"custom_generate": speculative_generate, "draft_model": pair.draft, "selector": selector},
    }
    table = Table("setting", *(f"{name}, tokens/s over plain" for name in methods if name != PLAIN), "same text")
    for setting in config.sampling:
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
        equal = 0
        for arguments in methods.values():  # a method's first call is slower, and does not count
            generated(config, pair, setting.build(), encode(config, pair, prompts[0]), 0, arguments)
        for number, prompt in enumerate(prompts):
            texts = {}
            # none always follows the same other one
            for name, arguments in random.Random(number).sample(list(methods.items()), len(methods)):
                begin = time.perf_counter()
                texts[name] = generated(config, pair, setting.build(), encode(config, pair, prompt), number, arguments)
                seconds = time.perf_counter() - begin
                rows[name].append({"source": prompt.source, "seconds": seconds, "tokens": len(texts[name])})
            equal += texts[OURS] == texts[PLAIN]
        speeds = {name: speed(own, sources, weights) for name, own in rows.items()}
        same = f"{equal} of {len(prompts)}" if setting.temperature == 0 else ""
        table.add_row(str(setting.build()), *(ratio(speeds[n] / speeds[PLAIN]) for n in methods if n != PLAIN), same)
    console.print(table)


def generated(
    config: Config, pair: ModelPair, sampling: Sampling, prompt: list[int], seed: int, arguments: dict[str, Any]
) -> list[int]:
    """New tokens."""
    inputs = torch.tensor([prompt])
    torch.manual_seed(seed)
    generate: Any = pair.target.generate
    limits = {"max_new_tokens": config.evaluate.tokens, "eos_token_id": sorted(pair.eos_ids) or None}
    with quiet(), without_own_settings(pair.target, pair.draft):
        output = generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            pad_token_id=next(iter(pair.eos_ids), 0),
            **limits,
            **sampling.generation,
            **arguments,
        )
    return output[0, len(prompt) :].tolist()


def ratio(values: np.ndarray) -> str:
    low, high = interval(values)
    return f"{values[0]:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main(*sys.argv[1:])
