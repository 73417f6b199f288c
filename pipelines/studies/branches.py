"""What different branches gain: the best static greedy tree for each K over the best static chain, and other questions.

    .venv/bin/espalier data --config configs/demo.yaml     # and the stages before it
    .venv/bin/python -m pipelines.studies.branches configs/demo.yaml [evaluate.prompts=16]

Trees and chains are chosen on the training texts and replayed on the held-out ones, with this machine's times and with
three synthetic clocks; errors are one standard error over sources. Where the run is trained, its network is tuned on
the validation texts with and without greedy trees. Last, held-out prompts are decoded at the first sampling setting
with the best greedy tree and with the best chain in turn; their times are those of the processor, so that other
programs hardly change the ratio.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree
from data_gen.models.pair import ModelPair
from data_gen.verification import get_verifier
from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces, settings_of
from pipelines.latency.profile import load_profile, profile_path
from pipelines.pair.loading import encode, load_pair, prompts_of
from pipelines.run import console, watched
from pipelines.statistics import with_interval
from pipelines.train.judging import by_setting, statics
from pipelines.train.result import load_module, load_result
from selector.actions import GREEDY, Action, StyledAction, Tree
from selector.decision import Mode
from selector.latency import LatencyProfile, gpu_like
from selector.schema import InputError
from selector.tables import Table
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed, ratio_of_speeds
from selector.train.tuning import StaticTable, decide, static_replay, tune_mode

FOUR = Action(4, 0, 4), Action(4, 2, 4)
HEADS = "clock | setting | chain | K = 2 | K = 3 | K = 4 | best i.i.d. tree | selector: greedy trees over without"


def clocks(config: Config, pair: ModelPair) -> dict[str, LatencyProfile]:
    """This machine's, if it was measured; a CPU's, with a pass of 6.65 ms, a draft pass of 0.95 ms and 0.45 ms for each
    verified token; two on which verified tokens are free, and one on which each takes 1% of a pass."""
    measured = {"this machine": load_profile(config, pair)} if profile_path(config).exists() else {}
    free = {f"draft 1/{n}, verification free": gpu_like(pair.fingerprint, config.verifiers, 1 / n) for n in (5, 20)}
    flat = free["draft 1/20, verification free"]
    one = flat.target.seconds[0][0]
    paid = replace(flat, target=Table([1], [1, 64], [[one, 1.63 * one]]))
    cpu = replace(flat, draft=Table([1], [1], [[0.95e-3]]), target=Table([1], [1, 64], [[6.65e-3, 35e-3]]), step=0.0)
    return {**measured, "a CPU, 0.45 ms a token": cpu, **free, "draft 1/20, 1% a token": paid}


def main(config: Config) -> None:
    pair = load_pair(config)
    splits, module = load_traces(config, pair.fingerprint), _module(config)
    console.print(f"\n| {HEADS} |\n{'|---' * 8}|", soft_wrap=True, highlight=False)
    for name, clock in clocks(config, pair).items():
        timed = {split: by_setting(config, texts, clock) for split, texts in splits.items()}
        for at, base in enumerate(statics(config, timed["train"])):
            own = {split: of_settings[at] for split, of_settings in timed.items()}
            row = [name, f"T = {base.temperature:g}", *static_row(own), _selected(module, own, base) if module else "-"]
            console.print(f"| {' | '.join(row)} |", soft_wrap=True, highlight=False)
    first = next(iter(clocks(config, pair).values()))
    for held_out in by_setting(config, splits["test"], first):
        console.print(f"T = {held_out.setting[0]:g}: {first_tokens(held_out)}", soft_wrap=True, highlight=False)
    if {"specinfer", "traversal"} <= set(config.verifiers):
        verifiers(config, splits["test"], first)
    train = by_setting(config, splits["train"], first)[0]
    decoded(config, pair, best_of(train, GREEDY), best_of(train, None))


def static_row(own: dict[str, Timed]) -> Iterator[str]:
    """The chain, then the best greedy tree for each K and the best i.i.d. one over it."""
    table, source_X = StaticTable.of(own["test"]), own["test"].texts.source_number_X
    chain, space = best_of(own["train"], None), own["test"].space
    yield str(chain)
    for style, Ks in ((GREEDY, (2,)), (GREEDY, (3,)), (GREEDY, (4,)), ("iid", (2, 3, 4))):
        tree = best_of(own["train"], style, Ks)
        mine, other = (table.replayed(space.index(each)) for each in (tree, chain))
        yield f"{ratio_of_speeds(mine, other, source_X)} {tree}"


def verifiers(config: Config, texts: Texts, clock: LatencyProfile) -> None:
    """Print tokens per step of trees with four branches: greedy ones bottom-up over top-down, and over Traversal's."""
    console.print("\n| setting | tree | bottom-up over top-down | over traversal, i.i.d. |\n|---|---|---|---|")
    for setting, shape in product(settings_of(config), FOUR):
        own = texts.setting_of(setting)

        def steps(name: str, tree: Tree) -> Replayed:
            found = static_replay(Timed(own, name, clock), tree)  # noqa: B023
            return replace(found, seconds_X=found.steps_X)

        greedy = StyledAction(*shape, GREEDY)
        mine, source_X = steps("traversal", greedy), own.source_number_X
        over = (ratio_of_speeds(mine, steps(*each), source_X) for each in (("specinfer", greedy), ("traversal", shape)))
        console.print(f"| T = {setting[0]:g} | {greedy} | {' | '.join(map(str, over))} |", highlight=False)


