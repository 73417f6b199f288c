"""The loop with llama.cpp (`make engine-llama`): llama-cpp-python decodes SmolLM2 in this process,
its texts and its step times train selectors, and these decide inside it. One request at a time,
greedily.

Every part is kept in `runs/llama/`, and the same command goes on from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from loop import (
    CONTEXT,
    PLAIN,
    TOKENS,
    TUNING,
    Answer,
    made_once,
    promised,
    prompts,
    row,
    show,
    train,
    write_log,
)

from data_gen.engines.drafter import CachedDrafter
from data_gen.engines.llama_cpp import SelectedDrafts, VerifyingLlama
from data_gen.models.checkpoints import load_tokenizer
from data_gen.models.gguf import FILE, SMOLLM2, WHEEL, resolved
from data_gen.texts.prompts import Prompt
from pipelines.config import SHIPPED
from pipelines.terminal import console

FOLDER = Path("runs/llama")
NGRAM, COPIES, OURS = "prompt lookup, tuned", "copies", "selector"
LOOKUPS = [
    {"max_ngram_size": size, "num_pred_tokens": n} for size, n in product((2, 3), (1, 2, 4, 8, 10))
]


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
        """The answer to one prompt; of so many tokens in any case if `to_the_end`."""
        llama = self._model
        llama.reset()
        llama.draft_model = draft
        messages = [{"role": "user", "content": prompt.text}]
        encoding: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = encoding["input_ids"]
        answer: list[int] = []
        times: list[float] = []
        begin = time.perf_counter()
        for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
            answer.append(token)
            times.append(time.perf_counter() - begin)
            if len(answer) == tokens or (token == llama.token_eos() and not to_the_end):
                break
        return Answer(ids, answer, times[-1], prompt.kind, prompt.source, first=times[0])


def recorded(
    decoder: Decoder, training: Sequence[Prompt], drafter: CachedDrafter, steps: Path
) -> list[Answer]:
    """Answers while drafts of all lengths take turns. The plug-in records the `steps`; to them the
    mean one without a drafter is added."""
    in_turn = SelectedDrafts(None, chains=drafter.chains, steps=steps)
    answers = [decoder.ask(prompt, in_turn) for prompt in training]
    plain = [decoder.ask(prompt, None) for prompt in training[:TUNING]]
    seconds = sum(answer.seconds - answer.first for answer in plain)
    count = sum(len(answer.tokens) - 1 for answer in plain)
    step = {"batch": 1, "context": 100, "verified": 1, "passes": 0, "drafter": False}
    with steps.open("a") as file:
        file.write(json.dumps({**step, "seconds": seconds / count}) + "\n")
    return answers


def answers_in_turns(
    decoder: Decoder, methods: dict[str, Any], held_out: Sequence[Prompt]
) -> list[list[Answer]]:
    """The answers of all methods to each prompt, in rotating order."""
    names = list(methods)
    answers_of_prompts = []
    for number, prompt in enumerate(held_out):
        first = number % len(names)
        answers = {}
        for name in (*names[first:], *names[:first]):
            answers[name] = decoder.ask(prompt, methods[name])
        answers_of_prompts.append([answers[name] for name in names])
    return answers_of_prompts


def without_prompt(answer: Answer) -> Answer:
    """The answer as if it had begun with its first token."""
    return answer._replace(seconds=answer.seconds - answer.first)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    training, held_out = prompts()
    decoder = Decoder()
    drafter = CachedDrafter.load(str(SHIPPED), SMOLLM2)
    log = FOLDER / "log.jsonl"
    steps = FOLDER / "steps.jsonl"
    if not log.exists():
        steps.unlink(missing_ok=True)
        write_log(log, recorded(decoder, training, drafter, steps), drafter)
    test = FOLDER / "held-out.jsonl"  # replay is of the texts that are compared
    if not test.exists():
        write_log(test, [decoder.ask(prompt, None) for prompt in held_out], drafter)
    copies = train(log, steps, "llama-copies", "logs.drafter=none", held_out=test)
    both = train(log, steps, "llama-both", held_out=test)

    def seconds_of_lookups() -> list[float]:
        seconds = []
        for lookup in LOOKUPS:
            draft = LlamaPromptLookupDecoding(**lookup)
            seconds.append(sum(decoder.ask(prompt, draft).seconds for prompt in training[:TUNING]))
        return seconds

    seconds = made_once(FOLDER / "lookup.json", seconds_of_lookups)
    lookup = LOOKUPS[seconds.index(min(seconds))]
    console.print(f"{NGRAM}: {lookup}")
    methods = {
        PLAIN: None,
        NGRAM: LlamaPromptLookupDecoding(**lookup),
        COPIES: SelectedDrafts(copies),
        OURS: SelectedDrafts(both, chains=drafter.chains),
    }
    answered = made_once(
        FOLDER / "rounds.json", lambda: answers_in_turns(decoder, methods, held_out)
    )
    turns: dict[str, list[list[Answer]]] = {}
    later_turns: dict[str, list[list[Answer]]] = {}
    for number, name in enumerate(methods):
        answers = [Answer(*of_prompt[number]) for of_prompt in answered]
        turns[name] = [[answer] for answer in answers]
        later_turns[name] = [[without_prompt(answer)] for answer in answers]
    rows = [row("1", name, turns, 1, NGRAM) for name in methods]
    rows += [row("1, after the first token", name, later_turns, 1, NGRAM) for name in methods]
    show(rows)
    for name, folder in {COPIES: copies, OURS: both}.items():
        console.print(f"{name}: {promised(folder, 1):.2f} of {PLAIN} by replay, after the prompt")


if __name__ == "__main__":
    main()
