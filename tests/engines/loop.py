"""What the loops with both engines share: prompts, a log with what the draft would have had
accepted, training, and the table.

An `Answer` has the tokens of the prompt and of the text, the seconds of the request, and the
prompt's kind and source.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache

from data_gen.engines.drafter import CachedDrafter
from data_gen.models.checkpoints import load_tokenizer
from data_gen.models.gguf import SMOLLM2, resolved
from data_gen.texts.prompts import Form, Prompt, read_prompts, split_of, take_evenly
from pipelines.evaluate.table import paired
from pipelines.pair.stage import PROMPTS
from pipelines.run import console

# new tokens of an answer, as many in the log as in the comparison; the longest context
TOKENS, CONTEXT = 64, 1024
TUNING, HELD_OUT = 8, 48  # prompts
LONGEST = 8  # tokens of a labelled chain
PLAIN = "no speculation"
# tokens, draft passes
WRONG = [(n, passes) for n in (0, 1, 2, 4, 8, 16) for passes in {0, n} if n < 8 or not passes]


class Answer(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    seconds: float
    kind: str
    source: str
    # drafted and accepted tokens of the steps that drafted, where they are known
    steps: Sequence[Sequence[int]] = ()
    first: float = 0.0  # seconds to the first token, where they are known


def prompts() -> tuple[list[Prompt], list[Prompt]]:
    """For training, and held out: of other sources, as many of each kind."""
    tokenizer = load_tokenizer(resolved(SMOLLM2, "target"), "target")
    fitting, _ = Form(320, "drop", True, None).fit(tokenizer, read_prompts(PROMPTS))
    of = {
        split: [each for each in fitting if split_of(each, 0.0, 0.4) == split]
        for split in ("train", "test")
    }
    return take_evenly(of["train"]), take_evenly(of["test"], HELD_OUT)


@torch.inference_mode()
def chains_along(model: Any, tokens: list[int], first: int) -> list[list[int]]:
    """The most probable `LONGEST` tokens of a model after each beginning of a text, from that of
    `first` tokens on: the next tokens of all chains take one forward pass, in which each sees its
    own beginning and chain."""
    cache, places_T = DynamicCache(), torch.arange(len(tokens))
    newest_R = (
        model(torch.tensor([tokens]), past_key_values=cache).logits[0, first - 1 : -1].argmax(-1)
    )
    found, last_R = [newest_R], places_T[first - 1 : -1]
    seen_RC = places_T <= last_R.unsqueeze(-1)
    for depth in range(1, LONGEST):
        seen_RC = torch.cat([seen_RC, torch.eye(len(last_R), dtype=torch.bool)], dim=-1)
        mask = torch.zeros(seen_RC.shape).masked_fill_(~seen_RC, torch.finfo(torch.float32).min)[
            None, None
        ]
        given = {
            "attention_mask": mask,
            "position_ids": (last_R + depth).unsqueeze(0),
            "past_key_values": cache,
        }
        newest_R = model(newest_R.unsqueeze(0), **given).logits[0].argmax(-1)
        found.append(newest_R)
    return torch.stack(found, dim=1).tolist()


def write_log(path: Path, answers: Sequence[Answer], drafter: CachedDrafter) -> None:
    """A log with the number of the draft's tokens that the text repeats, from each position on. A
    greedy draft's token is accepted with its probability by the target, and that is how often a
    sampled text goes on with it."""
    with path.open("w") as file:
        for own in answers:
            text, start = [*own.prompt, *own.tokens], len(own.prompt)
            accepted = []
            for end, drafted in enumerate(chains_along(drafter.model, text, start), start):
                same = [ours == theirs for ours, theirs in zip(drafted, text[end:], strict=False)]
                accepted.append([*same, False].index(False))
            line: dict[str, Any] = {
                "prompt_token_ids": own.prompt,
                "generated_token_ids": own.tokens,
            }
            line |= {
                "kind": own.kind,
                "source": own.source,
                "drafters": {"draft": {"accepted": accepted}},
            }
            file.write(json.dumps(line) + "\n")


def train(log: Path, timings: Path, name: str, *more: str) -> Path:
    """`espalier logs`; the folder of the selector."""
    words = f"logs {log} --timings {timings} --name {name} latency.stepped=false".split()
    subprocess.run([sys.executable, "-m", "pipelines", *words, *more], check=True)
    return Path("runs", name, "selector").absolute()


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """The content of a JSON file, which is made if there is none."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def row(
    scene: str, method: str, turns: dict[str, list[list[Answer]]], at_once: int, tuned: str
) -> Any:
    """One line of the table: tokens per second of a server that answers so many requests at once;
    that over no speculation and over the tuned n-gram drafter, as geometric means over turns; the
    same of single requests, paired by prompt, each with its 95% interval; the kinds of prompts
    whose requests gain least and most over no speculation; how many texts are those without
    speculation; and how many drafted tokens were accepted, where the engine says so."""
    speeds = {name: [speed_of(turn) for turn in own] for name, own in turns.items()}
    cell = {
        "at once": scene,
        "method": method,
        "tokens/s": f"{at_once * statistics.geometric_mean(speeds[method]):.1f}",
    }
    own, sources = [*chain(*turns[method])], sorted({each.source for each in chain(*turns[method])})
    source_X = torch.tensor([sources.index(each.source) for each in own])
    for rival in (PLAIN, tuned):
        speed_X, other_X = (
            [speed_of([each]) for each in chain(*turns[name])] for name in (method, rival)
        )
        ratio_X1 = torch.tensor([speed_X, other_X], dtype=torch.float64).log().diff(dim=0).neg().T
        ratio_T1 = (
            torch.tensor([speeds[method], speeds[rival]], dtype=torch.float64)
            .log()
            .diff(dim=0)
            .neg()
            .T
        )
        cell[f"over {rival}"] = with_interval(ratio_T1, torch.arange(len(ratio_T1)))
        cell[f"each over {rival}"] = with_interval(ratio_X1, source_X)
        if rival == PLAIN:
            means = pd.Series(ratio_X1[:, 0].numpy()).groupby([each.kind for each in own]).mean()
            ends = (means.idxmin(), means.min()), (means.idxmax(), means.max())
            cell["least and most by kind"] = ", ".join(
                f"{kind} {math.exp(mean):.2f}" for kind, mean in ends
            )
    equal = sum(a.tokens == b.tokens for a, b in zip(own, chain(*turns[PLAIN]), strict=True))
    drafted, accepted = (sum(step[n] for each in own for step in each.steps) for n in (0, 1))
    steps = sum(len(each.tokens) for each in own) - accepted
    return cell | {
        "equal texts": f"{equal} of {len(own)}",
        "accepted": f"{accepted} of {drafted} in {steps} steps",
    }


def speed_of(turn: Sequence[Answer]) -> float:
    """Tokens per second of one request among those of a turn."""
    return sum(len(each.tokens) for each in turn) / sum(each.seconds for each in turn)


def with_interval(ratio_X1: Tensor, group_X: Tensor) -> str:
    value, (low, high) = paired(ratio_X1, group_X)
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def show(cells: Sequence[Any]) -> None:
    console.print(pd.DataFrame(cells).to_string(index=False), soft_wrap=True)
