"""The engines that tables of chain lengths are written for: what each reads, and what it drafts without a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

Defaults = Mapping[str, Mapping[int, Sequence[int]]]  # by name: candidates by the smallest batch size that has them


class Range(NamedTuple):
    """Batch sizes from `first` to `last`, both included, and the number of tokens that each request drafts."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class Served:
    """What an engine is told.

    Attributes:
        target, draft: the models' directories or hub ids.
        block: whether chains are verified as blocks, and not token by token.
        sampled: whether drafts are sampled at the request's temperature, and are not the most probable tokens.
        ranges: the lengths of all batch sizes, from 1 on.
    """

    target: str
    draft: str
    block: bool
    sampled: bool
    ranges: list[Range]

    @property
    def longest(self) -> int:
        return max(each.length for each in self.ranges)

    @property
    def requests(self) -> int:
        """The largest batch."""
        return self.ranges[-1].last


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        read: the version whose source or documentation the file follows.
        defaults: what it drafts without a table.
        settings: the content of its file.
        command: the command line that uses a file.
        limits: what a user of the file must know, in Markdown.
        blocks: whether it has block verification.
        first_is_longest: whether the smallest batch must have the longest chains.
        suffix: of its file, json or yaml.
    """

    read: str
    defaults: Defaults
    settings: Callable[[Served], dict[str, Any]]
    command: Callable[[Served, str], str]
    limits: str
    blocks: bool = True
    first_is_longest: bool = False
    suffix: str = "json"

    def write(self, served: Served) -> str:
        """The file's text."""
        settings = self.settings(served)
        return yaml.safe_dump(settings, sort_keys=False) if self.suffix == "yaml" else json.dumps(settings) + "\n"


def _vllm(served: Served) -> dict[str, Any]:
    """`vllm.config.SpeculativeConfig`; batch sizes are inclusive."""
    return {
        "method": "draft_model",
        "model": served.draft,
        "num_speculative_tokens": served.longest,
        "num_speculative_tokens_per_batch_size": [list(each) for each in served.ranges],
        "rejection_sample_method": "block" if served.block else "standard",
        "draft_sample_method": "probabilistic" if served.sampled else "greedy",
    }


def _sglang(served: Served) -> dict[str, Any]:
    """The file of `--speculative-adaptive-config`, with one candidate for each range, by its smallest batch size. With
    several candidates SGLang would choose by the recent mean of accepted tokens alone."""
    return {str(each.first): {"candidate_steps": [each.length]} for each in served.ranges}


def _sglang_command(served: Served, file: str) -> str:
    parts = [
        f"python -m sglang.launch_server --model-path {served.target}",
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {served.draft}",
        f"--speculative-eagle-topk 1 --speculative-num-steps {served.longest}",
        f"--speculative-num-draft-tokens {served.longest + 1}",
        f"--speculative-adaptive --speculative-adaptive-config {file}",
        f"--max-running-requests {served.requests}",
        *(["--speculative-use-rejection-sampling"] if served.sampled else []),
        *(["--speculative-use-block-verification"] if served.sampled and served.block else []),
    ]
    return " ".join(parts)


def _tensorrt_llm(served: Served) -> dict[str, Any]:
    """Arguments of `tensorrt_llm.LLM`. A batch size of the schedule is the smallest one of its length in version 1.2,
    and the largest one from 1.3 on; with both ends of each range the schedule means the same in both."""
    config = {
        "decoding_type": "Draft_Target",
        "speculative_model": served.draft,
        "max_draft_len": served.longest,
        "draft_len_schedule": {size: each.length for each in served.ranges for size in (each.first, each.last)},
        **({"use_rejection_sampling": True} if served.sampled else {}),
    }
    return {"max_batch_size": served.requests, "speculative_config": config}


# SGLang without a file: the candidates by the smallest batch size that has them
ADAPTIVE = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
ENGINES = {
    "vllm": Engine(
        read="0.33.0",
        defaults={"5 tokens": {1: (5,)}},
        settings=_vllm,
        command=lambda served, file: (
            f'vllm serve {served.target} --max-num-seqs {served.requests} --speculative-config "$(cat {file})"'
        ),
        limits="""\
- Drafts are sampled at the request's temperature alone: with top-p below 1 acceptance is below that of the labels.
- Block verification, and full graphs with changing lengths, need model runner V2, which is the default where possible.
- With data parallelism vLLM ignores the table and drafts `num_speculative_tokens` everywhere.
- vLLM has no default number of tokens. `5 tokens` is the example of its documentation.""",
    ),
    "sglang": Engine(
        read="0.5.23",
        defaults={"3 steps": {1: (3,)}, "best of its adaptive default": ADAPTIVE},
        settings=_sglang,
        command=_sglang_command,
        limits="""\
- SGLang adapts only EAGLE and EAGLE-3 heads. A separate draft model (`--speculative-algorithm STANDALONE`) takes one
  number for all batch sizes: `--speculative-num-steps L --speculative-num-draft-tokens L+1`, with L from the table
  below.
- `best of its adaptive default` is the fastest of the steps that it may take without a file, at each batch size.
- `3 steps` is its default for a draft model, and for most EAGLE heads.""",
    ),
    "tensorrt-llm": Engine(
        read="1.2 and 1.3",
        defaults={"3 tokens": {1: (3,)}},
        settings=_tensorrt_llm,
        command=lambda served, file: f"trtllm-serve {served.target} --config {file}",
        limits="""\
- The smallest batch size must have the longest chains, as it has in this table.
- Drafts are the most probable tokens unless `use_rejection_sampling` is set, a prototype of 1.3 that 1.2 does not have:
  where drafts are sampled, the table needs 1.3.
- TensorRT-LLM has no default number of tokens. `3 tokens` is the example of its documentation.""",
        blocks=False,
        first_is_longest=True,
        suffix="yaml",
    ),
}
