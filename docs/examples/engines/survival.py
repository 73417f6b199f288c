"""Does vLLM's server survive our proposer?

    .venv/bin/python docs/examples/engines/survival.py SELECTOR

200 requests of mixed settings, eight at once, some of them aborted, empty, repeated or at the
context's limit, with so small a cache that requests are preempted. While they run, the selector's
files are damaged. Greedy texts equal those without speculation.
"""

from __future__ import annotations

import random
import shutil
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from loop import CONTEXT, prompts
from vllm_loop import DRAFT
from vllm_server import FOLDER, PORT, alive, custom, post, server

from data_gen.engines.text import NAME
from pipelines.terminal import console

REQUESTS, AT_ONCE = 200, 8
COMPARED = 24  # answers that are compared with those without speculation
BLOCKS = "--num-gpu-blocks-override 20"  # of the cache: eight long requests do not fit
PREEMPTIONS = "vllm:num_preemptions_total"


class Request(NamedTuple):
    kind: str
    body: dict[str, Any]
    timeout: float = 600.0  # seconds until it is aborted


def requests() -> list[Request]:
    chosen = random.Random(0)
    training, _ = prompts()
    todo = []
    for number in range(REQUESTS):
        kind = "greedy"
        if number >= COMPARED:
            kind = chosen.choice(("greedy", "sampled", "aborted", "empty", "limit", "beyond"))
        body: dict[str, Any] = {
            "prompt": training[number % COMPARED].text,
            "max_tokens": 48,
            "temperature": 0.0,
            "seed": number,
        }
        if kind == "sampled":
            body["temperature"] = chosen.choice((0.3, 0.7, 1.2))
            body["top_p"] = chosen.choice((0.9, 1.0))
        elif kind == "empty":
            body["prompt"] = ""
        elif kind == "limit":  # up to the context's last token
            body["prompt"] = [chosen.randrange(3, 40_000)] * (CONTEXT - 6)
            body["max_tokens"] = 6
        elif kind == "beyond":
            body["prompt"] = [chosen.randrange(3, 40_000)] * (CONTEXT + 1)
            body["max_tokens"] = 8
        elif number % 3 == 0:
            body["max_tokens"] = 400
        request = Request(kind, body)
        if kind == "aborted":
            request = request._replace(timeout=chosen.uniform(0.2, 3.0))
        todo.append(request)
    return todo


def outcome(address: str, request: Request) -> Any:
    """The text's token ids, or what the server said instead."""
    try:
        answer = post(address, "completions", request.body, request.timeout)
    except urllib.error.HTTPError as error:
        return f"refused ({error.code})"
    except TimeoutError:
        return "aborted"
    return answer["choices"][0]["token_ids"]


def preemptions(address: str) -> float:
    """How often a request of the server was preempted."""
    with urllib.request.urlopen(f"{address}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(PREEMPTIONS))


def equal(plain: Sequence[Any], others: Sequence[Any]) -> int:
    return sum(one == other for one, other in zip(plain, others, strict=True))


def main(selector: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    copy = FOLDER / "selector-in-use"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(selector, copy)
    todo = requests()
    with server(PORT, None) as address:
        plain = [outcome(address, request) for request in todo[:COMPARED]]
    proposer = custom("data_gen.engines.vllm.Proposer")
    options = {NAME: {"selector": str(copy.absolute()), "temperature": 0.0, "draft": DRAFT}}
    with server(PORT, proposer, options, BLOCKS) as address, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(outcome, address, request) for request in todo]
        asked[REQUESTS // 4].result()
        for file in copy.iterdir():
            file.write_bytes(b"damaged")
        outcomes = [answer.result() for answer in asked]
        again = [outcome(address, request) for request in todo[:COMPARED]]
        assert alive(address), "the server has ended"
        preempted = preemptions(address)
    ends: Counter[tuple[str, str]] = Counter()
    for request, end in zip(todo, outcomes, strict=True):
        ends[request.kind, "a text" if isinstance(end, list) else end] += 1
    for (kind, end), count in sorted(ends.items()):
        console.print(f"{kind}: {count} x {end}")
    console.print(
        f"{equal(plain, outcomes[:COMPARED])} and {equal(plain, again)} of {COMPARED} greedy texts "
        "equal those without speculation; it still serves"
    )
    failed = (FOLDER / f"server-{PORT}.log").read_text().count("no draft")
    console.print(
        f"{preempted:.0f} times a request was preempted, {failed} times a decision failed"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
