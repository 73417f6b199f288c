"""What a selector could gain at most: choices by the expected labels of every root instead of a network's estimates.

    .venv/bin/espalier data --config configs/demo.yaml     # and the stages before it
    .venv/bin/python -m pipelines.studies.ceiling configs/demo.yaml [section.key=value ..]

At every root of some held-out texts the target writes `ROLLOUTS` continuations; the recorded one is none of them. The
mean of their labels is all that a choice can know before anything is drafted. The choices cost no time, and the price
of time is the best one on these texts. Each choice looks one step ahead, as a selector's does. Beside it stands what
the best choice for the recorded text itself would have gained (*hindsight*), which nobody can know.

Legend: B rollouts, D depths, R roots, S survivals, A actions, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from data_gen.features.recorded import foretold
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import TextLabeller
from data_gen.texts.recorded import read_rows, texts_of
from data_gen.texts.written import seed_of
from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import load_pair
from pipelines.run import console
from pipelines.train.judging import by_setting, statics, tune_rules
from selector.actions import ActionSpace
from selector.train.data import Timed
from selector.train.replay import fastest_possible, ratio_of_speeds, replay
from selector.train.tuning import SPEEDS, replay_mode

ROLLOUTS, TEXTS = 24, 8
SPACE = ActionSpace.recorded()
DEPTH = SPACE.depth
HEADS = "setting | texts | roots | lookup rule over the best static tree | expected labels over the rule | hindsight"


class Rollouts(NamedTuple):
    """A root token and its continuations, int64 [B, D + 1]; both models' rows, and the draft's logits, [B, D, V]."""

    texts_BD: Tensor
    target_BDV: Tensor
    draft_BDV: Tensor
    draft_logits_BDV: Tensor


def continuations(
    pair: ModelPair, tokens: Sequence[int], caches: list[DynamicCache], sampling: Sampling, rollouts: int
) -> Rollouts:
    """Continuations of a text by `DEPTH` tokens, or a single one where none is drawn by chance.

    Args:
        tokens: up to the root token.
        caches: of target and draft, with rows for all tokens but the last.
    """
    rollouts, known = rollouts if sampling.temperature > 0 else 1, len(tokens) - 1
    target, draft = (_widened(cache, known, rollouts) for cache in caches)
    texts_BD, rows = torch.full((rollouts, 1), tokens[-1], device=pair.device), []
    for n in range(DEPTH):
        rows.append(sampling.probabilities(_logits(pair.target, texts_BD[:, -1:], target, known + n)[:, 0]))
        texts_BD = torch.cat([texts_BD, torch.multinomial(rows[-1], 1)], dim=1)
    logits_BDV = _logits(pair.draft, texts_BD[:, :-1], draft, known)
    return Rollouts(texts_BD, torch.stack(rows, dim=1), sampling.draft.probabilities(logits_BDV), logits_BDV)


def _logits(model: PreTrainedModel, tokens_BW: Tensor, cache: DynamicCache, first: int) -> Tensor:
    """Logits after tokens whose positions count from `first`, [B, W, V]."""
    positions_BW = torch.arange(first, first + tokens_BW.shape[1], device=tokens_BW.device).expand_as(tokens_BW)
    logits_BWV: Tensor = model(tokens_BW, past_key_values=cache, position_ids=positions_BW, use_cache=True).logits
    return logits_BWV


def _widened(cache: DynamicCache, rows: int, rollouts: int) -> DynamicCache:
    """The first rows of a cache of one text, for several texts."""
    wide = DynamicCache()
    layers: list[Any] = cache.layers
    for number, layer in enumerate(layers):
        keys, values = (each[:, :, :rows].expand(rollouts, -1, -1, -1) for each in (layer.keys, layer.values))
        wide.update(keys, values, number)
    return wide


def expected(rollouts: Rollouts, verifier: str, siblings: int) -> Tensor:
    """Mean survivals of the trees at the root of some continuations, [S].

    The continuations are labelled as one text. Uniform rows stand between them, on which no label at a root depends.
    """
    texts_BD, *rows = rollouts
    between_B1V = torch.full_like(rows[0][:, :1], 1 / rows[0].shape[-1])
    generator = torch.Generator().manual_seed(seed_of(texts_BD.tolist()))
    labeller = TextLabeller(texts_BD.flatten(), (verifier,), siblings, generator, SPACE)
    labeller.add(*(torch.cat([rows_BDV, between_B1V], dim=1).flatten(0, 1) for rows_BDV in rows))
    return labeller.survivals()[0, :: texts_BD.shape[1]].mean(0)


@torch.inference_mode()
def expected_along(
    pair: ModelPair, row: pa.Table, sampling: Sampling, config: Config, numbers: Iterable[int], rollouts: int
) -> tuple[Tensor, Tensor]:
    """At some roots of a recorded text, by number: mean survivals of the trees [R, S], and of a lookup [R, D], over
    continuations."""
    tokens, start = (row[name][0].as_py() for name in ("tokens", "start"))
    caches = [DynamicCache(), DynamicCache()]
    for model, cache in zip((pair.target, pair.draft), caches, strict=True):
        _logits(model, torch.tensor([tokens], device=pair.device), cache, 0)
    torch.manual_seed(seed_of(config.seed, "rollouts", *tokens))
    trees, copies = [], []
    for root in (start + number for number in numbers):
        own = continuations(pair, tokens[: root + 1], caches, sampling, rollouts)
        trees.append(expected(own, config.train.verifier, config.data.siblings))
        right_B = [foretold([*tokens[:root], *text], root, 1, DEPTH) for text in own.texts_BD.tolist()]
        copies.append((torch.cat(right_B)[:, None] > torch.arange(DEPTH)).double().mean(0))
    return torch.stack(trees), torch.stack(copies)


def row_of(pair: ModelPair, table: pa.Table, timed: Timed, base: Any, rule: Any, config: Config) -> list[str]:
    """A line of the study's table."""
    sampling = Sampling(base.temperature, base.top_p, base.draft_temperature, base.top_k, base.min_p)
    each = [
        expected_along(pair, table.slice(at, 1), sampling, config, range(roots), ROLLOUTS)
        for at, roots in track(list(enumerate(table["roots"].to_pylist())), str(sampling), console=console)
    ]
    trees_RS, copies_RD = (torch.cat(part) for part in zip(*each, strict=True))
    trees_RS = trees_RS[:, : timed.space.tree_survivals]
    tokens_RA = timed.space.efficiencies(torch.cat([trees_RS, copies_RD], dim=-1))
    # a choice costs no time, and plain steps are those between steps that draft, as for the rule
    seconds_RA = replace(timed, profile=replace(timed.profile, plain=0.0)).seconds()
    size_X, sources = timed.texts.size_X, timed.texts.source_number_X
    static, own_rule = (replay_mode(timed, {}, mode) for mode in (base, rule))
    best, price = own_rule, own_rule.speed
    for factor in SPEEDS:
        action_R = (tokens_RA - factor * price * seconds_RA).argmax(-1)
        chosen_R = seconds_RA.gather(-1, action_R.unsqueeze(-1))[:, 0]
        found = replay(timed.survivals_RS, action_R, chosen_R, size_X, timed.space)
        best = max(best, found, key=lambda replayed: replayed.speed)
    hindsight = fastest_possible(timed.survivals_RS, seconds_RA, size_X, timed.space)
    ratios = (ratio_of_speeds(a, b, sources) for a, b in ((own_rule, static), (best, own_rule), (hindsight, own_rule)))
    return [str(sampling), str(table.num_rows), str(int(size_X.sum())), *map(str, ratios)]


def main(config: Config) -> None:
    pair = load_pair(config)
    profile = load_profile(config, pair)
    train = by_setting(config, load_traces(config, profile.pair)["train"], profile)
    bases, verifier = statics(config, train), config.train.verifier
    rules = tune_rules(train, {verifier: bases})
    table = read_rows(traces_folder(config), "test")
    console.print(f"\n| {HEADS} |\n{'|---' * 6}|", soft_wrap=True, highlight=False)
    for base, rule in zip(bases, rules, strict=True):
        mine = [
            pc.equal(table[name], value) for name, value in zip(("temperature", "top_p"), base.setting, strict=True)
        ]
        some = table.filter(pc.and_(*mine)).slice(0, TEXTS)
        timed = Timed(texts_of(some, (verifier,)), verifier, profile)
        line = row_of(pair, some, timed, base, rule[verifier], config)
        console.print(f"| {' | '.join(line)} |", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[2:]))
