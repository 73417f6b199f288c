"""The loop with a real engine (`make engine-vllm`): vLLM on the CPU serves SmolLM2, its log and its step times train a
selector, and the selector decides inside it.

The servers of all methods run side by side, and one at a time answers a round of held-out prompts, in rotating order.
Every part is kept in `runs/vllm/`, and the same command goes on from there.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from data_gen.models.checkpoints import load_tokenizer
from data_gen.models.gguf import SMOLLM2, resolved
from data_gen.texts.prompts import Form, Prompt, read_prompts, split_of, take_evenly
from pipelines.evaluate.table import paired
from pipelines.pair.stage import PROMPTS
from pipelines.run import console
from tests.engines.wrong import COUNT

FOLDER, PYTHON, PORT = Path("runs/vllm"), ".venv-vllm/bin/python", 8711
TOKENS, CONTEXT = 64, 1024  # new tokens of an answer; the longest context
TRAINING, TUNING, HELD_OUT = 96, 8, 48  # prompts
ROUNDS = {1: 1, 4: 2, 8: 2}  # by requests at once
CONCURRENCY = tuple(ROUNDS)
WRONG, TIMED = (0, 2, 4, 8, 16), 24  # proposed tokens whose steps are timed; new tokens of each timed answer
NGRAMS = [{"prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": n} for n in (2, 4, 8)]
METHODS = PLAIN, NGRAM, OURS = "no speculation", "n-gram, tuned", "selector"
SERVER = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    **{"OMP_NUM_THREADS": "2", "KMP_BLOCKTIME": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
}
OPTIONS = f"--served-model-name smol --dtype float32 --enforce-eager --max-model-len {CONTEXT}"
Answer = dict[str, Any]  # of the server, with `seconds`


@contextmanager
def server(port: int, speculative: dict[str, Any] | None, additional: dict[str, Any] | None = None) -> Iterator[str]:
    """A server of the loopback, once it answers; its address."""
    command = [*f"{PYTHON} -m vllm.entrypoints.openai.api_server {OPTIONS} --port {port}".split()]
    command += ["--model", resolved(SMOLLM2, "target")]
    if speculative:
        command += ["--per-request-spec-decode-metrics", "detailed", "--speculative-config", json.dumps(speculative)]
    if additional:
        command += ["--additional-config", json.dumps(additional)]
    address, log = f"http://127.0.0.1:{port}", FOLDER / f"server-{port}.log"
    environment = {**os.environ, **SERVER, "PYTHONPATH": str(Path.cwd()), COUNT: str(FOLDER / "wrong.txt")}
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process:
        try:
            while not _answers(f"{address}/health"):
                if process.poll() is not None:
                    raise SystemExit(f"{log}: the server ended: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield address
        finally:
            process.terminate()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


def ask(address: str, prompt: Prompt, tokens: int = TOKENS, to_the_end: bool = False) -> Answer:
    """The answer to one prompt, greedy; of so many tokens in any case if `to_the_end`."""
    body: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": prompt.text}], "temperature": 0}
    body |= {"max_tokens": tokens, "return_token_ids": True, "ignore_eos": to_the_end}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: Answer = json.load(answer)
    return found | {"seconds": time.perf_counter() - begin, "kind": prompt.kind, "source": prompt.source}


def ask_all(
    address: str, prompts: Sequence[Prompt], concurrency: int, tokens: int = TOKENS, to_the_end: bool = False
) -> tuple[list[Answer], float]:
    """All answers, so many at once, and the seconds until the last one."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda prompt: ask(address, prompt, tokens, to_the_end), prompts))
    return answers, time.perf_counter() - begin


def step_times(prompts: Sequence[Prompt]) -> pd.DataFrame:
    """Seconds of a step by requests and verified tokens: how much longer answers of more tokens take."""
    rows, file = [], FOLDER / "wrong.txt"
    file.write_text("0")
    with server(PORT, drafter("tests.engines.wrong.WrongTokens", max(WRONG))) as address:
        ask_all(address, prompts[:2], 2)
        for _, batch, count in product(range(3), CONCURRENCY, WRONG):
            file.write_text(str(count))
            asked = address, prompts[:batch], batch
            short, long = (ask_all(*asked, tokens, to_the_end=True)[1] for tokens in (4, 4 + TIMED))
            seconds = (long - short) / TIMED  # the prompts' passes are in both
            rows.append({"batch": batch, "context": 100, "verified": count + 1, "passes": 0, "seconds": seconds})
    columns = list(rows[0])
    return pd.DataFrame(rows).groupby(columns[:-1], as_index=False)["seconds"].median()


def drafter(name: str, most: int) -> dict[str, Any]:
    """A class of ours as vLLM's drafter of up to so many tokens."""
    return {"method": "custom_class", "model": name, "num_speculative_tokens": most}


