"""Stage `quick`: whether speculation pays on this machine, with which verifier and tree, and whether a selector does.

It measures a coarse latency profile and labels some texts that the target writes. Replay then gives the speed of every
static tree on these texts. The fastest tree is chosen on one half of the texts and judged on the other.

Legend: X texts, R roots of all texts, S survivals, A actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.table import Column, Table
from torch import Tensor

from data_gen import timing
from data_gen.models.pair import ModelPair
from data_gen.texts.labelled import Work, make_shard
from data_gen.verification import VERIFIERS as REGISTERED
from data_gen.verification import get_verifier
from data_gen.verification.one_path import FirstPath
from pipelines.config import Config
from pipelines.latency.profile import NODES, WIDTHS, decision_seconds
from pipelines.pair.loading import encode, load_pair, prompts_of, recipe
from pipelines.quick.texts import survivals, texts_of
from pipelines.run import console, progress
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import potential_table
from selector.actions import EMPTY, Action, ActionSpace
from selector.latency import LatencyProfile
from selector.schema import LIGHT, InputError
from selector.train.data import Setting, Timed, to_texts
from selector.train.potential import Potential, potential
from selector.train.replay import lawful
from selector.train.tuning import StaticTable

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "quick")

REPEATS = 4
SHOWN = 5
SELECTOR_TEXTS = 3  # times as many texts as for the static trees, for a model is fitted on half of them
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # assumed where the pair has no weights
VERIFIERS = tuple(name for name in REGISTERED if name not in ("khisti", "greedy_block"))  # those that have labels
SPACE = ActionSpace.default()


class Candidate(NamedTuple):
    """A verifier with its best tree."""

    verifier: str
    action: Action
    promise: float  # tokens per second on the texts on which the tree was chosen
    speed: float  # tokens per second on the others
    efficiency: float  # tokens per step on the others


def plan(config: Config) -> list[str]:
    return [f"{config.quick.texts} texts of {config.data.tokens} tokens, {len(VERIFIERS)} verifiers"]


def run(config: Config) -> None:
    """Print the best verifiers and trees, and the verdict; for a pair without weights, the table of `assumed`."""
    pair = load_pair(config, shapes=True)
    verifiers, setting = VERIFIERS, config.sampling[0]
    with mlflow_run(config, "quick", SECTIONS) as mlflow, progress() as bar:
        task = bar.add_task("timing and labelling", total=REPEATS + config.quick.texts, note="")
        profile = _profile(config, pair, lambda: bar.advance(task))
        if pair.has_random_weights:
            console.print(assumed(profile, verifiers[0]))
            return
        survivals_VRS, size_X = _labels(config, pair, lambda: bar.advance(task))
        seconds = [profile.table(SPACE.actions, verifier, filtered=setting.top_p < 1)[1][0] for verifier in verifiers]
        found = [best_tree(*each, size_X) for each in zip(verifiers, survivals_VRS, seconds, strict=True)]
        plain = 1 / min(float(seconds_A[SPACE.index(EMPTY)]) for seconds_A in seconds)
        for candidate in found:
            mlflow.log_metric(f"speed over plain decoding/{candidate.verifier}", candidate.speed / plain)
        found.sort(key=lambda candidate: candidate.promise, reverse=True)
        describe(mlflow, _verdict(found[0], plain))
    rows = [
        [each.verifier, str(tuple(each.action)), f"{each.efficiency:.2f}", f"{each.speed / plain:.2f}"]
        for each in found[:SHOWN]
    ]
    title = f"{setting.build()}, {profile.device}; {len(size_X)} texts"
    console.print(_table(title, ["verifier", "best tree"], rows))
    console.print(f"quick: {_verdict(found[0], plain)}")
    console.print(potential_table(_potential(config, pair, profile, found[0].verifier)))


def assumed(profile: LatencyProfile, verifier: str) -> Table:
    """For some acceptance probabilities the chain with the most tokens per second, and its speed over plain decoding.

    A chain of L tokens, each accepted with probability a if those before it are, yields `1 + a + .. + a^L` tokens.
    """
    length = profile.target.lengths[-1]
    plain = 1 / profile.action_seconds(EMPTY, length, verifier)
    rows = []
    for acceptance in ACCEPTANCES:
        chains = [(plain, 1.0, 0)]
        for drafted in range(1, SPACE.depth + 1):
            tokens = chains[-1][1] + acceptance**drafted
            seconds = profile.action_seconds(SPACE.chain(drafted), length, verifier)
            chains.append((tokens / seconds, tokens, drafted))
        speed, tokens, drafted = max(chains)
        rows.append([f"{acceptance:g}", str(drafted), f"{tokens:.2f}", f"{speed / plain:.2f}"])
    title = f"{profile.device}, random weights: times are real, acceptance is assumed"
    return _table(title, ["acceptance", "best chain"], rows)


def _potential(config: Config, pair: ModelPair, profile: LatencyProfile, verifier: str) -> dict[Setting, Potential]:
    """What a selector gains for one verifier under the first sampling setting, fitted on the texts of every other
    source."""
    setting = config.sampling[0].build()
    prompts = prompts_of(config, pair, "validation")[: SELECTOR_TEXTS * config.quick.texts]
    own = replace(recipe(config), verifiers=(verifier,), hidden=False)
    size = config.data.texts_per_shard
    parts = [tuple((prompt, 0) for prompt in prompts[n : n + size]) for n in range(0, len(prompts), size)]
    table = pa.concat_tables([make_shard(pair, own, Work("validation", setting, part)).table for part in parts])
    first = encode(config, pair, prompts[0])
    profile = replace(profile, decide={LIGHT: 0.0})
    profile = replace(profile, decide={LIGHT: decision_seconds(config, pair, profile, verifier, LIGHT, first)})
    texts = to_texts(table.filter(pc.greater(table["roots"], 0)), (verifier,))
    number_X = texts.source_number_X
    fitted_on, judged_on = (
        Timed(texts.take((number_X % 2 == parity).nonzero()[:, 0]), verifier, profile) for parity in (0, 1)
    )
    return {texts.settings[0]: potential(fitted_on, judged_on)}


def _profile(config: Config, pair: ModelPair, tick: Callable[[], None]) -> LatencyProfile:
    """A coarse profile at a single context length, half-way through the texts."""
    name = timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    lengths = (config.prompts.tokens + config.data.tokens // 2,)
    grid = timing.Grid(lengths, WIDTHS, NODES, REPEATS)
    return timing.measure(pair, grid, VERIFIERS, name, tick)


def _labels(config: Config, pair: ModelPair, tick: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """Survivals of all texts [verifier, R, S], and the number of roots of each text [X].

    Raises:
        InputError: there are fewer than two texts, one to choose on and one to judge on.
    """
    sampling, names, labels = config.sampling[0].build(), VERIFIERS, []
    texts = (survivals(pair, text, sampling, names, rng) for _, text, rng in texts_of(config, pair, sampling))
    for survivals_VRS in islice((each for each in texts if each is not None), config.quick.texts):
        labels.append(survivals_VRS)
        tick()
    if len(labels) < 2:
        raise InputError(f"quick: all texts but {len(labels)} end within {SPACE.depth} tokens: two are needed")
    return torch.cat(labels, dim=1), torch.tensor([each.shape[1] for each in labels])


def best_tree(verifier: str, survivals_RS: Tensor, seconds_A: Tensor, size_X: Tensor) -> Candidate:
    """The fastest static tree on every other text, judged on the texts between them."""
    seconds_RA = seconds_A.expand(len(survivals_RS), -1)
    table = StaticTable.of_labels(lawful(survivals_RS, SPACE), seconds_RA, size_X, SPACE, range(len(SPACE)))
    promise_A = table.speeds(slice(None, None, 2))
    if isinstance(get_verifier(verifier), FirstPath):  # it never accepts the other branches
        promise_A = promise_A * torch.tensor([action.K == 1 for action in SPACE.trees])
    best = int(promise_A.argmax())
    tokens, seconds, steps = (float(each_XA[1::2, best].sum()) for each_XA in table)
    return Candidate(verifier, SPACE.trees[best], float(promise_A[best]), tokens / seconds, tokens / steps)


def _table(title: str, first: list[str], rows: list[list[str]]) -> Table:
    numbers = (Column(name, justify="right") for name in ("block eff.", "predicted x autoregressive"))
    table = Table(*first, *numbers, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _verdict(best: Candidate, plain: float) -> str:
    if best.action == EMPTY or best.speed <= plain:
        return "speculation does not pay here: decode without a draft"
    return f"speculation pays: {best.speed / plain:.2f}x with {best.verifier} on {tuple(best.action)}"
