"""A head against the draft, for one target: the same held-out prompts are decoded with both in turns.

    .venv/bin/espalier train --config configs/demo.yaml     # and the stages before it
    .venv/bin/espalier train --config configs/head.yaml     # likewise
    .venv/bin/python -m pipelines.studies.heads configs/demo.yaml configs/head.yaml [evaluate.prompts=12]

For each sampling setting it prints the tokens per step and the speed over plain decoding of the best static tree and of
the selector, with the draft and with the head; then the head's speed over the draft's, and each selector's over its
best static tree. Times are those of the processor, so that other programs hardly change the ratios. Intervals are those
of `pipelines.statistics`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from data_gen.models.pair import ModelPair
from data_gen.texts.written import seed_of
from pipelines.config import Config, SamplingSetting, load_config
from pipelines.data.recorded import load_traces
from pipelines.evaluate.methods import BEST_STATIC, PLAIN, SELECTOR, Task
from pipelines.evaluate.replays import Contenders
from pipelines.evaluate.stage import wall_methods
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import encode, load_pair, prompts_of
from pipelines.run import console, ticking
from pipelines.statistics import speed, with_interval
from pipelines.train.packaging import build
from pipelines.train.result import load_module, load_result
from selector.schema import InputError

DRAFT, HEAD = "draft", "head"
TITLES = "| drafting | method | tokens a step | speed over plain |"
COMPARED = [(DRAFT, PLAIN), *((drafting, name) for drafting in (DRAFT, HEAD) for name in (BEST_STATIC, SELECTOR))]
RATIOS = [
    *((f"head over draft, {name}", (HEAD, name), (DRAFT, name)) for name in (BEST_STATIC, SELECTOR)),
    *((f"{own}: selector over best static tree", (own, SELECTOR), (own, BEST_STATIC)) for own in (DRAFT, HEAD)),
]
Way = tuple[str, str]  # of drafting, and a method


def main(draft: Config, head: Config) -> None:
    runs = {DRAFT: _loaded(draft), HEAD: _loaded(head)}
    prompts = prompts_of(draft, runs[DRAFT][0], "test", draft.evaluate.prompts)
    sources = [prompt.source for prompt in prompts]
    source_X = torch.tensor([sources.index(source) for source in sources])
    rows: dict[SamplingSetting, dict[Way, list[list[float]]]] = {}
    with ticking("decoding held-out prompts", len(draft.sampling) * len(prompts)) as tick:
        for setting in draft.sampling:
            rows[setting] = {way: [] for way in COMPARED}
            for prompt in prompts:
                seed = seed_of(draft.seed, prompt.id, setting.build(), "heads")
                task = Task(encode(draft, runs[DRAFT][0], prompt), prompt.kind, draft.data.tokens, seed)
                for way in random.Random(seed).sample(COMPARED, len(COMPARED)):
                    rows[setting][way].append(_decoded(*runs[way[0]], way[1], setting, task))
                tick()
    for setting, found in rows.items():
        show(setting, {way: torch.tensor(own) for way, own in found.items()}, source_X)


def _loaded(config: Config) -> tuple[ModelPair, Contenders]:
    """A run's pair and its methods, by sampling setting."""
    pair, result = load_pair(config), load_result(config)
    profile = load_profile(config, pair)
    splits, module = load_traces(config, profile.pair), load_module(config, result["chosen"], result)
    with tempfile.TemporaryDirectory() as temporary:
        selector = build(config, Path(temporary) / "selector", splits)
    return pair, wall_methods(config, profile, splits, result, module, selector)


def _decoded(pair: ModelPair, contenders: Contenders, name: str, setting: SamplingSetting, task: Task) -> list[float]:
    """New tokens, seconds of the processor, tokens that the steps yield, and steps."""
    method = next(each for each in contenders[setting.temperature, setting.top_p] if each.name == name)
    began = time.process_time()
    decoding = method.decode(pair, setting.build(), task)
    return [decoding.tokens, time.process_time() - began, decoding.block_tokens, decoding.steps]


def show(setting: SamplingSetting, found_X4: dict[Way, Tensor], source_X: Tensor) -> None:
    """Print one sampling setting's table and ratios."""
    plain_X2 = found_X4[DRAFT, PLAIN][:, :2]
    console.print(f"\nT = {setting.temperature:g}\n\n{TITLES}\n|---|---|---|---|")
    for (drafting, name), own_X4 in found_X4.items():
        efficiency = _cell(*with_interval(own_X4[:, 2:], source_X, speed))
        faster = _cell(*with_interval(torch.cat([own_X4[:, :2], plain_X2], dim=-1), source_X))
        console.print(f"| {drafting} | {name} | {efficiency} | {faster} |", soft_wrap=True, highlight=False)
    for words, mine, other in RATIOS:
        sums_X4 = torch.cat([found_X4[mine][:, :2], found_X4[other][:, :2]], dim=-1)
        console.print(f"{words}: {_cell(*with_interval(sums_X4, source_X))}", soft_wrap=True, highlight=False)


def _cell(value: float, bounds: list[float]) -> str:
    return f"{value:.2f} [{bounds[0]:.2f}, {bounds[1]:.2f}]"


if __name__ == "__main__":
    try:
        main(*(load_config(Path(path), sys.argv[3:]) for path in sys.argv[1:3]))
    except InputError as error:
        sys.exit(str(error))
