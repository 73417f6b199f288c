"""Does vLLM's server survive our proposer (`python -m tests.engines.survival SELECTOR`)?

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_gen.engines.text import NAME
from pipelines.run import console
from tests.engines.loop import CONTEXT, prompts
from tests.engines.vllm_loop import DRAFT, LONGEST, PORT
from tests.engines.vllm_server import FOLDER, alive, custom, post, server

REQUESTS, AT_ONCE, KEPT = 200, 8, 24  # answers that are compared with those without speculation
BLOCKS = "--num-gpu-blocks-override 20"  # of the cache: eight long requests do not fit


def bodies() -> list[tuple[str, dict[str, Any], float]]:
    """The kind of each request, its body, and after how many seconds it is aborted."""
    chosen, (training, _), found = (
        random.Random(0),
        prompts(),
        list[tuple[str, dict[str, Any], float]](),
    )
    texts = [prompt.text for prompt in training[:KEPT]]
    for number in range(REQUESTS):
        text = texts[number % KEPT]
        body: dict[str, Any] = {
            "prompt": text,
            "max_tokens": 48,
            "temperature": 0.0,
            "seed": number,
        }
        kind = (
            "greedy"
            if number < KEPT
            else chosen.choice(("greedy", "sampled", "aborted", "empty", "limit", "beyond"))
        )
        if kind == "sampled":
            body |= {
                "temperature": chosen.choice((0.3, 0.7, 1.2)),
                "top_p": chosen.choice((0.9, 1.0)),
            }
        elif kind == "empty":
            body["prompt"] = ""
        elif kind in ("limit", "beyond"):  # up to the context's last token, or beyond it
            tokens, new = (CONTEXT - 6, 6) if kind == "limit" else (CONTEXT + 1, 8)
            body |= {"prompt": [chosen.randrange(3, 40_000)] * tokens, "max_tokens": new}
        elif number % 3 == 0:
            body["max_tokens"] = 400
        found.append((kind, body, chosen.uniform(0.2, 3.0) if kind == "aborted" else 600.0))
    return found


def outcome(address: str, body: dict[str, Any], timeout: float) -> Any:
    """The text's token ids, or what the server said instead."""
    try:
        return post(address, "completions", body, timeout)["choices"][0]["token_ids"]
    except urllib.error.HTTPError as error:
        return f"refused ({error.code})"
    except TimeoutError:
        return "aborted"


def main(selector: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    copy, todo = FOLDER / "selector-in-use", bodies()
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(selector, copy)
    options = {NAME: {"selector": str(copy.absolute()), "temperature": 0.0, "draft": DRAFT}}
    with server(PORT, None) as address:
        plain = [outcome(address, body, timeout) for _, body, timeout in todo[:KEPT]]
    proposer = custom("data_gen.engines.vllm.Proposer", LONGEST)
    with server(PORT, proposer, options, BLOCKS) as address, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(outcome, address, body, timeout) for _, body, timeout in todo]
        asked[REQUESTS // 4].result()
        for file in copy.iterdir():
            file.write_bytes(b"damaged")
        found = [each.result() for each in asked]
        again = [outcome(address, body, timeout) for _, body, timeout in todo[:KEPT]]
        assert alive(address), "the server has ended"
        with urllib.request.urlopen(f"{address}/metrics") as page:
            counted = [line.split() for line in page.read().decode().splitlines()]
    preempted = sum(
        float(line[-1])
        for line in counted
        if line and line[0].startswith("vllm:num_preemptions_total")
    )
    said = ["a text" if isinstance(end, list) else end for end in found]
    ends = Counter((kind, end) for (kind, *_), end in zip(todo, said, strict=True))
    for (kind, end), count in sorted(ends.items()):
        console.print(f"{kind}: {count} x {end}")
    same = [sum(a == b for a, b in zip(plain, own, strict=True)) for own in (found[:KEPT], again)]
    log = (FOLDER / f"server-{PORT}.log").read_text()
    console.print(
        f"{same[0]} and {same[1]} of {KEPT} greedy texts equal those without speculation; it "
        "still serves"
    )
    console.print(
        f"{preempted:.0f} times a request was preempted, {log.count('no draft')} times a "
        "decision failed"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
