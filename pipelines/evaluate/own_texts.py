"""Every method replayed along the very texts that it has decoded, so that no luck of the texts is left.

Whatever a lossless method drafts, its texts follow the target's law. So replay holds for them as for any others: given
the text, it says how many steps the method needs on average, and how long these take by the latency profile. Decoding
may differ from that in two ways. Another number of steps, by more than chance, would be a mistake in the decoder or in
the labels. Another time of a step is a mistake of the latency profile, or the machine has changed since; it shows which
methods a comparison by replay flatters.

A text counts up to its last root that has the whole look-ahead; the steps that begin beyond it do not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.given import GivenText
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt
from pipelines.config import Config
from pipelines.evaluate.methods import BEST_STATIC, COPYING, Method, Selecting
from pipelines.pair.loading import encode, recipe
from pipelines.run import console
from selector.latency import LatencyProfile
from selector.schema import InputError
from selector.train.data import Setting, to_texts
from selector.train.replay import Ratio, jackknifed

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
    """For each setting and method that can be replayed: steps decoded and replayed, and `z`, their difference over its
    standard deviation; `step_time`, the time of a decoded step over that of a replayed one, relative to the best static
    tree, and `over_rule`, relative to the rule for lookups: 1.05 where a step takes 5% longer, beside theirs, than the
    profile says.

    Args:
        rows: of the journal.
    """
    result: Rows = []
    names = sorted({prompt.source for prompt in prompts})
    sources = torch.tensor([names.index(prompt.source) for prompt in prompts])
    for setting in config.sampling:
        key = setting.temperature, setting.top_p
        accounts: dict[str, list[Account]] = {}
        known: dict[Hashable, list[Account]] = {}  # by what a method does: several names may stand for the same
        for method in contenders[key]:
            own = [row for row in rows if (row["method"], row["temperature"], row["top_p"]) == (method.name, *key)]
            if not own[0]["text"]:
                continue
            try:
                if method.identity not in known:
                    known[method.identity] = _accounts(config, pair, setting.build(), prompts, method, own, profile)
                accounts[method.name] = known[method.identity]
            except InputError as error:  # what was decoded is not to be lost
                console.print(f"{setting.build()}, {method.name}: {error}: not compared with replay", soft_wrap=True)
        for name, own_X in accounts.items():
            if not all(sum(each.steps for each in accounts.get(of, ())) for of in (name, BEST_STATIC, COPYING)):
                continue  # all its texts are too short
            decoded, replayed = (sum(column) for column in list(zip(*own_X, strict=True))[::2])
            result.append(
                {
                    **{"temperature": key[0], "top_p": key[1], "method": name},
                    **{"steps": int(decoded), "replayed_steps": replayed, "z": _z(own_X)},
                    "step_time": asdict(_relative(own_X, accounts[BEST_STATIC], sources)),
                    "over_rule": asdict(_relative(own_X, accounts[COPYING], sources)),
                }
            )
    return result


def _accounts(
    config: Config,
    pair: ModelPair,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    method: Method,
    rows: Rows,
    profile: LatencyProfile,
) -> list[Account]:
    """One for every prompt; nothing but zeros where its text ends before the look-ahead of its second root: nothing is
    decided in it."""
    by_id = {row["prompt"]: row for row in rows}
    given = tuple(
        GivenText(prompt, encode(config, pair, prompt), by_id[prompt.id]["text"], sampling, f"prompt {prompt.id}")
        for prompt in prompts
    )
    own = recipe(config)
    own = replace(own, verifiers=method.verifiers, hidden=own.hidden and isinstance(method, Selecting))
    table = make_shard(pair, own, Work("test", sampling, (), given=given)).table
    table = table.filter(pc.greater(table["roots"], 1))
    found: dict[str, Account] = {}
    if table.num_rows > 0:
        texts = to_texts(table, method.verifiers)
        replayed = method.replay(texts, profile)
        assert replayed is not None
        for name, roots, *expected in zip(
            texts.prompt_X, texts.size_X.tolist(), replayed.steps_X.tolist(), replayed.seconds_X.tolist(), strict=True
        ):
            steps = zip(by_id[name]["step_roots"], by_id[name]["seconds_of_steps"], strict=True)
            counted = [seconds for root, seconds in steps if root < roots]
            found[name] = Account(len(counted), sum(counted), *expected)
    return [found.get(prompt.id, Account()) for prompt in prompts]


def _relative(mine_X: list[Account], other_X: list[Account], sources: torch.Tensor) -> Ratio:
    """Decoded over replayed time of a method's steps, over that of another's; prompts count whose texts are long enough
    with both."""
    both = [(mine, other) for mine, other in zip(mine_X, other_X, strict=True) if mine.steps and other.steps]
    if not both:
        return Ratio(1.0, math.inf)
    kept = torch.tensor([mine.steps > 0 and other.steps > 0 for mine, other in zip(mine_X, other_X, strict=True)])
    return jackknifed(torch.tensor([(*mine, *other) for mine, other in both]), sources[kept], _step_times)


def _step_times(sums_8: torch.Tensor) -> torch.Tensor:
    """From sums of two accounts."""
    steps, seconds, replayed_steps, replayed_seconds = sums_8[..., :4].unbind(-1)
    time = (seconds / steps) / (replayed_seconds / replayed_steps)
    return time if sums_8.shape[-1] == 4 else time / _step_times(sums_8[..., 4:])


def _z(own_X: list[Account]) -> float:
    """Decoded less replayed steps over its standard deviation, which the differences by prompt show: given the texts,
    their steps are independent."""
    excess = [account.steps - account.replayed_steps for account in own_X]
    scale = math.hypot(*excess)
    return sum(excess) / scale if scale > 0 else 0.0
