"""Every method replayed along the very texts that it has decoded, so that no luck of the texts is left.

Whatever a lossless method drafts, its texts follow the target's law. So replay holds for them as for any others: given
the text, it says how many steps the method needs on average, and how long these take by the latency profile. Decoding
may differ from that in two ways. Another number of steps would be a mistake, in the decoder or in the labels. Another
time of a step is the profile's error, and shows which methods a comparison by replay flatters.

A text counts up to its last root that has the whole look-ahead; the steps that begin beyond it do not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch

from data_gen.models import ModelPair
from data_gen.prompts import Prompt
from data_gen.sampling import Sampling
from data_gen.texts import LoggedText
from pipelines.common.prompts import encode
from pipelines.config import Config
from pipelines.data.shards import Work, make_shard
from pipelines.evaluate.methods import BEST_STATIC, COPYING, Method
from selector.data import Setting, Texts, to_texts
from selector.replay import Ratio, jackknifed_ratio
from selector.runtime import LatencyProfile

Rows = list[dict[str, Any]]


class Account(NamedTuple):
    """One decoding of a prompt beside the replay of its method along the same text."""

    steps: float = 0.0
    seconds: float = 0.0
    replayed_steps: float = 0.0
    replayed_seconds: float = 0.0


def own_texts(
    config: Config,
    pair: ModelPair,
    prompts: Sequence[Prompt],
    contenders: dict[Setting, list[Method]],
    rows: Rows,
    profile: LatencyProfile,
) -> Rows:
    """For each setting and method that can be replayed: steps decoded and replayed, and `z` of the difference over
    sources; `step_time`, decoded over replayed time relative to that of the best static tree, and `over_rule`, relative
    to that of the rule for lookups: 1.05 where a step takes 5% longer beside theirs than the profile says.

    Args:
        rows: of the journal.
    """
    result: Rows = []
    sources = torch.tensor([sorted({p.source for p in prompts}).index(prompt.source) for prompt in prompts])
    for setting in config.sampling:
        key = setting.temperature, setting.top_p
        texts: dict[Hashable, tuple[Texts | None, Rows]] = {}  # methods that decode alike have the same ones
        accounts: dict[str, list[Account]] = {}
        for method in contenders[key]:
            own = [row for row in rows if (row["method"], row["temperature"], row["top_p"]) == (method.name, *key)]
            if own[0]["text"]:
                if method.identity not in texts:
                    texts[method.identity] = _labelled(config, pair, setting.build(), prompts, own)
                accounts[method.name] = _accounts(method, *texts[method.identity], prompts, profile)
        for name, own_X in accounts.items():
            if not all(sum(account.replayed_steps for account in accounts[of]) for of in (name, BEST_STATIC, COPYING)):
                continue  # all its texts are too short
            decoded, replayed = (sum(column) for column in list(zip(*own_X, strict=True))[::2])
            result.append(
                {
                    **{"temperature": key[0], "top_p": key[1], "method": name},
                    **{"steps": int(decoded), "replayed_steps": replayed, "z": _z(own_X, sources)},
                    "step_time": asdict(_relative(own_X, accounts[BEST_STATIC], sources)),
                    "over_rule": asdict(_relative(own_X, accounts[COPYING], sources)),
                }
            )
    return result


def _labelled(
    config: Config, pair: ModelPair, sampling: Sampling, prompts: Sequence[Prompt], rows: Rows
) -> tuple[Texts | None, Rows]:
    """The texts of some journal rows with features and labels, and these rows. Those that end before the look-ahead of
    their second root does are left out: nothing is decided in them."""
    by_id = {prompt.id: prompt for prompt in prompts}
    logged = [
        LoggedText(number, by_id[row["prompt"]], encode(config, pair, by_id[row["prompt"]]), row["text"], sampling)
        for number, row in enumerate(rows, 1)
    ]
    own = config.model_copy(update={"data": config.data.model_copy(update={"log": None})})
    table = make_shard(own, pair, Work("test", sampling, (), logged=tuple(logged))).table
    kept = [row for row, roots in zip(rows, table["roots"].to_pylist(), strict=True) if roots > 1]
    return to_texts(table.filter(pc.greater(table["roots"], 1)), config.verifiers) if kept else None, kept


def _accounts(
    method: Method, texts: Texts | None, rows: Rows, prompts: Sequence[Prompt], profile: LatencyProfile
) -> list[Account]:
    """One for every prompt; nothing but zeros where its text holds no root."""
    if texts is None:
        return [Account()] * len(prompts)
    found = {}
    replayed = method.replay(texts, profile)
    assert replayed is not None
    for row, roots, *expected in zip(
        rows, texts.size_X.tolist(), replayed.steps_X.tolist(), replayed.seconds_X.tolist(), strict=True
    ):
        steps = zip(row["step_roots"], row["seconds_of_steps"], strict=True)
        counted = [seconds for root, seconds in steps if root < roots]
        found[row["prompt"]] = Account(len(counted), sum(counted), *expected)
    return [found.get(prompt.id, Account()) for prompt in prompts]


def _relative(mine_X: list[Account], other_X: list[Account], sources: torch.Tensor) -> Ratio:
    """Decoded over replayed time of a method, over that of another."""
    columns = [
        (mine.seconds, mine.replayed_seconds, other.seconds, other.replayed_seconds)
        for mine, other in zip(mine_X, other_X, strict=True)
    ]
    return jackknifed_ratio(torch.tensor(columns, dtype=torch.float64), sources)


def _z(own_X: list[Account], sources: torch.Tensor) -> float:
    """Decoded less replayed steps over its standard deviation, which the differences by source show."""
    excess_X = torch.tensor([account.steps - account.replayed_steps for account in own_X], dtype=torch.float64)
    excess_G = torch.zeros(int(sources.max()) + 1, dtype=torch.float64).index_add_(0, sources, excess_X)
    scale = math.sqrt(float(excess_G.square().sum()))
    return float(excess_G.sum()) / scale if scale > 0 else 0.0
