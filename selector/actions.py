"""The actions that a selector chooses from: delayed trees of a shape and a style, and lookups of a
length.

Legend: A actions, S survivals, D depths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
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


class Action(NamedTuple):
    """What is verified at a root: a delayed tree of a trunk of `L1` tokens, then `K` branches of
    `L2` tokens (DDTE, section 3), whose first tokens are drawn in a style of `STYLES`; or, with the
    style `COPY`, a chain of `L1` tokens that followed the longest earlier match of the text's
    end."""

    K: int
    L1: int
    L2: int
    style: str = IID

    @classmethod
    def copy(cls, length: int) -> Action:
        """A lookup of `length` tokens."""
        return cls(1, length, 0, COPY)

    @classmethod
    def of(cls, values: Iterable[Any]) -> Action:
        """From JSON or a user: K, L1, L2 and perhaps a style; TypeError for anything else."""
        shape = tuple(values)
        numbers, style = shape[:3], shape[3:]
        styles = (*STYLES, COPY)
        valid_numbers = [type(size) for size in numbers] == [int, int, int]
        valid_style = len(style) == 0 or (len(style) == 1 and style[0] in styles)
        if not (valid_numbers and valid_style):
            raise TypeError(f"{shape} is not K, L1, L2 and perhaps a style of {', '.join(styles)}")
        return cls(*shape)

    @property
    def nodes(self) -> int:
        """Number of drafted tokens; equal prefixes of i.i.d. branches count separately."""
        return self.L1 + self.K * self.L2

    @property
    def copies(self) -> bool:
        """Whether it is a lookup."""
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
        if self.distinct:
            return f"({self.K}, {self.L1}, {self.L2}, {self.style})"
        return f"({self.K}, {self.L1}, {self.L2})"


EMPTY = Action(1, 0, 0)  # no token is drafted: autoregressive decoding
LARGEST = 256  # each number of a space is below this, so that its tables stay small


@dataclass(frozen=True)
class ActionSpace:
    """All distinct delayed trees with `K <= max_K`, `L1 <= max_L1` and `L2 <= max_L2` in ascending
    order: first those with i.i.d. branches, then the branching ones of each further style; then
    lookups. Where `widths` are given, they are the only numbers of branches.

    `(K, L1, 0)` is the same chain for every `K`, and `(1, L1, L2)` is the chain of length
    `L = L1 + L2`. A chain is represented as `(1, min(L, max_L1), max(0, L - max_L1))`.
    """

    max_K: int
    max_L1: int
    max_L2: int
    lookups: tuple[int, ...] = ()
    styles: tuple[str, ...] = ()  # besides i.i.d.
    widths: tuple[int, ...] = ()  # the numbers K > 1 of branches; empty for all up to max_K

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
    def wide(cls) -> ActionSpace:
        """Up to 32 branches of up to three tokens from the root, as engines draft them: i.i.d. and
        greedy ones."""
        return cls(32, 0, 3, styles=(GREEDY,), widths=(2, 3, 4, 6, 8, 12, 16, 24, 32))

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
            tuple(values["widths"]),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        entries = asdict(self)
        for name in ("lookups", "styles", "widths"):
            entries[name] = list(entries[name])
        return entries

    @cached_property
    def branch_counts(self) -> tuple[int, ...]:
        """The numbers K > 1 of branches that trees may have, ascending."""
        return self.widths or tuple(range(2, self.max_K + 1))

    @cached_property
    def trees(self) -> tuple[Action, ...]:
        """The actions that the draft drafts, and the empty tree."""
        sizes = self.branch_counts, range(self.max_L1 + 1), range(1, self.max_L2 + 1)
        branching = [Action(K, L1, L2) for K, L1, L2 in product(*sizes)]
        chains = [self.chain(length) for length in range(self.depth + 1)]
        trees = sorted(chains + branching)
        for style in self.styles:
            trees += [action._replace(style=style) for action in branching]
        return tuple(trees)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, in the order of `scores` and of labels."""
        return (*self.trees, *map(Action.copy, self.lookups))

    @cached_property
    def needs_draft_A(self) -> Tensor:
        """Which actions need a forward pass of the draft, bool [A]."""
        return torch.tensor([action.drafts for action in self])

    @property
    def depth(self) -> int:
        """Largest depth of a tree, in tokens."""
        return self.max_L1 + self.max_L2

    @property
    def deepest(self) -> int:
        """Largest depth of any action, in tokens."""
        return max(self.depth, *self.lookups, 0)

    @property
    def tree_survivals(self) -> int:
        """How many of the survivals belong to trees."""
        branches = (1 + len(self.styles)) * len(self.branch_counts)  # pairs of a style and a K
        return self.depth + branches * (self.max_L1 + 1) * self.max_L2

    @cached_property
    def sums_SA(self) -> Tensor:
        """Which survivals add up to each action's block efficiency: zeros and ones, float32 [S, A].

        The survivals `P(tau >= t)` are ordered: those of the chain by depth; those of branches by
        style, K, trunk length L1 and depth below it, which do not depend on L2; those of lookups by
        depth. For example, `E[tau + 1]` of (3, 2, 4) is 1 + the chain's first two + the first four
        of K = 3 at L1 = 2.
        """
        sums_SA = torch.zeros(self.tree_survivals + max(self.lookups, default=0), len(self))
        for a, action in enumerate(self):
            sums_SA[self._positions_by_depth(action), a] = 1
        return sums_SA

    def _positions_by_depth(self, action: Action) -> list[int]:
        K, L1, L2, style = action
        if action.copies:
            return list(range(self.tree_survivals, self.tree_survivals + L1))
        if K == 1:
            return list(range(L1 + L2))
        counts = self.branch_counts
        branches = (IID, *self.styles).index(style) * len(counts) + counts.index(K)
        start = self.depth + (branches * (self.max_L1 + 1) + L1) * self.max_L2
        return [*range(L1), *range(start, start + L2)]

    def survival_factors(self) -> Tensor:
        """Which conditional acceptance probabilities each survival is the product of: zeros and
        ones, float32 [S, S]. The s-th is a factor of survival t where entry (s, t) is 1. The order
        is that of `sums_SA`."""
        factors_SS = torch.zeros(len(self.sums_SA), len(self.sums_SA))
        longest_lookup = max(self.lookups, default=0)
        lookups = [Action.copy(length) for length in range(1, longest_lookup + 1)]
        for action in (*self.trees, *lookups):
            path = self._positions_by_depth(action)
            factors_SS[path, path[-1:]] = 1
        return factors_SS

    @cached_property
    def survival_of_AD(self) -> Tensor:
        """Position of each action's `P(tau >= depth)` among the survivals, for depth 1, 2, ..,
        int64 [A, D]. Beyond the action's own depth it is S."""
        positions = [
            torch.tensor(self._positions_by_depth(action), dtype=torch.int64) for action in self
        ]
        return pad_sequence(positions, batch_first=True, padding_value=len(self.sums_SA))

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
        K, L1, L2, _ = action
        branches = K > 1 and L2 > 0
        canonical = action if action.copies or branches else self.chain(L1 + L2)
        if canonical not in self._index or min(K, L1 + 1, L2 + 1) < 1:
            styles = ""
            if self.styles:
                styles = f", style {' or '.join((IID, *self.styles))}"
            K_values = f"1..{self.max_K}"
            if self.widths:
                K_values = f"{(1, *self.widths)}"
            raise ValueError(
                f"{action} is not in the space of K in {K_values}, L1 in 0..{self.max_L1}, "
                f"L2 in 0..{self.max_L2}{styles}, lookups of {self.lookups or 'no'} tokens"
            )
        return self._index[canonical]

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)