def first_tokens(timed: Timed) -> str:
    """How often drafted first tokens are on the text, and how long a step with one takes."""
    space, seconds_A = timed.space, timed.seconds().mean(0)
    tokens_A = space.efficiencies(timed.survivals_RS).mean(0)
    trees: tuple[Tree, ...] = space.chain(0), space.chain(1), StyledAction(4, 0, 1, GREEDY)
    none, one, four = (space.index(tree) for tree in trees)
    return (
        f"the first drafted token is right at {float(tokens_A[one]) - 1:.0%} of the roots, one of four first tokens at "
        f"{float(tokens_A[four]) - 1:.0%}; a step with one drafted token takes "
        f"{float(seconds_A[one] / seconds_A[none]):.2f} times as long as plain decoding"
    )


def best_of(timed: Timed, style: str | None, Ks: tuple[int, ...] = (2, 3, 4)) -> Tree:
    """The fastest tree of a style with so many branches; the fastest chain for None."""
    trees = timed.space.trees
    asked_A = torch.tensor([tree.K == 1 if style is None else tree.style == style and tree.K in Ks for tree in trees])
    return trees[StaticTable.of(timed).best(allowed_A=asked_A)]


def _module(config: Config) -> SelectorModule | None:
    try:
        result = load_result(config)
    except InputError:
        return None
    return load_module(config, result["chosen"], result)


def _selected(module: SelectorModule, own: dict[str, Timed], base: Mode) -> str:
    """The network tuned with all actions over the same network without greedy trees, on held-out texts."""
    space, replayed = module.space, []
    greedy_A = torch.tensor([getattr(action, "style", None) == GREEDY for action in space])
    for left_out_A in (torch.zeros_like(greedy_A), greedy_A):
        found = {}
        for split in ("validation", "test"):
            texts = own[split].texts
            found[split] = {level: module.scores(texts, level).masked_fill(left_out_A, 0) for level in module.asked}
        mode = tune_mode(own["validation"], found["validation"], base).mode
        replayed.append(decide(own["test"], found["test"], mode).replayed(own["test"]))
    return str(ratio_of_speeds(replayed[0], replayed[1], own["test"].texts.source_number_X))


def decoded(config: Config, pair: ModelPair, tree: Tree, chain: Tree) -> None:
    """Print the ratio of decoding speeds at the first sampling setting."""
    sampling, verifier = config.sampling[0].build(), get_verifier(config.train.verifier)
    prompts, sums = prompts_of(config, pair, "test", config.evaluate.prompts), []
    for number, prompt in enumerate(watched(prompts, "decoding")):
        tokens, figures = encode(config, pair, prompt), {}
        for action in (tree, chain) if number % 2 else (chain, tree):
            decoder, generator = Decoder(pair, sampling, verifier, FixedTree(action)), torch.Generator().manual_seed(1)
            began = time.process_time()
            text = decoder.decode(tokens, config.data.tokens, generator)
            figures[action] = [len(text.tokens), time.process_time() - began]
        sums.append(figures[tree] + figures[chain])
    sources = [prompt.source for prompt in prompts]
    source_X = torch.tensor([sources.index(source) for source in sources])
    value, (low, high) = with_interval(torch.tensor(sums), source_X)
    console.print(
        f"\ndecoded at {sampling}, {len(sums)} prompts of {len(set(sources))} sources: {tree} over {chain}: "
        f"{value:.3f} (95% interval {low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[2:]))
