"""The actions that a selector chooses from: delayed trees of a shape and a style, shapes by rank,
lookups of a length, and both in one tree.

Legend: A actions, S survivals, D depths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selector.action import (
    COPY,
    EMPTY,
    GREEDY,
    IID,
    MOST_DEPTH,
    MOST_RANKS,
    RANKED,
    STYLES,
    WITHOUT_REPLACEMENT,
    Action,
    Ranks,
)

__all__ = [
    "COPY",
    "EMPTY",
    "GREEDY",
    "IID",
    "LARGEST",
    "MOST_DEPTH",
    "MOST_RANKS",
    "RANKED",
    "STYLES",
    "WIDE_DEPTH",
    "WITHOUT_REPLACEMENT",
    "Action",
    "ActionSpace",
    "Grid",
    "Ranks",
]

LARGEST = 256  # each number of a space is below this, so that its tables stay small
WIDE_DEPTH = 3  # tokens of a branch of trees that are wider than `max_K`


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
