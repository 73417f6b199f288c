"""The texts of a server's requests, which it recognises by their tokens alone.

A step that reads a long text from its beginning would hold up all other requests, so a step reads a
part of it.

Legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.features.root import DrafterKnowledge

READ = 1024  # tokens of long texts that a step reads, in some ten milliseconds
NEW = 32  # tokens that it reads of every text besides, more than a step adds
KEPT = 16  # requests that are left out of a step and are kept, at least


class _Request:
    def __init__(self, knowledge: DrafterKnowledge) -> None:
        self.ids_N: NDArray[np.int64] = np.empty(0, np.int64)
        self.ids = b""  # their bytes, which are compared more quickly
        self.knowledge = knowledge

    @property
    def unread(self) -> int:
        return len(self.ids_N) - len(self.knowledge.text.index)

    def read(self, most: int) -> int:
        """Add at most so many tokens to the knowledge; their number."""
        begin = len(self.knowledge.text.index)
        tokens = self.ids_N[begin : begin + most].tolist()
        self.knowledge.committed(tokens)
        return len(tokens)


class Requests:
    """The requests that decode, and those that were left out of the last steps: preempted ones go
    on. As many are kept as decode, or `KEPT`.

    Args:
        begin: the knowledge of a text of which nothing is read, given its prompt's length.
    """

    def __init__(self, begin: Callable[[int], DrafterKnowledge]) -> None:
        self._begin = begin
        self._requests: list[_Request] = []  # the last used ones first

    def step(
        self, texts: Sequence[NDArray[Any]], new: Sequence[int]
    ) -> list[DrafterKnowledge | None]:
        """What is known of texts of token ids [N] whose last tokens, `new` of each, are this
        step's; None for one that is still being read. A text that was unknown before them began
        then with its prompt."""
        present: list[_Request] = []
        left = READ
        for ids_N, count in zip(texts, new, strict=True):
            ids_N = np.array(ids_N, np.int64)  # the engine's own array changes
            request = self._request_of(ids_N[: len(ids_N) - count])
            request.ids_N = ids_N
            request.ids = ids_N.tobytes()
            left -= max(0, request.read(left + NEW) - NEW)
            present.append(request)
        absent = self._requests[: max(len(present), KEPT)]
        self._requests = [*present, *absent]
        return [None if request.unread else request.knowledge for request in present]

    def _request_of(self, before_N: NDArray[Any]) -> _Request:
        """The request whose text ended so in an earlier step, which is taken out; else a new
        one."""
        before = before_N.tobytes()
        for number, request in enumerate(self._requests):
            if request.ids == before:
                return self._requests.pop(number)
        return _Request(self._begin(len(before_N)))