def tuned_ngram(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """vLLM's n-gram drafter with its quickest constants for one request."""
    found = []
    for own in NGRAMS:
        with server(PORT, {"method": "ngram", **own}) as address:
            ask(address, prompts[0])
            found.append(ask_all(address, prompts, 1)[1])
    return {"method": "ngram", **NGRAMS[found.index(min(found))], "seconds": found}


def kept(name: str, make: Any) -> Any:
    """The content of a JSON file, which is made if there is none."""
    path = FOLDER / name
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(resolved(SMOLLM2, "target"), "target")
    prompts, _ = Form(320, "drop", True, None).fit(tokenizer, read_prompts(PROMPTS))
    of = {split: [each for each in prompts if split_of(each, 0.0, 0.4) == split] for split in ("train", "test")}
    training, held_out = take_evenly(of["train"], min(TRAINING, len(of["train"]))), take_evenly(of["test"], HELD_OUT)

    log, timings = FOLDER / "log.jsonl", FOLDER / "timings.csv"
    if not log.exists():
        with server(PORT, {"method": "ngram", **NGRAMS[0]}) as address:
            answers, seconds = ask_all(address, training, max(CONCURRENCY))
        log.write_text("".join(json.dumps(each) + "\n" for each in answers))
        console.print(f"{log}: {len(answers)} answers in {seconds:.0f} s")
    if not timings.exists():
        step_times(training).to_csv(timings, index=False)
        console.print(timings.read_text())
    words = f"logs {log} --timings {timings} --name vllm-copies logs.drafter=none latency.stepped=false".split()
    subprocess.run([sys.executable, "-m", "pipelines", *words], check=True)
    ngram = kept("ngram.json", lambda: tuned_ngram(training[:TUNING]))
    del ngram["seconds"]
    custom = drafter("data_gen.engines.vllm.Proposer", 20)
    ours = {"espalier": {"selector": str(Path("runs/vllm-copies/selector").absolute()), "temperature": 0.0}}
    methods: dict[str, tuple[Any, ...]] = {PLAIN: (None,), NGRAM: (ngram,), OURS: (custom, ours)}
    rounds = FOLDER / "rounds.jsonl"
    with ExitStack() as stack:
        addresses = {
            name: stack.enter_context(server(PORT + 1 + n, *own)) for n, (name, own) in enumerate(methods.items())
        }
        for address in addresses.values():
            ask_all(address, training[:2], 2)
        done = [json.loads(line) for line in rounds.read_text().splitlines()] if rounds.exists() else []
        for concurrency in CONCURRENCY:
            # a server of several requests is under load: one that is answered makes room for the next
            size = max(CONCURRENCY) if concurrency == 1 else len(held_out)
            groups = [held_out[begin : begin + size] for begin in range(0, len(held_out), size)] * ROUNDS[concurrency]
            for number, group in enumerate(groups):
                first = number % len(METHODS)
                for name in (*METHODS[first:], *METHODS[:first]):
                    at = {"concurrency": concurrency, "group": number, "method": name}
                    if any(each.items() >= at.items() for each in done):
                        continue
                    answers, seconds = ask_all(addresses[name], group, concurrency)
                    own = [[each["seconds"], each["choices"][0]["token_ids"], each["kind"]] for each in answers]
                    with rounds.open("a") as file:
                        file.write(json.dumps(at | {"seconds": seconds, "answers": own}) + "\n")
    report([json.loads(line) for line in rounds.read_text().splitlines()])


def report(rows: Sequence[dict[str, Any]]) -> None:
    """By requests at once and method: tokens per second of the server; that over no speculation and over the tuned
    n-gram drafter; the same of single requests, paired by prompt, with 95% intervals over prompts; the kind of prompts
    whose requests gain least over no speculation; and how many texts are those without speculation."""
    cells = []
    for concurrency in CONCURRENCY:
        here = [each for each in rows if each["concurrency"] == concurrency]
        answers = {name: [a for each in here if each["method"] == name for a in each["answers"]] for name in METHODS}
        server = {
            name: sum(len(a[1]) for a in own) / sum(each["seconds"] for each in here if each["method"] == name)
            for name, own in answers.items()
        }
        for name, own in answers.items():
            cell = {"at once": str(concurrency), "method": name, "tokens/s": f"{server[name]:.1f}"}
            for rival in (PLAIN, NGRAM):
                speeds = [len(a[1]) / a[0] / (len(b[1]) / b[0]) for a, b in zip(own, answers[rival], strict=True)]
                ratio_XR = torch.tensor(speeds, dtype=torch.float64).log().unsqueeze(-1)
                value, (low, high) = paired(ratio_XR, torch.arange(len(own)) % HELD_OUT)
                cell[f"over {rival}"] = f"{server[name] / server[rival]:.2f}"
                cell[f"each over {rival}"] = f"{value:.2f} [{low:.2f}, {high:.2f}]"
                if rival == PLAIN:
                    means = pd.Series(ratio_XR[:, 0].numpy()).groupby([a[2] for a in own]).mean()
                    cell["least kind"] = f"{means.idxmin()} {math.exp(means.min()):.2f}"
            equal = sum(a[1] == b[1] for a, b in zip(own, answers[PLAIN], strict=True))
            cells.append(cell | {"equal texts": f"{equal} of {len(own)}"})
    console.print(pd.DataFrame(cells).to_string(index=False), soft_wrap=True)


if __name__ == "__main__":
    main()
