"""What the loops with both engines share: prompts, a log with what the draft would have had
accepted, training, and the table.

Legend: R positions of a text, T its tokens, C cached tokens, X ratios.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from transformers import DynamicCache

from data_gen.engines.drafter import CachedDrafter
from data_gen.models.checkpoints import load_tokenizer
from data_gen.models.gguf import SMOLLM2, resolved
from data_gen.texts.prompts import Form, Prompt, read_prompts, split_of, take_evenly
from pipelines.evaluate.table import paired
from pipelines.pair.stage import PROMPTS
from pipelines.terminal import console
from selector.files import atomically
from selector.schema import TEXT

TOKENS = 64  # new tokens of an answer, as many in the log as in the comparison
CONTEXT = 1024  # the longest one
TUNING, HELD_OUT = 8, 48  # prompts
LONGEST = 8  # tokens of a labelled chain
PLAIN = "no speculation"


class Answer(NamedTuple):
    """An engine's answer to one prompt."""

    prompt: list[int]
    tokens: list[int]
    seconds: float  # of the request
    kind: str  # of the prompt, as its source
    source: str
    # drafted and accepted tokens of the steps that drafted, where they are known
    steps: Sequence[Sequence[int]] = ()
    first: float = 0.0  # seconds to the first token, where they are known


def prompts() -> tuple[list[Prompt], list[Prompt]]:
    """For training, and held out: of other sources, as many of each kind."""
    tokenizer = load_tokenizer(resolved(SMOLLM2, "target"), "target")
    fitting, _ = Form(320, "drop", True, None).fit(tokenizer, read_prompts(PROMPTS))
    by_split: dict[str, list[Prompt]] = {"train": [], "test": []}
    for prompt in fitting:
        by_split[split_of(prompt, 0.0, 0.4)].append(prompt)
    return take_evenly(by_split["train"]), take_evenly(by_split["test"], HELD_OUT)


@torch.inference_mode()
def chains_along(model: Any, tokens: list[int], first: int) -> list[list[int]]:
    """The most probable `LONGEST` tokens of a model after each beginning of a text, from that of
    `first` tokens on: the next tokens of all chains take one forward pass, in which each sees its
    own beginning and chain."""
    cache = DynamicCache()
    positions_T = torch.arange(len(tokens))
    logits_TV = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
    newest_R = logits_TV[first - 1 : -1].argmax(-1)
    chains = [newest_R]
    last_R = positions_T[first - 1 : -1]
    seen_RC = positions_T <= last_R.unsqueeze(-1)
    for depth in range(1, LONGEST):
        seen_RC = torch.cat([seen_RC, torch.eye(len(last_R), dtype=torch.bool)], dim=-1)
        mask_RC = torch.zeros(seen_RC.shape)
        mask_RC.masked_fill_(~seen_RC, torch.finfo(torch.float32).min)
        output = model(
            newest_R.unsqueeze(0),
            attention_mask=mask_RC[None, None],
            position_ids=(last_R + depth).unsqueeze(0),
            past_key_values=cache,
        )
        newest_R = output.logits[0].argmax(-1)
        chains.append(newest_R)
    return torch.stack(chains, dim=1).tolist()


def write_log(path: Path, answers: Sequence[Answer], drafter: CachedDrafter) -> None:
    """A log with the number of the draft's tokens that the text repeats, from each position on. A
    greedy draft's token is accepted with its probability by the target, and that is how often a
    sampled text goes on with it."""
    with atomically(path) as partial, partial.open("w") as file:
        for answer in answers:
            text = [*answer.prompt, *answer.tokens]
            start = len(answer.prompt)
            accepted = []
            for end, drafted in enumerate(chains_along(drafter.model, text, start), start):
                count = 0
                for token, follows in zip(drafted, text[end:], strict=False):
                    if token != follows:
                        break
                    count += 1
                accepted.append(count)
            line = {
                "prompt_token_ids": answer.prompt,
                "generated_token_ids": answer.tokens,
                "kind": answer.kind,
                "source": answer.source,
                "drafters": {"draft": {"accepted": accepted}},
            }
            file.write(json.dumps(line) + "\n")


def train(
    log: Path, timings: Path, name: str, *overrides: str, held_out: Path | None = None
) -> Path:
    """`espalier logs`; the folder of the selector. It judges on more texts than usual; those that
    tell what replay promises are a log of their own, if one is `held_out`."""
    shares = "prompts.validation=0.25 prompts.test=0.15"
    words = f"logs {log} --timings {timings} --name {name} latency.stepped=false {shares}".split()
    if held_out is not None:
        words.append(f"logs.test=[{held_out}]")
    subprocess.run([sys.executable, "-m", "pipelines", *words, *overrides], check=True)
    return Path("runs", name, "selector").absolute()


