"""SGLang: `candidate_steps` by batch size, the file of `--speculative-adaptive-config`."""

from __future__ import annotations

import json
from typing import Any

from pipelines.export.engines.engine import Engine, Served

# without a file: the candidates by the smallest batch size that has them
ADAPTIVE = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}


def adaptive_config(served: Served) -> dict[str, Any]:
    """One candidate for each range, by its smallest batch size: then there is nothing left to adapt to.

    Among several candidates SGLang takes the one nearest to the recent mean of accepted tokens, whatever they cost.
    """
    return {str(each.first): {"candidate_steps": [each.length]} for each in served.ranges}


def command(served: Served, file: str) -> str:
    sampling = ["--speculative-use-rejection-sampling"] if served.sampled else []
    sampling += ["--speculative-use-block-verification"] if served.sampled and served.block else []
    parts = [
        f"python -m sglang.launch_server --model-path {served.target}",
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {served.draft}",
        f"--speculative-eagle-topk 1 --speculative-num-steps {served.longest}",
        f"--speculative-num-draft-tokens {served.longest + 1}",
        f"--speculative-adaptive --speculative-adaptive-config {file}",
        f"--max-running-requests {served.requests}",
        *sampling,
    ]
    return " ".join(parts)


SGLANG = Engine(
    read="0.5.23",
    blocks=True,
    defaults={"3 steps": {1: (3,)}, "best of its adaptive default": ADAPTIVE},
    first_is_longest=False,
    suffix="json",
    write=lambda served: json.dumps(adaptive_config(served)) + "\n",
    command=command,
    limits="""\
- SGLang adapts EAGLE and EAGLE-3 heads alone. A draft model of its own (`--speculative-algorithm STANDALONE`)
  takes one number for all batch sizes: `--speculative-num-steps L --speculative-num-draft-tokens L+1`, with L from
  the table below.
- `best of its adaptive default` is the fastest of the steps that it may take without a file, at each batch size.
- `3 steps` is what it takes for a draft model, and for most EAGLE heads, where nothing is said.""",
)
