"""What a step of vLLM takes with a drafter that drafts nothing, and without one (milliseconds)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from typing import Any

import pandas as pd

from tests.engines.loop import prompts
from tests.engines.vllm_loop import DRAFT, FOLDER, PORT, SAMPLED, TIMED
from tests.engines.vllm_server import ask_all, custom, server

SERVERS: dict[str, tuple[Any, ...]] = {
    "no drafter": (None,),
    "drafts nothing": (custom("tests.engines.wrong.WrongTokens", 8), {"draft": DRAFT}),
}


def main() -> None:
    (training, _), rows = prompts(), []
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "wrong.txt").write_text("0 0")
    with ExitStack() as stack, ThreadPoolExecutor(2) as starting:
        begun = starting.map(stack.enter_context, [server(PORT + n, *own) for n, own in enumerate(SERVERS.values())])
        at = dict(zip(SERVERS, begun, strict=True))
        for address in at.values():
            ask_all(address, training[:8], 8)
        for _, heat, batch, name in product(range(5), (0.0, SAMPLED), (1, 8), SERVERS):
            asked = at[name], training[:batch], batch, heat
            turns = [ask_all(*asked, tokens=tokens, to_the_end=True) for tokens in (4, 4 + TIMED)]
            short, long = (max(each.seconds for each in turn) for turn in turns)
            rows.append({"T": heat, "batch": batch, "server": name, "ms": 1e3 * (long - short) / TIMED})
    print(pd.DataFrame(rows).groupby(["T", "batch", "server"])["ms"].agg(["median", "min", "max"]))


if __name__ == "__main__":
    main()
