"""Where the tokens of a decoded text come from: drafted and accepted, copied and accepted, or added by the target, one
at the end of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from data_gen.texts.prompts import Prompt
from selector.actions import Action

DRAFTED, COPIED, TARGET = ORIGINS = ("drafted", "copied", "target")
STRIPS = 6  # prompts whose continuations are shown, one of each kind
SHOWN = 300  # characters of the prompt's end


class Run(NamedTuple):
    """Tokens of one origin in one step, from `begin` to before `end` of the new tokens; and the step's action."""

    origin: str
    action: str
    begin: int
    end: int


def runs(row: dict[str, Any]) -> Iterator[Run]:
    """Of a row of the journal, in order; what its last step yields beyond the limit is left out."""
    for values, (root, following) in zip(
        row["drafted"], pairwise([*row["step_roots"], row["block_tokens"]]), strict=True
    ):
        action = Action.of(values)
        accepted = COPIED if action.copies else DRAFTED
        for origin, begin, end in ((accepted, root, following - 1), (TARGET, following - 1, following)):
            if begin < min(end, row["tokens"]):
                yield Run(origin, str(action), begin, min(end, row["tokens"]))


def shares(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """The share of the new tokens by origin, over rows of the journal; None where the steps cannot be observed."""
    counts = dict.fromkeys(ORIGINS, 0)
    for run in chain.from_iterable(runs(row) for row in rows if row["drafted"]):
        counts[run.origin] += run.end - run.begin
    total = sum(counts.values())
    return {origin: count / total for origin, count in counts.items()} if total else None


def pieces(row: dict[str, Any], decode: Callable[..., str]) -> list[tuple[str, str, str]]:
    """The origin, the text and the step's action of every run. A character whose bytes two runs share stands in the
    later one."""
    found, said = [], ""
    for run in runs(row):
        text = decode(row["text"][: run.end], clean_up_tokenization_spaces=False)
        if run.end < row["tokens"]:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        found.append((run.origin, text[len(said) :], run.action))
        said = max(said, text, key=len)
    return found


def strips(
    rows: Sequence[dict[str, Any]], prompts: Sequence[Prompt], tokens: Callable[[Prompt], list[int]], tokenizer: Any
) -> list[dict[str, Any]]:
    """Continuations of the first prompt of each kind, with the end of that prompt, by one method under one sampling
    setting."""
    by_id, first = {row["prompt"]: row for row in rows}, {prompt.kind: prompt for prompt in reversed(prompts)}
    found = []
    for prompt in [prompt for prompt in prompts if first[prompt.kind] is prompt][:STRIPS]:
        row, text = by_id[prompt.id], tokenizer.decode(tokens(prompt), skip_special_tokens=True)
        shown = text if len(text) <= SHOWN else f"… {text[-SHOWN:]}"
        place = {key: row[key] for key in ("setting", "prompt", "kind")}
        found.append({**place, "text": shown, "pieces": pieces(row, tokenizer.decode)})
    return found
