"""The loop with llama.cpp (`make engine-llama`): llama-cpp-python decodes SmolLM2 in this process,
its texts and its step times train selectors, and these decide inside it. One request at a time,
greedily.

Every part is kept in `runs/llama/`, and the same command goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from data_gen.engines.drafter import CachedDrafter
from data_gen.engines.llama_cpp import SelectedDrafts, VerifyingLlama
from data_gen.models.checkpoints import load_tokenizer
from data_gen.models.gguf import FILE, SMOLLM2, WHEEL, resolved
from data_gen.texts.prompts import Prompt
from pipelines.config import SHIPPED
from pipelines.run import console
from tests.engines.loop import (
    CONTEXT,
    PLAIN,
    TOKENS,
    TUNING,
    WRONG,
    Answer,
    kept,
    prompts,
    row,
    show,
    train,
    write_log,
)

FOLDER, TIMED = Path("runs/llama"), 32
NGRAM, COPIES, OURS = "prompt lookup, tuned", "copies", "selector"
LOOKUPS = [
    {"max_ngram_size": size, "num_pred_tokens": n} for size, n in product((2, 3), (1, 2, 4, 8, 10))
]


class WrongTokens(LlamaDraftModel):
    """Drafts a chain of `passes` tokens, and gives `count` tokens that are nearly always wrong."""

    def __init__(self, drafter: CachedDrafter) -> None:
        self.drafter, self.count, self.passes = drafter, 0, 0

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        self.drafter.chains([input_ids.tolist()], [self.passes])
        return np.zeros(self.count, np.intc)


class Decoder:
    """llama.cpp's model, one for all methods."""

    def __init__(self) -> None:
        files = metadata.files(WHEEL) or ()
        model = next(str(file.locate()) for file in files if file.name == FILE)
        self._model = VerifyingLlama(
            model, n_ctx=CONTEXT, n_threads=2, n_threads_batch=2, verbose=False
        )
        self._tokenizer = load_tokenizer(resolved(SMOLLM2, "target"), "target")

    def ask(
        self,
        prompt: Prompt,
        draft: LlamaDraftModel | None,
        tokens: int = TOKENS,
        to_the_end: bool = False,
    ) -> Answer:
        llama = self._model
        llama.reset()
        llama.draft_model = draft
        messages = [{"role": "user", "content": prompt.text}]
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        begin, found, taken = time.perf_counter(), list[int](), list[float]()
        for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
            found.append(token)
            taken.append(time.perf_counter() - begin)
            if len(found) == tokens or (token == llama.token_eos() and not to_the_end):
                break
        return Answer(ids, found, taken[-1], prompt.kind, prompt.source, first=taken[0])


def step_times(decoder: Decoder, asked: Sequence[Prompt], drafter: CachedDrafter) -> pd.DataFrame:
    """Seconds of a step by verified tokens and draft passes, from the first token of an answer
    on."""
    rows, wrong = [], WrongTokens(drafter)
    for prompt, (wrong.count, wrong.passes) in product(asked, WRONG):
        answer = decoder.ask(prompt, wrong, 1 + TIMED, True)
        at = {"batch": 1, "context": 100, "verified": wrong.count + 1, "passes": wrong.passes}
        rows.append({**at, "seconds": (answer.seconds - answer.first) / TIMED})
    columns = list(rows[0])
    return pd.DataFrame(rows).groupby(columns[:-1], as_index=False)["seconds"].median()


def seconds(decoder: Decoder, asked: Sequence[Prompt], draft: LlamaDraftModel) -> float:
    return sum(decoder.ask(prompt, draft).seconds for prompt in asked)


def rounds(
    decoder: Decoder, methods: dict[str, Any], held_out: Sequence[Prompt]
) -> Iterator[list[Answer]]:
    """The answers of all methods to each prompt, in rotating order."""
    names = list(methods)
    for number, prompt in enumerate(held_out):
        first = number % len(names)
        found = {
            name: decoder.ask(prompt, methods[name]) for name in (*names[first:], *names[:first])
        }
        yield [found[name] for name in names]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (training, held_out), decoder = prompts(), Decoder()
    drafter = CachedDrafter.load(str(SHIPPED), SMOLLM2)
    log, timings = FOLDER / "log.jsonl", FOLDER / "timings.csv"
    if not log.exists():
        write_log(log, [decoder.ask(prompt, None) for prompt in training], drafter)
    if not timings.exists():
        step_times(decoder, training[:TUNING], drafter).to_csv(timings, index=False)
    console.print(timings.read_text())
    copies, both = (
        train(log, timings, "llama-copies", "logs.drafter=none"),
        train(log, timings, "llama-both"),
    )
    tuning = kept(
        FOLDER / "lookup.json",
        lambda: [
            seconds(decoder, training[:TUNING], LlamaPromptLookupDecoding(**own)) for own in LOOKUPS
        ],
    )
    lookup = LOOKUPS[tuning.index(min(tuning))]
    console.print(f"{NGRAM}: {lookup}")
    methods = {
        PLAIN: None,
        NGRAM: LlamaPromptLookupDecoding(**lookup),
        COPIES: SelectedDrafts(copies),
    }
    methods[OURS] = SelectedDrafts(both, chains=drafter.chains)
    found = kept(FOLDER / "rounds.json", lambda: list(rounds(decoder, methods, held_out)))
    turns = {name: [[Answer(*each[n])] for each in found] for n, name in enumerate(methods)}
    later = {
        name: [[a._replace(seconds=a.seconds - a.first)] for (a,) in own]
        for name, own in turns.items()
    }
    scenes = {"1": turns, "1, after the first token": later}
    show([row(scene, name, own, 1, NGRAM) for scene, own in scenes.items() for name in methods])


if __name__ == "__main__":
    main()
