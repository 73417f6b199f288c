"""A plug-in of vLLM whose drafters take turns, vLLM's own n-grams among them. Two servers that do
the same may differ by some percent as long as they run; in one server the drafters alone differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from data_gen.engines.vllm import Proposer


class Turns:
    """The drafter whose name the file `turn` has; `additional_config` names that file, and for each
    of the `drafters` what a server of its own would be given as `speculative_config` and
    `additional_config`."""

    def __init__(self, vllm_config: Any) -> None:
        additional = vllm_config.additional_config
        self._turn = Path(additional["turn"])
        self._drafters: list[Any] = []
        self._propose: dict[str, Callable[..., list[list[int]]]] = {}
        for name, (speculative, options) in additional["drafters"].items():
            of_drafter = {
                "speculative_config": SimpleNamespace(**speculative),
                "additional_config": options,
            }
            config = SimpleNamespace(**{**vars(vllm_config), **of_drafter})
            if speculative["method"] == "ngram":
                drafter = NgramProposer(config)
                propose = partial(drafter.propose, speculative["num_speculative_tokens"])
            else:
                drafter = create_custom_proposer(config)
                propose = drafter.propose
            self._drafters.append(drafter)
            self._propose[name] = propose

    def load_model(self, *args: Any, **named: Any) -> None:
        """Load the models of those that have some."""
        for drafter in self._drafters:
            drafter.load_model(*args, **named)

    def propose(self, *args: Any, **named: Any) -> list[list[int]]:
        """What the one whose turn it is proposes."""
        return self._propose[self._turn.read_text()](*args, **named)


class Silent(Proposer):
    """Works as always, but its drafts are not proposed: what a step takes beside a drafter that
    drafts nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **named: Any) -> Any:
        super().propose(sampled_token_ids, *args, **named)
        return [[] for _ in sampled_token_ids]
