"""Time the decoding steps of a server of vLLM or SGLang, for `espalier logs --timings times.csv`.

    python step_times.py http://localhost:8000 MODEL times.csv
    python step_times.py http://localhost:8000 MODEL times.csv --drafted 5 --passes 5
    python step_times.py http://localhost:8000 MODEL times.csv --drafted 5

It adds rows to the file: of a server without a drafter; of one that was started with a draft model
or head for five tokens; and of one with n-grams of as many, for which no model makes a pass, so
that the draft's passes can be told from verification.
Let nothing else use the server. Every request streams, and a step is the time from one part of the
stream to the next, while all requests decode. Prompts repeat a few tokens, so that n-grams are
drafted at every step.
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path

TOKENS = 128  # new ones of each request
PERIOD = 8  # tokens that a prompt repeats
HEADER = "batch,context,verified,passes,seconds\n"


def arrivals(url: str, model: str, context: int) -> list[float]:
    """When each part of the stream of one request came, in seconds."""
    prompt = (random.sample(range(100, 1000), PERIOD) * context)[:context]
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return [time.perf_counter() for line in answer if line.startswith(b"data: {")]


def step_seconds(url: str, model: str, batch: int, context: int) -> float:
    """The median step while so many requests decode."""
    with ThreadPoolExecutor(batch) as pool:
        requests = list(pool.map(lambda _: arrivals(url, model, context), range(batch)))
    all_began = max(times[0] for times in requests)
    one_ended = min(times[-1] for times in requests)
    steps = [
        after - before
        for times in requests
        for before, after in pairwise(times)
        if all_began <= before and after <= one_ended
    ]
    if not steps:
        raise SystemExit(f"{batch} requests do not decode together: leave this size out")
    return statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--drafted", type=int, default=0)
    parser.add_argument("--passes", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    options = parser.parse_args()
    if not options.file.exists():
        options.file.write_text(HEADER)
    arrivals(options.url, options.model, options.contexts[0])  # the first request is slower
    for batch, context in product(options.batches, options.contexts):
        seconds = step_seconds(options.url, options.model, batch, context)
        row = (batch, context + TOKENS // 2, options.drafted + 1, options.passes, f"{seconds:.6f}")
        with options.file.open("a") as file:
            file.write(",".join(map(str, row)) + "\n")


if __name__ == "__main__":
    main()
