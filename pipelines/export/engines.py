"""The engines that lengths of chains are written for: what each reads, and what it really drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml

from pipelines.config import SamplingSetting
from selector.schema import InputError


class Range(NamedTuple):
    """Batch sizes from `first` to `last`, both included, and the number of tokens that each request drafts."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class Served:
    """What an engine is told.

    Attributes:
        target, draft: the models' directories or hub ids; the draft may be an EAGLE-3 head.
        block: whether chains are verified as blocks, and not token by token.
        sampled: whether drafts are sampled at the request's temperature, and are not the most probable tokens.
        ranges: the lengths of all batch sizes, from 1 on.
    """

    target: str
    draft: str
    block: bool
    sampled: bool
    ranges: list[Range]
    head: bool = False

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
        read: the version whose source the file follows.
        default: the length that it drafts without a table, or that its documentation shows.
        lengths: the lengths that a batch may draft where the longest one is given.
        settings: the content of its file.
        command: the command line that uses a file.
        limits: what a user of the file must know, in Markdown.
        blocks: whether it has block verification.
        samples: whether it can sample drafts at the request's temperature; it always can draft the likeliest tokens.
        masks: whether the draft makes the longest chain's passes for every batch, and only the target's pass is short.
        first_is_longest: whether the smallest batch must have the longest chains.
        suffix: of its file, json or yaml.
        steps: the content of a second file, `.steps.json`, if the table stands in a file of its own.
    """

    read: str
    default: int
    lengths: Callable[[int], range]
    settings: Callable[[Served], dict[str, Any]]
    command: Callable[[Served, str], str]
    limits: str
    blocks: bool = False
    samples: bool = True
    masks: bool = False
    first_is_longest: bool = False
    suffix: str = "yaml"
    steps: Callable[[Served], dict[str, Any]] | None = None

    def write(self, served: Served) -> str:
        """The file's text."""
        settings = self.settings(served)
        return yaml.safe_dump(settings, sort_keys=False) if self.suffix == "yaml" else json.dumps(settings) + "\n"


def _vllm(served: Served) -> dict[str, Any]:
    """`vllm.config.SpeculativeConfig`; batch sizes are inclusive."""
    return {
        "method": "eagle3" if served.head else "draft_model",
        "model": served.draft,
        "num_speculative_tokens": served.longest,
        "num_speculative_tokens_per_batch_size": [list(each) for each in served.ranges],
        "rejection_sample_method": "block" if served.block else "standard",
        "draft_sample_method": "probabilistic" if served.sampled else "greedy",
    }


def _sglang(served: Served) -> dict[str, Any]:
    """Options of `sglang.launch_server`, as the file of `--config` holds them."""
    return {
        "model-path": served.target,
        "speculative-algorithm": "EAGLE3" if served.head else "STANDALONE",
        "speculative-draft-model-path": served.draft,
        "speculative-eagle-topk": 1,
        "speculative-num-steps": served.longest,
        "speculative-num-draft-tokens": served.longest + 1,
        "max-running-requests": served.requests,
    }


def _sglang_steps(served: Served) -> dict[str, Any]:
    """The file of `--speculative-adaptive-config`: the passes of a head, by the first batch size of each range."""
    return {str(each.first): {"candidate_steps": [each.length]} for each in served.ranges}


def _tensorrt_llm(served: Served) -> dict[str, Any]:
    """Arguments of `tensorrt_llm.LLM`. A batch size of the schedule is the largest one of its length; the smallest one
    must have the longest chains, so both ends of its range are given."""
    config = {
        "decoding_type": "Draft_Target",
        "speculative_model": served.draft,
        "max_draft_len": served.longest,
        "draft_len_schedule": {1: served.longest, **{each.last: each.length for each in served.ranges}},
        **({"use_rejection_sampling": True} if served.sampled else {}),
    }
    return {"max_batch_size": served.requests, "speculative_config": config}


