"""Copies that a selector chooses in llama.cpp, beside plain decoding and llama-cpp-python's own lookups.

    .venv/bin/espalier pair --config configs/demo.yaml
    .venv/bin/python -m pipelines.studies.llama_cpp configs/demo.yaml
    .venv/bin/espalier logs runs/demo/llama_cpp/log.jsonl --timings runs/demo/llama_cpp/times.csv \
        --name copies logs.drafter=none
    .venv/bin/python -m pipelines.studies.llama_cpp configs/demo.yaml runs/copies/selector

The first run of the study writes the pair's target as a GGUF file, times llama.cpp's passes, and logs greedy texts. The
second decodes held-out prompts greedily, with all methods in turn, and prints a Markdown table. The constants of the
lookups are those that are fastest on validation prompts. The time of a text begins after its first token, so that the
prompt's pass is left out. It is the thread's CPU time: llama.cpp runs on one thread, and a busy machine does not count.

Legend: P prompts, M methods, R rounds.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from numpy.typing import NDArray

from data_gen.engines.llama_cpp import SelectedCopies
from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt, take_evenly
from pipelines.config import Config, load_config
from pipelines.latency.timings import COLUMNS
from pipelines.pair.loading import encode, load_pair, prompts_of
from pipelines.run import console
from pipelines.statistics import with_interval
from pipelines.studies.gguf_file import write_gguf
from selector.train.data import SPLITS

CONTEXTS = (32, 192, 384)
VERIFIED = (1, 2, 3, 4, 5, 7, 9, 13, 17, 21)  # tokens of a pass
REPEATS = 30
MATCHES, LENGTHS = (1, 2, 3, 4, 6), (2, 4, 8, 12, 16, 20)  # constants of the lookups
TUNED_ON = 6  # validation prompts
ROUNDS = 3
METHODS = ("plain", "lookup", "selector")
Seconds = NDArray[np.float64]


class Decoded(NamedTuple):
    tokens: list[int]
    seconds: float


def loaded(path: Path, draft: LlamaDraftModel | None = None) -> Llama:
    """The model on one thread, for as many tokens as the prompts and texts need."""
    return Llama(str(path), n_ctx=1024, n_threads=1, n_threads_batch=1, draft_model=draft, verbose=False)


def decode(llama: Llama, prompt: list[int], most: int) -> Decoded:
    """A greedy text of at most so many tokens, up to the end token, and its seconds after the first token."""
    tokens: list[int] = []
    begin = 0.0
    llama.reset()
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        begin = begin or time.thread_time()
        tokens.append(token)
        if len(tokens) == most or token == llama.token_eos():
            break
    return Decoded(tokens, time.thread_time() - begin)


def write_times(path: Path, model: Path) -> None:
    """Time passes of each number of tokens after each context, all in turn. The least time counts, because other work
    on the machine only adds to it."""
    llama = Llama(str(model), n_ctx=1024, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    seconds: dict[tuple[int, int], list[float]] = {work: [] for work in itertools.product(CONTEXTS, VERIFIED)}
    for _ in range(REPEATS):
        for (context, verified), own in seconds.items():
            if verified == VERIFIED[0]:
                llama.reset()
                llama.eval([0] * context)
            llama.n_tokens = context
            begin = time.thread_time()
            llama.eval([0] * verified)
            own.append(time.thread_time() - begin)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([1, *work, 0, f"{min(own):.3e}"] for work, own in seconds.items())


def write_log(path: Path, model: Path, prompts: Sequence[tuple[Prompt, list[int]]], most: int) -> None:
    """Greedy texts as a log of `espalier logs`, without a step of any drafter. The stage holds out the same sources as
    the pair's config, because both split them alike."""
    llama = loaded(model)
    with path.open("w") as file:
        for prompt, ids in prompts:
            text = {"id": prompt.id, "source": prompt.source, "kind": prompt.kind, "prompt_token_ids": ids}
            tokens = decode(llama, ids, most).tokens
            file.write(json.dumps(text | {"generated_token_ids": tokens, "drafters": {"lookup": {"steps": []}}}) + "\n")


def best_lookup(model: Path, prompts: Sequence[list[int]], most: int) -> LlamaPromptLookupDecoding:
    """The constants with the least time on some prompts."""
    draft = LlamaPromptLookupDecoding()
    llama = loaded(model, draft)
    taken = {}
    for draft.max_ngram_size, draft.num_pred_tokens in itertools.product(MATCHES, LENGTHS):
        texts = (decode(llama, prompt, most) for prompt in prompts)
        taken[draft.max_ngram_size, draft.num_pred_tokens] = sum(text.seconds for text in texts)
    draft.max_ngram_size, draft.num_pred_tokens = min(taken, key=lambda constants: taken[constants])
    return draft


