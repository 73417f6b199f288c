"""vLLM: `num_speculative_tokens_per_batch_size` of the speculative config."""

from __future__ import annotations

import json
from typing import Any

from pipelines.export.engines.engine import Engine, Served


def speculative_config(served: Served) -> dict[str, Any]:
    """`vllm.config.SpeculativeConfig`, as JSON has it; batch sizes are inclusive."""
    return {
        "method": "draft_model",
        "model": served.draft,
        "num_speculative_tokens": served.longest,
        "num_speculative_tokens_per_batch_size": [list(each) for each in served.ranges],
        "rejection_sample_method": "block" if served.block else "standard",
        "draft_sample_method": "probabilistic" if served.sampled else "greedy",
    }


def command(served: Served, file: str) -> str:
    return f'vllm serve {served.target} --max-num-seqs {served.requests} --speculative-config "$(cat {file})"'


VLLM = Engine(
    read="0.33.0",
    blocks=True,
    defaults={"5 tokens": {1: (5,)}},
    first_is_longest=False,
    suffix="json",
    write=lambda served: json.dumps(speculative_config(served)) + "\n",
    command=command,
    limits="""\
- Drafts are drawn at the request's temperature alone: with top-p below 1 acceptance is below that of the labels.
- Block verification, and full graphs with changing lengths, need model runner V2, which is the default where it can be.
- With data parallelism vLLM leaves the table out and drafts `num_speculative_tokens` everywhere.
- `5 tokens`, the example of its documentation, stands for its default: it has none, the number must be given.""",
)
