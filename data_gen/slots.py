"""Drafted trees with fixed slots, for decoding steps without host synchronisation.

`DraftTree` merges equal prefixes, so Python must read the tokens. Here every drafted token has a slot of its own, and
the device finds the equal prefixes. The slots of (2, 1, 2), a trunk of one token and two branches of two:

    slot     0     1       2          3          4          5
    is       root  trunk   branch 0   branch 1   branch 0   branch 1
    depth    0     1       2          2          3          3

Legend: S slots, K branches, D depth, E entries (children) of a node.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from data_gen.trees import ancestors
from selector.actions import Action

ABSENT = -1  # fills up a list of entries


class Layout:
    """The slots of an action's tokens. All tensors are int64 or bool, and on the given device.

    A chain and a lookup are a trunk alone, with K = 1. `order_S` are the slots in the order of a `DraftTree`'s nodes.
    The first `inner` slots have children; `levels` are the slots of each depth from the trunk's end on.
    """

    def __init__(self, action: Action, device: torch.device) -> None:
        if action.K == 1 or action.L2 == 0:
            self.K, self.L1, self.L2 = 1, action.L1 + action.L2, 0
        else:
            self.K, self.L1, self.L2 = action.K, action.L1, action.L2
        parents = [-1, *range(self.L1)]
        for depth in range(self.L2):
            parents += [self.slot(depth, k) if depth else self.L1 for k in range(self.K)]
        paths: list[list[int]] = [[]]
        for slot, parent in enumerate(parents[1:], 1):
            paths.append([*paths[parent], slot])
        branches = [self.slot(depth, k) for k in range(self.K) for depth in range(1, self.L2 + 1)]
        self.size, self.depth, self.inner = len(parents), self.L1 + self.L2, len(parents) - self.K
        ends = [self.L1, *(self.slot(depth, 0) for depth in range(1, self.L2 + 2))]
        self.levels = [slice(*each) for each in pairwise(ends)]
        self.parents_S = torch.tensor(parents, device=device)
        self.depths_S = torch.tensor([len(path) for path in paths], device=device)
        self.ancestors_SS = ancestors(parents).to(device)
        self.paths_SD = torch.tensor(
            [path + [0] * (self.depth - len(path)) for path in paths], dtype=torch.int64, device=device
        )
        self.order_S = torch.tensor([*range(self.L1 + 1), *branches], device=device)

    def slot(self, depth: int, k: int) -> int:
        """The slot of branch `k` at this depth below the trunk, 1 being its first token."""
        return self.L1 + 1 + (depth - 1) * self.K + k


@cache
def layout_of(action: Action, device: torch.device) -> Layout:
    return Layout(action, device)


class Merged:
    """Which slots of a drafted tree hold the same path from the root, and its children, without host synchronisation.

    Attributes:
        first_S: the first slot with the same path; int64.
        entries_SE: the drafted tokens after each path, at its first slot, in branch order with duplicates, filled up
            with `ABSENT`; all `ABSENT` at other slots; int64, E = K.
        children_SE: the first slot of each entry's path; 0 where the entry is absent.
    """

    def __init__(self, layout: Layout, tokens_S: Tensor) -> None:
        K, L1, L2 = layout.K, layout.L1, layout.L2
        device = tokens_S.device
        self.tokens_S = tokens_S
        self.first_S = torch.arange(layout.size, device=device)
        self.entries_SE = torch.full((layout.size, K), ABSENT, device=device)
        self.children_SE = torch.zeros_like(self.entries_SE)
        self.entries_SE[:L1, 0] = tokens_S[1 : L1 + 1]
        self.children_SE[:L1, 0] = self.first_S[1 : L1 + 1]
        if L2 > 0:
            tokens_DK = tokens_S[L1 + 1 :].view(L2, K)
            same_DKK = (tokens_DK.unsqueeze(-1) == tokens_DK.unsqueeze(-2)).to(torch.uint8).cumprod(0)
            first_DK = same_DKK.argmax(-1)
            starts_D1 = L1 + 1 + K * torch.arange(L2, device=device).unsqueeze(-1)
            self.first_S[L1 + 1 :] = (starts_D1 + first_DK).flatten()
            self.entries_SE[L1], self.children_SE[L1] = tokens_DK[0], starts_D1[0] + first_DK[0]
            # below: the branches with one path, in order, at the first of them; the first slots of their next tokens
            is_first_DK = first_DK == torch.arange(K, device=device)
            member_DKK = same_DKK[:-1].bool() & is_first_DK[:-1].unsqueeze(-1)
            order_DKK = (~member_DKK).to(torch.uint8).argsort(dim=-1, stable=True)
            there_DKK = member_DKK.gather(-1, order_DKK)
            for values_SE, below_DK, none in (
                (self.entries_SE, tokens_DK[1:], ABSENT),
                (self.children_SE, starts_D1[1:] + first_DK[1:], 0),
            ):
                below_DKK = below_DK.unsqueeze(1).expand(-1, K, -1).gather(-1, order_DKK)
                values_SE[L1 + 1 : layout.inner] = torch.where(there_DKK, below_DKK, none).flatten(0, 1)
        self.there_SE = self.entries_SE != ABSENT
        self.count_S = self.there_SE.sum(-1)
        self.is_first_S = self.first_S == torch.arange(layout.size, device=device)
