"""Every method replayed along the texts that it decoded: this removes the variance between texts.

Given a text, replay predicts the number of steps and, by the latency profile, their time. If the steps yield more or
fewer tokens than the labels of their roots say, beyond chance, the decoder or the labels are wrong. If the time of a
step differs, the latency profile is wrong, or the machine has changed since. Only steps up to a text's last root with a
whole look-ahead are counted.

Legend: X prompts, N decoded steps, R roots, S survivals.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch
from torch import Tensor

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.given import GivenText
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt
from data_gen.texts.recorded import texts_of
from pipelines.config import Config
from pipelines.data.recorded import against_labels, z_of
from pipelines.evaluate.methods import BEST_STATIC, Method
from pipelines.evaluate.replays import Contenders, Rows
from pipelines.pair.loading import encode, recipe
from pipelines.run import console, watched
from selector.latency import LatencyProfile
from selector.schema import InputError
from selector.train.replay import Ratio, jackknifed


class Account(NamedTuple):
    """One prompt's decoding, and the replay along the same text."""

    steps: float = 0.0
    seconds: float = 0.0
    replayed_steps: float = 0.0
    replayed_seconds: float = 0.0
    steps_N3: Tensor = torch.zeros(0, 3)  # as `against_labels` returns them


def own_texts(
    config: Config,
    pair: ModelPair,
    prompts: Sequence[Prompt],
    contenders: Contenders,
    rows: Rows,
    profile: LatencyProfile,
) -> Rows:
    """Decoding against replay, for each setting and method that can be replayed.

    Args:
        rows: of the journal.

    Returns:
        rows with the numbers of steps decoded and replayed; `z`, by how many standard deviations the steps' tokens fall
        short of what the labels of their roots say, as `z_of`; and `step_time`, the time of a decoded step over that
        of a replayed one, divided by the best static tree's same ratio: 1.05 if a step takes 5% longer than the profile
        predicts and that tree's takes as long as predicted.
    """
    result: Rows = []
    names = sorted({prompt.source for prompt in prompts})
    sources = torch.tensor([names.index(prompt.source) for prompt in prompts])
    for setting in watched(config.sampling, "replaying the decoded texts"):
        key = setting.temperature, setting.top_p
        accounts: dict[str, list[Account]] = {}
        known: dict[Hashable, list[Account]] = {}  # by identity: several methods may decode alike
        for method in [method for method in contenders[key] if isinstance(method, Method)]:
            place = method.name, *key
            own = {row["prompt"]: row for row in rows if (row["method"], row["temperature"], row["top_p"]) == place}
            try:
                if method.identity not in known:
                    known[method.identity] = _accounts(config, pair, setting.build(), prompts, method, own, profile)
                accounts[method.name] = known[method.identity]
            except InputError as error:  # the decoded prompts must not be lost
                console.print(f"{setting.build()}, {method.name}: {error}: not compared with replay", soft_wrap=True)
        for name, own_X in accounts.items():
            if not all(any(each.steps for each in accounts.get(of, ())) for of in (name, BEST_STATIC)):
                continue  # all texts are too short
            result.append(
                {
                    "temperature": key[0],
                    "top_p": key[1],
                    "method": name,
                    "steps": int(sum(each.steps for each in own_X)),
                    "replayed_steps": sum(each.replayed_steps for each in own_X),
                    "z": -z_of(torch.cat([each.steps_N3 for each in own_X])),
                    "step_time": asdict(_relative(own_X, accounts[BEST_STATIC], sources)),
                }
            )
    return result


def _accounts(
    config: Config,
    pair: ModelPair,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    method: Method,
    by_id: dict[str, dict[str, Any]],
    profile: LatencyProfile,
) -> list[Account]:
    """One account for every prompt; zeros where its text ends before the look-ahead of its second root."""
    given = tuple(
        GivenText(prompt, encode(config, pair, prompt), by_id[prompt.id]["text"], sampling, f"prompt {prompt.id}")
        for prompt in prompts
    )
    own = recipe(config)
    hidden = own.hidden and method.network is not None
    own = replace(own, verifiers=(method.verifier,), hidden=hidden, branches=method.branches)
    table = make_shard(pair, own, Work("test", sampling, (), given=given)).table
    table = table.filter(pc.greater(table["roots"], 1))
    found: dict[str, Account] = {}
    if table.num_rows > 0:
        texts = texts_of(table, (method.verifier,))
        space = texts.space
        position = {str(action): number for number, action in enumerate(space)}
        replayed = method.replay(texts, profile)
        columns = (column_X.tolist() for column_X in (texts.size_X, replayed.steps_X, replayed.seconds_X))
        for x, (name, roots, steps, seconds) in enumerate(zip(texts.prompt_X, *columns, strict=True)):
            decoded = by_id[name]
            root_N = torch.tensor([*decoded["step_roots"], decoded["block_tokens"]])
            count = int((root_N[:-1] < roots).sum())
            action_N = torch.tensor([position[action] for action in decoded["drafted"][:count]])
            labels_RS = texts.labels(method.verifier, texts.text_R == x, space)
            steps_N3 = against_labels(labels_RS[root_N[:count]], action_N, root_N.diff()[:count], space)
            found[name] = Account(count, sum(decoded["seconds_of_steps"][:count]), steps, seconds, steps_N3)
    return [found.get(prompt.id, Account()) for prompt in prompts]


def _relative(mine_X: list[Account], other_X: list[Account], sources: Tensor) -> Ratio:
    """`step_time` of a method against another, on the prompts whose texts are long enough with both."""
    both = torch.tensor([(*mine[:4], *other[:4]) for mine, other in zip(mine_X, other_X, strict=True)])
    kept = (both[:, 0] > 0) & (both[:, 4] > 0)
    if not kept.any():
        return Ratio(1.0, math.inf)
    return jackknifed(both[kept], sources[kept], _step_times)


def _step_times(sums_8: Tensor) -> Tensor:
    """The ratio of two methods' `step_time`, from sums of their accounts."""
    steps, seconds, replayed_steps, replayed_seconds = sums_8.unflatten(-1, (2, 4)).unbind(-1)
    mine, other = ((seconds / steps) / (replayed_seconds / replayed_steps)).unbind(-1)
    return mine / other
