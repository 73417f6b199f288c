"""One action: what is drafted, or copied, and verified at a root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

# How the first tokens of a tree's branches are sampled (MDSD, section 2): independently; without
# replacement; or as the K - 1 most likely tokens and one sample of the others. Below its first
# token each branch is a sampled chain.
IID = "iid"
WITHOUT_REPLACEMENT = "without_replacement"
GREEDY = "greedy"
STYLES = (IID, WITHOUT_REPLACEMENT, GREEDY)
COPY = "copy"  # the style of a lookup, whose tokens are copied from the text
RANKED = "ranked"  # the name of the style of a shape by rank
Ranks = tuple[tuple[int, ...], ...]  # paths of ranks from the root, closed under prefixes
MOST_RANKS = 32  # ranks of a node's children are below this
MOST_DEPTH = 8  # of a shape by rank


class Action(NamedTuple):
    """What is verified at a root, in one of three forms.

    A *delayed tree* (DDTE, section 3) has a trunk of `L1` tokens, then `K` branches of `L2` tokens,
    whose first tokens are drawn in a style of `STYLES`.

    A *lookup*, with the style `COPY`, is the chain of the `L1` tokens that followed the longest
    earlier match of the text's end.

    A *shape by rank* has its paths of ranks as style, and a node for each: (0, 2) is the draft's
    third choice after its first. Such static trees are those of Medusa, EAGLE and Sequoia (arXiv
    2402.12374). A lookup of `L1` tokens, if that is not 0, stands in the same tree. `K` is the
    number of the root's children by rank, and `L2` the depth of the shape.

    A tree that *branches at every level* has as style the numbers of children (k1, k2, ..) that
    every drafted token has, one depth after another, all drawn independently; `K` is the first
    number, and `L2` the depth.
    """

    K: int
    L1: int
    L2: int
    style: str | Ranks | tuple[int, ...] = IID

    @classmethod
    def copy(cls, length: int) -> Action:
        """A lookup of `length` tokens."""
        return cls(1, length, 0, COPY)

    @classmethod
    def ranked(cls, paths: Iterable[Iterable[int]], copied: int = 0) -> Action:
        """The shape of some paths of ranks, with a lookup of `copied` tokens in the same tree.
        ValueError where a path's prefix is missing, or there is no path."""
        ranks: Ranks = tuple(sorted({tuple(path) for path in paths}, key=_breadth_first))
        known: set[tuple[int, ...]] = {()}
        for path in ranks:
            if not path or path[:-1] not in known:
                raise ValueError(f"{list(path)}: the shape lacks the path before its last rank")
            known.add(path)
            if not 0 <= path[-1] < MOST_RANKS or len(path) > MOST_DEPTH:
                limits = f"ranks in 0..{MOST_RANKS - 1}, at most {MOST_DEPTH} of them"
                raise ValueError(f"{list(path)} is no path of {limits}")
        if not ranks:
            raise ValueError("a shape by rank has at least one path")
        children = sum(len(path) == 1 for path in ranks)
        return cls(children, copied, len(ranks[-1]), ranks)

    @classmethod
    def branching(cls, children: Sequence[int]) -> Action:
        """The tree with so many children of every token, depth by depth; ValueError for a number
        below 1."""
        if min(children) < 1:
            raise ValueError(f"{list(children)}: a token has at least one child")
        return cls(children[0], 0, len(children), tuple(children))

    @classmethod
    def of(cls, values: Iterable[Any]) -> Action:
        """From JSON or a user: K, L1, L2 and perhaps a style, which may be the paths of a shape by
        rank, or numbers of children by depth; TypeError for anything else."""
        shape = tuple(values)
        numbers, style = shape[:3], shape[3:]
        styles = (*STYLES, COPY)
        valid_numbers = [type(size) for size in numbers] == [int, int, int]
        if valid_numbers and len(style) == 1 and isinstance(style[0], list | tuple):
            if style[0] and all(isinstance(children, int) for children in style[0]):
                return cls.branching(style[0])
            return cls.ranked(style[0], copied=shape[1])
        valid_style = len(style) == 0 or (len(style) == 1 and style[0] in styles)
        if not (valid_numbers and valid_style):
            raise TypeError(f"{shape} is not K, L1, L2 and perhaps a style of {', '.join(styles)}")
        return cls(*shape)

    @property
    def ranks(self) -> Ranks:
        """The paths of ranks of a shape, shorter ones first; none of another action."""
        if isinstance(self.style, str) or isinstance(self.style[0], int):
            return ()
        return self.style

    @property
    def children(self) -> tuple[int, ...]:
        """Of a tree that branches at every level, the numbers of children; none of another one."""
        if isinstance(self.style, str) or not isinstance(self.style[0], int):
            return ()
        return self.style

    @property
    def style_name(self) -> str:
        """The style; `RANKED` of a shape by rank, `IID` where every level branches."""
        if isinstance(self.style, str):
            return self.style
        return RANKED if self.ranks else IID

    @property
    def nodes(self) -> int:
        """Number of drafted tokens; equal prefixes of i.i.d. branches count separately, and so do
        tokens that are copied and drafted."""
        if self.ranks:
            return self.L1 + len(self.ranks)
        if self.children:
            return sum(accumulate(self.children, mul))
        return self.L1 + self.K * self.L2

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(self.L1, self.L2) if self.ranks else self.L1 + self.L2

    @property
    def parts(self) -> tuple[Action, ...]:
        """What of it there is down to depth 1, 2, ..; down to a depth with one branch, a chain."""
        return tuple(self._down_to(depth) for depth in range(1, self.depth + 1))

    def _down_to(self, depth: int) -> Action:
        if self.ranks:
            ranks = tuple(path for path in self.ranks if len(path) <= depth)
            return Action(self.K, min(self.L1, depth), min(self.L2, depth), ranks)
        if self.children:
            return Action.branching(self.children[:depth])
        if self.copies:
            return Action.copy(depth)
        if depth <= self.L1 or self.K == 1:
            return Action(1, depth, 0)
        return self._replace(L2=depth - self.L1)

    @property
    def inner_widths(self) -> list[int]:
        """Of a tree that is not a delayed one, how many nodes with children there are at each depth
        from 1 on; equal tokens count separately."""
        if self.children:
            return list(accumulate(self.children, mul))[:-1]
        inner = {path[:-1] for path in self.ranks if len(path) > 1}
        return [sum(len(path) == depth for path in inner) for depth in range(1, self.L2)]

    @property
    def is_certain(self) -> bool:
        """Whether its tokens are certain given the text: none is drawn."""
        return self.style_name in (COPY, RANKED)

    @property
    def copied(self) -> int:
        """Tokens that are copied from the text."""
        return self.L1 if self.is_certain else 0

    @property
    def copies(self) -> bool:
        """Whether it is a lookup, and nothing else."""
        return self.style == COPY

    @property
    def drafts(self) -> bool:
        """Whether it needs a forward pass of the draft."""
        return not self.copies and self.nodes > 0

    @property
    def distinct(self) -> bool:
        """Whether its style makes the first tokens of its branches distinct."""
        return self.style in STYLES[1:]

    def __str__(self) -> str:
        if self.copies:
            return f"lookup {self.L1}"
        if self.ranks:
            shape = f"shape of {len(self.ranks)} nodes, depth {self.L2}"
            return f"{shape}, and lookup {self.L1}" if self.copied else shape
        if self.children:
            return f"tree with {' x '.join(map(str, self.children))} branches"
        if self.distinct:
            return f"({self.K}, {self.L1}, {self.L2}, {self.style})"
        return f"({self.K}, {self.L1}, {self.L2})"


def _breadth_first(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(path), path


EMPTY = Action(1, 0, 0)  # no token is drafted: autoregressive decoding
