"""A draft model of llama-cpp-python that copies from the text as a selector decides.

Read and run in llama-cpp-python 0.3.36 (`llama_cpp/llama_speculative.py`). Its `Llama.generate` asks the draft model
after every step, and verifies what it returns in one forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel
from numpy.typing import NDArray

from data_gen.engines.text import TextSelector, grow, no_harm
from data_gen.features.root import DrafterKnowledge


class SelectedCopies(LlamaDraftModel):
    """`Llama(path, draft_model=SelectedCopies("runs/mine/selector"))`, with an artefact of `logs.drafter=none`.

    Copies are lossless under greedy decoding; llama-cpp-python keeps a copied token where it equals the one that it
    samples. InputError as `TextSelector`.
    """

    def __init__(self, selector: str | Path, temperature: float = 0.0, top_p: float = 1.0) -> None:
        self._selector = TextSelector(selector, temperature, top_p)
        self._text: DrafterKnowledge | None = None

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """The tokens to copy after `input_ids`, int32; the first call of a text has its prompt and one token."""
        copied: list[int] = []
        with no_harm():
            if self._text is None or not grow(self._text, input_ids):
                self._text = self._selector.text(input_ids, len(input_ids) - 1)
            (copied,) = self._selector.copies([self._text], [len(input_ids)])
        return np.array(copied, np.intc)