def compare(
    model: Path, drafts: Sequence[LlamaDraftModel | None], prompts: Sequence[list[int]], most: int
) -> tuple[list[list[list[int]]], Seconds]:
    """Every method's text of every prompt, [P][M], and its median time over the rounds, [P, M]."""
    llamas = [loaded(model, draft) for draft in drafts]
    decode(llamas[-1], prompts[0], most)  # compiles the features and the decision
    texts: list[list[list[int]]] = []
    seconds_PM = np.zeros((len(prompts), len(drafts)))
    for p, prompt in enumerate(prompts):
        rounds_RM = [[decode(llama, prompt, most) for llama in llamas] for _ in range(ROUNDS)]
        texts.append([text.tokens for text in rounds_RM[0]])
        seconds_PM[p] = np.median([[text.seconds for text in row] for row in rounds_RM], axis=0)
    return texts, seconds_PM


def table(prompts: Sequence[Prompt], texts: list[list[list[int]]], seconds_PM: Seconds) -> list[str]:
    """Lines of Markdown: speeds in tokens per second and their ratios, by kind of work."""
    sources = sorted({prompt.source for prompt in prompts})
    source_P = torch.tensor([sources.index(prompt.source) for prompt in prompts])
    tokens_P = torch.tensor([len(row[0]) - 1 for row in texts], dtype=torch.float64)
    lines = ["| work | prompts | plain | lookup | selector | selector / plain | selector / lookup |", "|---" * 7 + "|"]
    for kind in ("all", *sorted({prompt.kind for prompt in prompts})):
        own = torch.tensor([p for p, prompt in enumerate(prompts) if kind in ("all", prompt.kind)])
        tokens, seconds = tokens_P[own], torch.from_numpy(seconds_PM)[own]
        speeds = [f"{float(tokens.sum() / seconds[:, m].sum()):.0f}" for m in range(len(METHODS))]
        ratios = []
        for base in (0, 1):
            columns = torch.stack([tokens, seconds[:, 2], tokens, seconds[:, base]], dim=-1)
            value, (low, high) = with_interval(columns, source_P[own])
            ratios.append(f"{value:.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {' | '.join([kind, str(len(own)), *speeds, *ratios])} |")
    return lines


def logged_prompts(config: Config, pair: ModelPair) -> list[Prompt]:
    """`data.texts` prompts of all splits, in proportion to their numbers."""
    found = {split: prompts_of(config, pair, split) for split in SPLITS}
    share = min(1.0, config.data.texts / sum(map(len, found.values())))
    return [prompt for own in found.values() for prompt in take_evenly(own, round(share * len(own)))]


def main(config: Config, selector: Path | None) -> None:
    folder = config.folder / "llama_cpp"
    pair, model, most = load_pair(config), folder / "target.gguf", config.data.tokens
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(pair.target, pair.tokenizer, model)
    if selector is None:
        logged = [(prompt, encode(config, pair, prompt)) for prompt in logged_prompts(config, pair)]
        write_log(folder / "log.jsonl", model, logged, most)
        write_times(folder / "times.csv", model)
        console.print(f"{folder}: {len(logged)} texts in log.jsonl, times.csv, {model.name}", soft_wrap=True)
        return
    tuned_on = prompts_of(config, pair, "validation", TUNED_ON)
    lookup = best_lookup(model, [encode(config, pair, prompt) for prompt in tuned_on], most)
    prompts = prompts_of(config, pair, "test", config.evaluate.prompts)
    ids = [encode(config, pair, prompt) for prompt in prompts]
    texts, seconds_PM = compare(model, (None, lookup, SelectedCopies(selector)), ids, most)
    console.print(f"lookup: max_ngram_size={lookup.max_ngram_size}, num_pred_tokens={lookup.num_pred_tokens}")
    for m, name in enumerate(METHODS[1:], 1):
        equal = sum(row[0] == row[m] for row in texts)
        console.print(f"{name}: {equal} of {len(texts)} texts are those of plain decoding")
    console.print("\n".join(table(prompts, texts, seconds_PM)), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    file, *others = sys.argv[1:]
    folders = [Path(each) for each in others if "=" not in each]
    main(load_config(Path(file), [each for each in others if "=" in each]), folders[0] if folders else None)
