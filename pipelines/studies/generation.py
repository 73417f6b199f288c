"""Compares transformers' `generate()` with the exported selector to plain and assisted generation, after `make demo`.

    .venv/bin/python -m pipelines.studies.generation configs/demo.yaml

Every method continues every held-out prompt, in random order. Intervals are of 95%, over source files.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from data_gen.generate import speculative_generate
from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling
from pipelines.config import load_config
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
    pair, selector, limit = load_pair(config), load_selector(config.folder / "selector"), config.evaluate.tokens
    prompts = prompts_of(config, pair, "test", PROMPTS)
    texts = [encode(config, pair, prompt) for prompt in prompts]
    sources = sorted({prompt.source for prompt in prompts})
    weights = source_weights(len(sources), config.seed)
    methods: dict[str, dict[str, Any]] = {
        PLAIN: {},
        ASSISTED: {"assistant_model": pair.draft},
        OURS: {"custom_generate": speculative_generate, "draft_model": pair.draft, "selector": selector},
    }
    table = Table("setting", *(f"{name}, tokens/s over plain" for name in (ASSISTED, OURS)), "same text")
    for sampling in (setting.build() for setting in config.sampling):
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
        equal = 0
        for arguments in methods.values():  # the first call of a method is slower
            generated(pair, sampling, texts[0], limit, 0, arguments)
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            new = {}
            for name, arguments in random.Random(number).sample(list(methods.items()), len(methods)):
                begin = time.perf_counter()
                new[name] = generated(pair, sampling, text, limit, number, arguments)
                seconds = time.perf_counter() - begin
                rows[name].append({"source": prompt.source, "seconds": seconds, "tokens": len(new[name])})
            equal += new[OURS] == new[PLAIN]
        speeds = {name: speed(own, sources, weights) for name, own in rows.items()}
        ratios = [speeds[name] / speeds[PLAIN] for name in (ASSISTED, OURS)]
        cells = ["{:.2f} [{:.2f}, {:.2f}]".format(ratio[0], *interval(ratio)) for ratio in ratios]
        table.add_row(str(sampling), *cells, f"{equal} of {len(prompts)}" if sampling.temperature == 0 else "")
    console.print(table)


def generated(
    pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int, arguments: dict[str, Any]
) -> list[int]:
    """The new tokens."""
    inputs = torch.tensor([prompt], device=pair.device)
    torch.manual_seed(seed)
    generate: Any = pair.target.generate
    ends = {"eos_token_id": sorted(pair.eos_ids) or None, "pad_token_id": next(iter(pair.eos_ids), 0)}
    given = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": limit, **ends, **sampling.generation}
    with quiet(), without_own_settings(pair.target, pair.draft):
        return generate(inputs, **given, **arguments)[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])
