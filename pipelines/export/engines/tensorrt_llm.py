"""TensorRT-LLM: `draft_len_schedule` of the speculative config."""

from __future__ import annotations

from typing import Any

import yaml

from pipelines.export.engines.engine import Engine, Served


def llm_args(served: Served) -> dict[str, Any]:
    """Arguments of `tensorrt_llm.LLM`.

    In version 1.2 a batch size of the schedule is the smallest one that its length is for, from 1.3 on the largest one.
    With both ends of each range the schedule says the same to either.
    """
    schedule = {size: each.length for each in served.ranges for size in (each.first, each.last)}
    config: dict[str, Any] = {
        "decoding_type": "Draft_Target",
        "speculative_model": served.draft,
        "max_draft_len": served.longest,
        "draft_len_schedule": schedule,
    }
    if served.sampled:
        config["use_rejection_sampling"] = True
    return {"max_batch_size": served.requests, "speculative_config": config}


def command(served: Served, file: str) -> str:
    return f"trtllm-serve {served.target} --config {file}"


TENSORRT_LLM = Engine(
    read="1.2 and 1.3",
    blocks=False,
    defaults={"3 tokens": {1: (3,)}},
    first_is_longest=True,
    suffix="yaml",
    write=lambda served: yaml.safe_dump(llm_args(served), sort_keys=False),
    command=command,
    limits="""\
- The smallest batch size must have the longest chains; the table keeps to that.
- Drafts are the likeliest tokens unless `use_rejection_sampling` is set, a prototype of 1.3 that 1.2 does not know:
  where drafts are drawn, the table needs 1.3.
- `3 tokens`, the example of its documentation, stands for its default: it has none, the number must be given.""",
)