def promised(folder: Path, at_once: int) -> float:
    """What replay says of a selector by token ids for so many different requests at once: its
    speed over plain decoding on the held-out texts, without the passes over prompts."""
    evaluation = json.loads((folder.parent / "evaluation.json").read_text())
    for entry in evaluation["logs"]["by_batch"]:
        if (entry["batch"], entry["level"], entry["mixed"]) == (at_once, TEXT, at_once > 1):
            speed: float = entry["charged"]
            return speed
    raise SystemExit(f"{folder}: nothing was replayed with {at_once} requests")


def with_prompt(speed: float, prompt_seconds: float, seconds: float) -> float:
    """A speed over plain decoding, of answers that take so many seconds with plain decoding, among
    them those of the pass over the prompt."""
    return seconds / (prompt_seconds + (seconds - prompt_seconds) / speed)


def made_once(path: Path, make: Callable[[], Any]) -> Any:
    """The content of a JSON file, which is made if there is none."""
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def row(
    scene: str, method: str, turns: dict[str, list[list[Answer]]], at_once: int, tuned: str
) -> dict[str, str]:
    """One line of the table: tokens per second of a server that answers so many requests at once;
    that over no speculation and over the tuned n-gram drafter, as geometric means over turns; the
    same of single requests, paired by prompt, each with its 95% interval; the kinds of prompts
    whose requests gain least and most over no speculation; how many texts are those without
    speculation; and how many drafted tokens were accepted, where the engine says so."""
    answers = _all(turns[method])
    speed = statistics.geometric_mean(speed_of(turn) for turn in turns[method])
    cells = {"at once": scene, "method": method, "tokens/s": f"{at_once * speed:.1f}"}
    sources = [answer.source for answer in answers]
    for rival in (PLAIN, tuned):
        by_turn = log_ratios(turns[method], turns[rival])
        by_prompt = log_ratios(_single(turns[method]), _single(turns[rival]))
        cells[f"over {rival}"] = with_interval(by_turn, range(len(by_turn)))
        cells[f"each over {rival}"] = with_interval(by_prompt, sources)
        if rival == PLAIN:
            means = pd.Series(by_prompt).groupby([answer.kind for answer in answers]).mean()
            least = f"{means.idxmin()} {math.exp(means.min()):.2f}"
            most = f"{means.idxmax()} {math.exp(means.max()):.2f}"
            cells["least and most by kind"] = f"{least}, {most}"
    pairs = zip(answers, _all(turns[PLAIN]), strict=True)
    equal = sum(answer.tokens == plain.tokens for answer, plain in pairs)
    cells["equal texts"] = f"{equal} of {len(answers)}"
    drafted = sum(step[0] for answer in answers for step in answer.steps)
    accepted = sum(step[1] for answer in answers for step in answer.steps)
    steps = sum(len(answer.tokens) for answer in answers) - accepted
    cells["accepted"] = f"{accepted} of {drafted} in {steps} steps"
    return cells


def _all(turns: Sequence[Sequence[Answer]]) -> list[Answer]:
    return [answer for turn in turns for answer in turn]


def _single(turns: Sequence[Sequence[Answer]]) -> list[list[Answer]]:
    return [[answer] for answer in _all(turns)]


def speed_of(turn: Sequence[Answer]) -> float:
    """Tokens per second of one request among those of a turn."""
    return sum(len(answer.tokens) for answer in turn) / sum(answer.seconds for answer in turn)


def log_ratios(turns: Sequence[Sequence[Answer]], rival: Sequence[Sequence[Answer]]) -> list[float]:
    """The logarithms of the ratios of speeds, of each turn."""
    pairs = zip(turns, rival, strict=True)
    return [math.log(speed_of(turn) / speed_of(other)) for turn, other in pairs]


def with_interval(log_ratios: Sequence[float], groups: Sequence[object]) -> str:
    """The mean ratio with its 95% interval over groups, such as the prompts' sources."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    ratio_X1 = torch.tensor(log_ratios, dtype=torch.float64).unsqueeze(-1)
    value, (low, high) = paired(ratio_X1, torch.tensor([numbers[group] for group in groups]))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def show(rows: Sequence[dict[str, str]]) -> None:
    """Print the table."""
    console.print(pd.DataFrame(rows).to_string(index=False), soft_wrap=True)
