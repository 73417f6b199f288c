"""A draft model of llama-cpp-python that copies from the text, or drafts with a model, as a
selector decides.

Read and run in llama-cpp-python 0.3.36 (`llama_cpp/llama_speculative.py`). Its `Llama.generate`
asks the draft model after every step, and verifies what it returns in one forward pass.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from data_gen.engines.requests import Requests
from data_gen.engines.text import Chains, TextSelector, no_harm


class VerifyingLlama(Llama):
    """A `Llama` that computes the logits of every token only where a pass verifies drafted ones.

    With a draft model, `Llama` itself computes those of the prompt, too, fails beyond `n_batch`
    tokens without `logits_all`, and with it takes room for the logits of `n_ctx` tokens. Logprobs
    are refused.
    """

    n_tokens: int

    def __init__(self, model_path: str, **options: Any) -> None:
        super().__init__(model_path, **options)
        # else `Llama` would give logprobs from rows that were not computed
        self._logits_all = False
        self._verifies = False

    def generate(self, *args: Any, **options: Any) -> Generator[int, Sequence[int] | None]:
        """Continue a prompt, as `Llama` does."""
        self._verifies = False  # the first tokens are the prompt's, or what it has beyond the last
        yield from super().generate(*args, **options)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate further tokens of the text; of those that are verified, at most `n_batch`."""
        if self._verifies and len(tokens) > 1:
            self._verify(tokens[: self.n_batch])
        else:
            super().eval(tokens)
        self._verifies = True

    def _verify(self, tokens: Sequence[int]) -> None:
        """As `Llama.eval`, whose sampler reads the logits where llama.cpp has them: `scores` need
        no copy."""
        begin = self.n_tokens
        self._ctx.kv_cache_seq_rm(-1, begin, -1)
        self._batch.set_batch(batch=tokens, n_past=begin, logits_all=True)
        self._ctx.decode(self._batch)
        self.n_tokens = begin + len(tokens)
        self.input_ids[begin : self.n_tokens] = tokens
        self._requires_eval = False


class SelectedDrafts(LlamaDraftModel):
    """`VerifyingLlama(path, draft_model=SelectedDrafts("runs/mine/selector"))`; for a selector of a
    log that had a drafter, `chains` are those of a `CachedDrafter`. The other arguments are
    those of `TextSelector`.

    A draft is lossless: llama-cpp-python keeps a drafted token where it equals the one that it
    samples. InputError as `TextSelector`.
    """

    def __init__(
        self,
        selector: str | Path | None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        chains: Chains | None = None,
        steps: str | Path | None = None,
        way_out: bool = True,
    ) -> None:
        self._selector = TextSelector(selector, temperature, top_p, chains, steps, way_out)
        self._requests = Requests(partial(self._selector.text, ()))
        # of the last call
        self._ids_N: NDArray[np.intc] = np.empty(0, np.intc)
        self._draft: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """The tokens to verify after `input_ids`, int32; the first call of a text has its prompt
        and one token, and each further one at most the accepted draft and one more."""
        new = len(input_ids) - len(self._ids_N)
        goes_on = 0 < new <= len(self._draft) + 1
        if not (goes_on and np.array_equal(input_ids[:-new], self._ids_N)):
            new = 1
        self._ids_N = input_ids.copy()
        self._draft = []
        with no_harm():
            (text,) = self._requests.step([input_ids], [new])
            if text is not None:
                (self._draft,) = self._selector.drafts([text], [len(input_ids)])
        return np.array(self._draft, np.intc)
