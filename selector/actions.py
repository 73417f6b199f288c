"""The actions that a selector chooses from: delayed trees of a shape and a style, shapes by rank,
lookups of a length, and both in one tree.

Legend: A actions, S survivals, D depths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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


def _order(part: Action) -> tuple[int, ...]:
    """The order of survivals, first by the kind of action: 0 for chains, 1 for branches, 2 for
    lookups, 3 for shapes by rank."""
    if part.ranks:
        return (3,)
    if part.copies:
        return 2, part.L1
    if part.children:
        return 1, len(STYLES)
    if part.K == 1:
        return 0, part.L1
    return 1, STYLES.index(part.style_name), *part[:3]


EMPTY = Action(1, 0, 0)  # no token is drafted: autoregressive decoding
LARGEST = 256  # each number of a space is below this, so that its tables stay small
WIDE_DEPTH = 3  # tokens of a branch of trees that are wider than `max_K`


class Grid(NamedTuple):
    """Delayed trees of all combinations of some numbers of branches, and of trunks and branches up
    to two lengths."""

    widths: tuple[int, ...]  # K > 1, ascending
    max_L1: int
    max_L2: int
    # the numbers of children of every token of a branch, but of its last; empty for one child each
    below: tuple[int, ...] = ()

    def action(self, K: int, L1: int, L2: int, style: str) -> Action:
        """The tree of these sizes."""
        if self.below:
            return Action.branching((K, *self.below))
        return Action(K, L1, L2, style)


@dataclass(frozen=True)
class ActionSpace:
    """All distinct delayed trees with `K <= max_K`, `L1 <= max_L1` and `L2 <= max_L2` in ascending
    order, and those of the `wide` numbers of branches from the root, of up to `WIDE_DEPTH` tokens:
    first those with i.i.d. branches, then the branching ones of each further style; then trees that
    branch at every level; then shapes by rank; then lookups; then shapes with a lookup in the same
    tree.

    `(K, L1, 0)` is the same chain for every `K`, and `(1, L1, L2)` is the chain of length
    `L = L1 + L2`. A chain is represented as `(1, min(L, max_L1), max(0, L - max_L1))`.
    """

    max_K: int
    max_L1: int
    max_L2: int
    lookups: tuple[int, ...] = ()
    styles: tuple[str, ...] = ()  # besides i.i.d.
    wide: tuple[int, ...] = ()  # numbers of branches above `max_K`, ascending
    ranked: tuple[Action, ...] = ()  # shapes by rank, with and without a lookup
    # the numbers of children of trees that branch at every level
    children: tuple[tuple[int, ...], ...] = ()
    # of the delayed trees that branch, these alone; None for all
    delayed: tuple[Action, ...] | None = None

    @classmethod
    def default(cls) -> ActionSpace:
        """The space of the paper, with 233 actions: `K` in 1..4, `L1` and `L2` in 0..8."""
        return cls(4, 8, 8)

    @classmethod
    def with_lookups(cls) -> ActionSpace:
        """The default space and lookups of 2, 4, 8 and 16 tokens."""
        return cls(4, 8, 8, (2, 4, 8, 16))

    @classmethod
    def recorded(cls) -> ActionSpace:
        """The trees that are labelled along a pair's texts: the default space, and greedy trees of
        the same shapes."""
        return cls(4, 8, 8, styles=(GREEDY,))

    @classmethod
    def with_wide_trees(cls) -> ActionSpace:
        """The recorded trees; up to 32 branches of up to three tokens from the root, as engines
        draft them, i.i.d. and greedy ones; and trees that branch at every level."""
        children = ((2, 2, 1), (2, 2, 2), (3, 2, 1), (4, 2, 1), (4, 2, 2), (4, 4), (6, 2, 1))
        return replace(cls.recorded(), wide=(6, 8, 12, 16, 24, 32), children=children)

    @classmethod
    def of_pairs(cls) -> ActionSpace:
        """The actions of a pair's selector: the recorded trees and the lookups of
        `with_lookups`."""
        return replace(cls.recorded(), lookups=cls.with_lookups().lookups)

    @classmethod
    def chains(cls, longest: int, longest_lookup: int) -> ActionSpace:
        """The actions of an engine that drafts no trees: chains and lookups of every length up to
        the given ones."""
        return cls(1, longest, 0, tuple(range(1, longest_lookup + 1)))

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> ActionSpace:
        """The space of `to_json`."""
        return cls(
            values["max_K"],
            values["max_L1"],
            values["max_L2"],
            tuple(values["lookups"]),
            tuple(values["styles"]),
            tuple(values["wide"]),
            tuple(map(Action.of, values["ranked"])),
            tuple(map(tuple, values["children"])),
            None if values["delayed"] is None else tuple(map(Action.of, values["delayed"])),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "max_K": self.max_K,
            "max_L1": self.max_L1,
            "max_L2": self.max_L2,
            "lookups": list(self.lookups),
            "styles": list(self.styles),
            "wide": list(self.wide),
            "ranked": [list(shape) for shape in self.ranked],
            "children": [list(numbers) for numbers in self.children],
            "delayed": None if self.delayed is None else [list(tree) for tree in self.delayed],
        }

    def restricted_to(self, actions: Iterable[Action]) -> ActionSpace:
        """The chains and lookups of this space, and of its other actions those that are given."""
        kept = set(actions)
        return replace(
            self,
            ranked=tuple(shape for shape in self.ranked if shape in kept),
            children=tuple(c for c in self.children if Action.branching(c) in kept),
            delayed=tuple(tree for tree in self._delayed if tree in kept),
        )

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """The branching delayed trees of each style."""
        narrow = Grid(tuple(range(2, self.max_K + 1)), self.max_L1, self.max_L2)
        wide = Grid(self.wide, 0, min(WIDE_DEPTH, self.max_L2))
        return tuple(grid for grid in (narrow, wide) if grid.widths and grid.max_L2 > 0)

    @cached_property
    def branchings(self) -> tuple[tuple[str, Grid], ...]:
        """The grids of all styles, and one for each tree that branches at every level, in the order
        of their survivals."""
        at_every_level = []
        for first, *below in self.children:
            at_every_level.append((IID, Grid((first,), 0, 1 + len(below), tuple(below))))
        return (*product((IID, *self.styles), self.grids), *at_every_level)

    @property
    def _delayed(self) -> Sequence[Action]:
        """The delayed trees that branch, first the i.i.d. ones."""
        if self.delayed is not None:
            return self.delayed
        delayed: list[Action] = []
        for style, (widths, max_L1, max_L2, _) in product((IID, *self.styles), self.grids):
            for K, L1, L2 in product(widths, range(max_L1 + 1), range(1, max_L2 + 1)):
                delayed.append(Action(K, L1, L2, style))
        return delayed

    @cached_property
    def trees(self) -> tuple[Action, ...]:
        """The actions that the draft alone drafts, and the empty tree."""
        trees = [self.chain(length) for length in range(self.depth + 1)]
        trees += self._delayed
        trees += map(Action.branching, self.children)
        return (*trees, *(shape for shape in self.ranked if not shape.copied))

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, in the order of `scores` and of labels."""
        unions = [shape for shape in self.ranked if shape.copied]
        return (*self.trees, *map(Action.copy, self.lookups), *unions)

    @cached_property
    def needs_draft_A(self) -> Tensor:
        """Which actions need a forward pass of the draft, bool [A]."""
        return torch.tensor([action.drafts for action in self])

    @property
    def depth(self) -> int:
        """Largest depth of a delayed tree, in tokens."""
        return self.max_L1 + self.max_L2

    @property
    def deepest(self) -> int:
        """Largest depth of any action, in tokens."""
        return max(self.depth, *(action.depth for action in self))

    @cached_property
    def survivals(self) -> tuple[Action, ...]:
        """What the block efficiencies of all actions are sums of: a survival `P(tau >= depth)` is
        named by the part of an action down to that depth, on which alone it depends, so that
        actions which begin alike share it.

        Chains come first, by depth; then branches by style, K, trunk length L1 and depth below it;
        trees that branch at every level; lookups by depth; shapes by rank. For example, `E[tau +
        1]` of (3, 2, 4) is 1 + the chain's first two + the first four of K = 3 at L1 = 2.
        """
        parts: dict[Action, None] = {}
        for action in self:
            parts |= dict.fromkeys(action.parts)
        return tuple(sorted(parts, key=_order))

    @cached_property
    def survivals_by_part(self) -> tuple[int, int, int, int]:
        """How many of the survivals belong to chains, to branches, to lookups and to shapes by
        rank, in their order."""
        sizes = [0, 0, 0, 0]
        for part in self.survivals:
            sizes[_order(part)[0]] += 1
        return sizes[0], sizes[1], sizes[2], sizes[3]

    @property
    def tree_survivals(self) -> int:
        """How many of the survivals belong to delayed trees."""
        return sum(self.survivals_by_part[:2])

    @cached_property
    def _position_of(self) -> dict[Action, int]:
        return {part: position for position, part in enumerate(self.survivals)}

    def positions(self, action: Action) -> list[int]:
        """Positions of an action's survivals, by depth."""
        return [self._position_of[part] for part in action.parts]

    @cached_property
    def sums_SA(self) -> Tensor:
        """Which survivals add up to each action's block efficiency: zeros and ones, float32
        [S, A]."""
        sums_SA = torch.zeros(len(self.survivals), len(self))
        for a, action in enumerate(self):
            sums_SA[self.positions(action), a] = 1
        return sums_SA

    def survival_factors(self) -> Tensor:
        """Which conditional acceptance probabilities each survival is the product of: zeros and
        ones, float32 [S, S]. The s-th is a factor of survival t where entry (s, t) is 1."""
        factors_SS = torch.zeros(len(self.survivals), len(self.survivals))
        for t, part in enumerate(self.survivals):
            factors_SS[self.positions(part), t] = 1
        return factors_SS

    @cached_property
    def steps(self) -> list[tuple[Tensor, Tensor]]:
        """For depth 1, 2, ..: positions of the survivals of that depth, and of those one token
        before, int64; before the first token it is S."""
        by_depth: list[tuple[list[int], list[int]]] = [([], []) for _ in range(self.deepest)]
        for part in self.survivals:
            before, at = [len(self.survivals), *self.positions(part)][-2:]
            positions, positions_before = by_depth[part.depth - 1]
            positions.append(at)
            positions_before.append(before)
        return [(torch.tensor(at), torch.tensor(before)) for at, before in by_depth]

    def positions_in(self, labelled: ActionSpace) -> Tensor:
        """Positions of the trees' survivals among those of a space that has them, int64
        [tree_survivals]."""
        parts = self.survivals[: self.tree_survivals]
        return torch.tensor([labelled._position_of[part] for part in parts], dtype=torch.int64)

    @cached_property
    def survival_of_AD(self) -> Tensor:
        """Position of each action's `P(tau >= depth)` among the survivals, for depth 1, 2, ..,
        int64 [A, D]. Beyond the action's own depth it is S."""
        positions = [torch.tensor(self.positions(action), dtype=torch.int64) for action in self]
        return pad_sequence(positions, batch_first=True, padding_value=len(self.survivals))

    def efficiencies(self, survivals_S: Tensor) -> Tensor:
        """Block efficiencies of all actions in tokens, [..., A], from survivals [..., S]."""
        return 1 + survivals_S @ self.sums_SA.to(survivals_S)

    @cached_property
    def _index(self) -> dict[Action, int]:
        return {action: i for i, action in enumerate(self.actions)}

    def chain(self, length: int) -> Action:
        """The chain of `length` drafted tokens as the space represents it."""
        return Action(1, min(length, self.max_L1), max(0, length - self.max_L1))

    def index(self, action: Action) -> int:
        """Position in `actions` of the action that drafts the same tokens; ValueError where there
        is none."""
        K, L1, L2 = action[:3]
        branches = K > 1 and L2 > 0
        canonical = action
        if not (branches or action.is_certain or action.children):
            canonical = self.chain(L1 + L2)
        if canonical not in self._index or min(K, L1 + 1, L2 + 1) < 1:
            words = [f"K in 1..{self.max_K}, L1 in 0..{self.max_L1}, L2 in 0..{self.max_L2}"]
            if self.styles:
                words.append(f"style {' or '.join((IID, *self.styles))}")
            if self.wide:
                words.append(f"K in {self.wide} at the root")
            if self.ranked:
                words.append(f"{len(self.ranked)} shapes by rank")
            words.append(f"lookups of {self.lookups or 'no'} tokens")
            raise ValueError(f"{action} is not in the space of {', '.join(words)}")
        return self._index[canonical]

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)