def samples(setting: SamplingSetting) -> bool:
    """Whether drafts are sampled; else they are the most probable tokens."""
    return (setting.temperature if setting.draft_temperature is None else setting.draft_temperature) > 0


ENGINES = {
    "vllm": Engine(
        read="0.33.0",
        default=5,
        lengths=lambda longest: range(longest + 1),
        settings=_vllm,
        command=lambda served, file: (
            f'vllm serve {served.target} --max-num-seqs {served.requests} --speculative-config "$(cat {file})"'
        ),
        limits="""\
- With a draft model, model runner V2 (the default where possible) makes `num_speculative_tokens` passes of the draft
  for every batch, without CUDA graphs, and masks what the table does not ask for. The predictions charge all of these
  passes, and the longest chain was chosen with them; time the steps on this runner, too. Model runner V1
  (`VLLM_USE_V2_MODEL_RUNNER=0`) drafts what the table says, but verifies token by token.
- The batch size counts requests whose prompts are being read.
- With data parallelism vLLM ignores the table and drafts `num_speculative_tokens` everywhere.
- vLLM has no default number of tokens. 5 is the example of its documentation.""",
        blocks=True,
        masks=True,
        suffix="json",
    ),
    "sglang": Engine(
        read="0.5.23",
        default=3,
        lengths=lambda longest: range(longest, longest + 1),
        settings=_sglang,
        command=lambda served, file: f"python -m sglang.launch_server --config {file}",
        limits="""\
- A separate draft model (`STANDALONE`) drafts one number of tokens for all batch sizes. SGLang adapts it to the batch
  only for EAGLE and EAGLE-3 heads, and refuses rejection sampling and block verification for a draft model.
- Drafts are the most probable tokens, and the target's own draw verifies them.
- 3 tokens are its default for a draft model.""",
        samples=False,
    ),
    "tensorrt-llm": Engine(
        read="1.3",
        default=3,
        lengths=lambda longest: range(min(1, longest), longest + 1),
        settings=_tensorrt_llm,
        command=lambda served, file: f"trtllm-serve {served.target} --config {file}",
        limits="""\
- The smallest batch size must have the longest chains, and a length of 0 means 1, as in this table.
- Version 1.2 verifies `max_draft_len` tokens whatever the table says: there, leave the table out and set
  `max_draft_len` to the length of the batch size that you serve most.
- Drafts are the most probable tokens unless `use_rejection_sampling` is set, which is a prototype and needs FlashInfer.
- TensorRT-LLM has no default number of tokens. 3 is the example of its documentation.""",
        first_is_longest=True,
    ),
}

# As above, where the draft is an EAGLE-3 head; TensorRT-LLM's file for a head is not known here.
OF_HEADS = {
    "vllm": replace(
        ENGINES["vllm"],
        masks=False,
        limits=ENGINES["vllm"].limits.partition("token by token.\n")[2],  # the first is about draft models
    ),
    "sglang": replace(
        ENGINES["sglang"],
        lengths=lambda longest: range(longest + 1),
        command=lambda served, file: (
            f"python -m sglang.launch_server --config {file} --speculative-adaptive "
            f"--speculative-adaptive-config {file.removesuffix('.yaml')}.steps.json"
        ),
        steps=_sglang_steps,
        limits="""\
- The second file gives every batch size one number of steps, so SGLang's adaptive mode has nothing to adapt but the
  batch. With CUDA graphs a batch counts as the graph's size that it is padded to.
- Drafts are the most probable tokens, and the target's own draw verifies them.
- The gain is that over 3 tokens.""",
    ),
}


def engine_of(name: str, head: bool) -> Engine:
    """An engine by name; InputError where there is no file for a head."""
    if head and name not in OF_HEADS:
        raise InputError(f"export.engine: there is no file for {name} with a head, only for {', '.join(OF_HEADS)}")
    return (OF_HEADS if head else ENGINES)[name]
