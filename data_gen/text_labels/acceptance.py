"""How far a verifier accepts walks along a text, whose drafts are given.

*Top-down*, the solver must yield the text's token at every depth.

*Bottom-up*, the siblings that are visited before the text's token must reject, and the walk goes on
with that token's entry weight. A subtree accepts with its entry weight on average over the drafts
in it, so no sibling's subtree is needed. Entry weights depend on the trunk above the branches, and
all trunk lengths are taken together.

Legend: M walks, L trunk lengths (1 top-down), k child-list entries, N questions put to a rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from data_gen.verification.base import BottomUp, TopDown
from data_gen.verification.distributions import NodeDistributions, divide


@dataclass
class Acceptance(ABC):
    """Of M walks by one verifier. P(accepted down to here) is `rejected * entry`.

    Attributes:
        rejected_ML: P(everything that is visited before the text rejects), 1 top-down.
        entry_ML: the entry weight of the text's last token; top-down P(it is reached).
    """

    verifier: TopDown | BottomUp
    rejected_ML: Tensor
    entry_ML: Tensor

    def of(self, walks_m: Tensor) -> Self:
        """Of some of the walks."""
        return replace(self, rejected_ML=self.rejected_ML[walks_m], entry_ML=self.entry_ML[walks_m])

    @classmethod
    def joined(cls, parts: Sequence[Acceptance]) -> Self:
        rejected_ML = torch.cat([part.rejected_ML for part in parts])
        return cls(parts[0].verifier, rejected_ML, torch.cat([part.entry_ML for part in parts]))

    @abstractmethod
    def after_one_branch(self, p_M1: Tensor, q_M1: Tensor) -> Self:
        """After a depth that has one branch, which is the text's token."""

    @abstractmethod
    def after_branches(
        self, node: NodeDistributions, entries_Mk: Tensor, is_text_Mk: Tensor
    ) -> Self:
        """After a depth that has several branches, of which some are the text's token."""


@dataclass
class TopDownAcceptance(Acceptance):
    verifier: TopDown

    def after_one_branch(self, p_M1: Tensor, q_M1: Tensor) -> Self:
        return replace(self, entry_ML=self.entry_ML * self.verifier.accept(p_M1, q_M1))

    def after_branches(
        self, node: NodeDistributions, entries_Mk: Tensor, is_text_Mk: Tensor
    ) -> Self:
        pull_Mk = self.verifier.pull(node, entries_Mk)
        return replace(self, entry_ML=self.entry_ML * (pull_Mk * is_text_Mk).sum(-1, keepdim=True))


@dataclass
class BottomUpAcceptance(Acceptance):
    verifier: BottomUp

    def after_one_branch(self, p_M1: Tensor, q_M1: Tensor) -> Self:
        return replace(self, entry_ML=(self.entry_ML * divide(p_M1, q_M1)).clamp(max=1))

    def after_branches(
        self, node: NodeDistributions, entries_Mk: Tensor, is_text_Mk: Tensor
    ) -> Self:
        # trunks of several lengths often give the same weight, and each question is asked once
        is_new_ML = torch.ones_like(self.entry_ML, dtype=torch.bool)
        is_new_ML[:, 1:] = self.entry_ML[:, 1:] != self.entry_ML[:, :-1]
        walk_N, trunk_N = is_new_ML.nonzero().unbind(-1)
        question_ML = (is_new_ML.flatten().cumsum(0) - 1).view_as(self.entry_ML)
        entry_Nk, _, order_Nk = self.verifier.split(
            node.rows.at(node.nodes_M[walk_N]), self.entry_ML[walk_N, trunk_N], entries_Mk[walk_N]
        )
        is_text_Nk = is_text_Mk[walk_N]
        if order_Nk is not None:
            entry_Nk = entry_Nk.gather(-1, order_Nk)
            is_text_Nk = is_text_Nk.gather(-1, order_Nk)
        # further copies of a token have weight 0
        is_before_Nk = is_text_Nk.cumsum(-1) == 0
        rejected_N = torch.where(is_before_Nk, 1 - entry_Nk, 1.0).prod(-1)
        text_entry_N = (entry_Nk * is_text_Nk).sum(-1)
        rejected_ML = self.rejected_ML * rejected_N[question_ML]
        return replace(self, rejected_ML=rejected_ML, entry_ML=text_entry_N[question_ML])


def before_branches(verifier: TopDown | BottomUp, entry_ML: Tensor) -> Acceptance:
    """Of M walks that begin, with the entry weights that trunks of L lengths leave."""
    one_ML = torch.ones_like(entry_ML)
    if isinstance(verifier, TopDown):
        return TopDownAcceptance(verifier, one_ML[:, :1], one_ML[:, :1])
    return BottomUpAcceptance(verifier, one_ML, entry_ML)
