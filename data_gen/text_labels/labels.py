"""Labels along a text: what every tree would have yielded at every position, without drafting one.

The text follows the target's law, as a text of any lossless decoder does. At a *root* (one of its positions) let a tree
be drafted and verified. Of all outcomes, keep only those that lead to the text that stands there. The probability of
each accepted length, given the text, then depends only on the two models' rows along the text:

    S_t = P(tau >= t | text) = E over the drafts [ P(draft) P(accepted down to depth t | draft) ] / P(text),

and `1 + sum_t S_t` has the mean `E[tau + 1]` over texts. With x the text's token at a depth and p, q the rows
before it:

*Chain.* The draft must be x, which has probability q(x), where the text gave it p(x). So a step multiplies by
`q/p min(1, p/q) = min(1, q/p)` top-down; bottom-up (Block Verification) S_t is the smallest of 1 and the running
products of q/p. With p(x) = 0.5 and q(x) = 0.4, a chain of one token would have been accepted with S_1 = 0.8.

*Branches* (`data_gen.text_labels.branch_walks`). k branches still stand on the text. One of their k next tokens, at a
uniformly drawn place, is x; the other k - 1, its siblings, are drawn from q. If m of the k are x, a draft gives x
`k q(x) / (m p(x))` times as often as the text does. Top-down the solver must then yield x (`pull`). Bottom-up the
siblings that are visited before x must reject, each with one minus its entry weight on average over the drafts below
it. The walk goes on with x's entry weight and m branches. Trees of another style are labelled for the verifier that
takes the given one's place there (`data_gen.verification.styled`).

*A head's chain.* A head's rows depend on the root and on the depth below it (`data_gen.models.heads`). From one
root it is a draft like any other, so the same products hold with q of this root at each depth. It has no branches here.

A row of survivals S (`ActionSpace.sums_SA`) is the law of tau of all trees.

Legend: T tokens, R roots, V vocabulary, B tokens of a block, L trunk lengths, D depths, S survivals, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from data_gen.text_labels.branch_walks import Walks
from data_gen.verification import Verifier, get_verifier, styled
from data_gen.verification.base import BottomUp, TopDown
from data_gen.verification.distributions import divide, exact_sums, most_likely
from data_gen.verification.khisti import Khisti
from data_gen.verification.one_path import FirstPath
from data_gen.verification.sorted_rows import SortedRows
from selector.actions import GREEDY, ActionSpace

ELEMENTS = 1 << 22  # probabilities of one model that are sorted at once


def label_text(
    tokens_T: Tensor,
    target_probs_TV: Tensor,
    draft_probs_TV: Tensor,
    verifiers: Sequence[str],
    siblings: int | None = 1,
    generator: torch.Generator | None = None,
    space: ActionSpace | None = None,
) -> Tensor:
    """Block efficiency E[tau + 1 | text] of every action at every root, float64 [verifier, root, action], in tokens.

    Roots are 0 .. T - 1 - (max_L1 + max_L2); root r is committed up to token r.

    Args:
        tokens_T: int64, of a text that follows the target's law.
        target_probs_TV, draft_probs_TV: row t is the distribution after token t; float64, float32 or bf16, on any
            device; normalised in float64. Of a head the draft's rows are [T, D, V]: row t, d is its distribution below
            root t behind the next d tokens of the text; for a space of chains alone.
        siblings: how many draws of the siblings are averaged; None enumerates all of them, for small vocabularies.
        generator: of the siblings' draws; torch's own if None.
        space: the actions; the default space if None. Its greedy trees rank tokens of draft probability 0 by their ids.

    Raises:
        ValueError: the shapes do not fit, no root has its whole look-ahead, the text holds a token of probability 0
            under the target, or a verifier is unknown or has no labels along a text.
    """
    space = space or ActionSpace.default()
    if not len(tokens_T) == len(target_probs_TV) == len(draft_probs_TV):
        raise ValueError(
            f"{len(tokens_T)} tokens need as many rows; target has {len(target_probs_TV)}, draft {len(draft_probs_TV)}"
        )
    labeller = TextLabeller(tokens_T, verifiers, siblings, generator, space)
    ahead_TD = None
    if draft_probs_TV.dim() == 3:
        draft_probs_TDV, draft_probs_TV = draft_probs_TV, draft_probs_TV[:, 0]
        next_TD = torch.cat([tokens_T[1:], tokens_T.new_zeros(space.depth)]).unfold(0, space.depth, 1)
        ahead_TD = draft_probs_TDV.gather(-1, next_TD.unsqueeze(-1))[..., 0].double() / exact_sums(draft_probs_TDV)
    size = block_rows(target_probs_TV.shape[-1])
    for begin in range(0, len(tokens_T), size):
        own = slice(begin, begin + size)
        ahead_BD = None if ahead_TD is None else ahead_TD[own]
        labeller.add(target_probs_TV[own], draft_probs_TV[own], ahead_BD=ahead_BD)
    return space.efficiencies(labeller.survivals())


def block_rows(vocabulary: int) -> int:
    """How many rows of a text are taken at once, which bounds the memory."""
    return max(32, ELEMENTS // vocabulary)


def labelled_verifier(name: str) -> TopDown | BottomUp:
    """A verifier that has labels along a text; for verifiers of the first path, that of chains. ValueError where it is
    unknown, compares whole paths (GBV), or needs a linear program for each node (Khisti)."""
    verifier = get_verifier(name)
    if isinstance(verifier, TopDown | BottomUp) and not isinstance(verifier, Khisti):
        return verifier
    if isinstance(verifier, FirstPath):
        return verifier.chain
    raise ValueError(f"{name} has no labels along a text")


class TextLabeller:
    """Survivals along one text, from blocks of rows in the order of the text; see `label_text` for the arguments."""

    def __init__(
        self,
        tokens_T: Tensor,
        verifiers: Sequence[str],
        siblings: int | None = 1,
        generator: torch.Generator | None = None,
        space: ActionSpace | None = None,
    ) -> None:
        self.space = space or ActionSpace.default()
        self.tokens_T = tokens_T
        self.roots = len(tokens_T) - self.space.depth
        if self.roots < 1:
            raise ValueError(f"{len(tokens_T)} tokens leave no root with a look-ahead of {self.space.depth}")
        self.verifiers = [labelled_verifier(name) for name in verifiers]
        self.branching = self.space.max_K > 1 and self.space.max_L2 > 0
        self.walked: list[list[TopDown | BottomUp]] = [  # by style, the verifier of each verifier's branches
            self.verifiers,
            *([_own(styled(each, style)) for each in self.verifiers] for style in self.space.styles),
        ]
        self.walks = [Walks(verifiers, siblings, generator, self.space) for verifiers in self.walked]
        self.by_first_path = [isinstance(get_verifier(name), FirstPath) for name in verifiers]
        self._p: list[Tensor] = []  # of the text's own next tokens, block by block
        self._q: list[Tensor] = []
        self._ahead: list[Tensor] = []  # of a head: q of the next `depth` tokens, [B, D] each
        self._seen = 0
        self._rows: SortedRows | None = None  # of the last block
        self._late = 0  # how many of them may still be reached by branches that begin there
        self._likely: Tensor | None = None  # the draft's most likely tokens after each of the last block's rows
        self._branches: list[list[list[Tensor]]] = [[[] for _ in verifiers] for _ in self.walks]

    def add(
        self,
        target_probs_BV: Tensor,
        draft_probs_BV: Tensor,
        draft_logits_BV: Tensor | None = None,
        ahead_BD: Tensor | None = None,
    ) -> None:
        """The rows after the next B tokens; the draft's logits rank tokens of probability 0 for greedy trees.

        `ahead_BD` are a head's probabilities of the text's next D tokens, float64; its space has no branches."""
        next_B = self.tokens_T[self._seen + 1 : self._seen + 1 + len(target_probs_BV)].to(target_probs_BV.device)
        own = target_probs_BV[: len(next_B)], draft_probs_BV[: len(next_B)]
        self._seen += len(target_probs_BV)
        if len(next_B) == 0:
            return
        # p and q of the text's tokens, from which chains follow
        p_B, q_B = (each.gather(-1, next_B.unsqueeze(-1))[:, 0].double() / exact_sums(each) for each in own)
        if bool((p_B <= 0).any()):
            at = int((p_B <= 0).nonzero()[0]) + sum(map(len, self._p)) + 1
            raise ValueError(f"token {at} of the text has probability 0 under the target")
        if ahead_BD is not None:
            if self.branching:
                raise ValueError(f"a head drafts chains: trees of up to {self.space.max_K} branches have no labels")
            self._ahead.append(ahead_BD[: len(next_B)])
        self._p.append(p_B)
        self._q.append(q_B)
        if self.branching:
            begin = self._seen - len(target_probs_BV) - self._late
            self._rows = SortedRows(*own, self._rows, self._late)
            if GREEDY in self.space.styles:
                logits_BV = None if draft_logits_BV is None else draft_logits_BV[: len(next_B)]
                likely_BK = most_likely(own[1], self.space.max_K, logits_BV)
                kept_BK = likely_BK[:0] if self._likely is None else self._likely[len(self._likely) - self._late :]
                self._likely = torch.cat([kept_BK, likely_BK])
            count = max(0, len(self._rows.p_NV) - self.space.max_L2 + 1)
            if count > 0:
                self._branch(self._rows, begin, count)
            self._late = len(self._rows.p_NV) - count

    def _chain(self, since: int = 0) -> tuple[Tensor, list[Tensor]]:
        """Chains from every root on, the first at `since`: running products of q/p, and each verifier's factor.

        Each is [R, D + 1]. The factor is the products of `accept` top-down, and the entry weight bottom-up.
        """
        p_T, q_T = torch.cat(self._p)[since:], torch.cat(self._q)[since:]
        depth = self.space.depth

        def ahead(values_T: Tensor) -> Tensor:
            padded = torch.cat([values_T, values_T.new_zeros(depth)])  # the padding is never read
            return padded.unfold(0, depth, 1)[: len(values_T)]

        def products(values_TD: Tensor) -> Tensor:
            values_TD = values_TD.cumprod(-1)
            return torch.cat([torch.ones_like(values_TD[:, :1]), values_TD], dim=-1)

        p_TD, q_TD = ahead(p_T), torch.cat(self._ahead)[since:] if self._ahead else ahead(q_T)
        weights = [torch.ones_like(p_T)]
        for ratio_T in divide(p_TD, q_TD).unbind(-1):
            weights.append((weights[-1] * ratio_T).clamp(max=1))
        entry_TD = torch.stack(weights, dim=-1)
        factors = [
            products(verifier.accept(p_TD, q_TD)) if isinstance(verifier, TopDown) else entry_TD
            for verifier in self.verifiers
        ]
        return products(divide(q_TD, p_TD)), factors

    def _branch(self, rows: SortedRows, begin: int, count: int) -> None:
        device, space = rows.device, self.space
        tokens_B = self.tokens_T[begin + 1 : begin + 1 + len(rows.p_NV)].to(device)
        since = max(0, begin - space.max_L1)
        _, chain = self._chain(since)
        trunk_L = torch.arange(space.max_L1 + 1, device=device)
        root_BL = torch.arange(begin, begin + count, device=device).unsqueeze(-1) - trunk_L
        weights_BL = {
            v: chain[v][root_BL.clamp(min=since) - since, trunk_L.expand_as(root_BL)] * (root_BL >= 0)
            for v, verifier in enumerate(self.verifiers)
            if isinstance(verifier, BottomUp)
        }
        for walks, branches in zip(self.walks, self._branches, strict=True):
            for own, below in zip(branches, walks.down(rows, tokens_B, count, weights_BL, self._likely), strict=True):
                own.append(below)

    def survivals(self) -> Tensor:
        """S of every root, float64 [verifier, R, S], in the order of `ActionSpace.sums_SA`, once all rows are added."""
        if self._seen < len(self.tokens_T):
            raise ValueError(f"{len(self.tokens_T)} tokens need as many rows; there are {self._seen}")
        drafted_TD, chain = self._chain()
        max_L2, result = self.space.max_L2, []
        for v, verifier in enumerate(self.verifiers):
            chain_RD = (drafted_TD * chain[v])[: self.roots]
            factor_TD = drafted_TD * chain[v] if isinstance(verifier, TopDown) else drafted_TD
            survivals = [chain_RD[:, 1:]]
            for style, branches in enumerate(self._branches):
                # i.i.d. branches on the first path are the chain's continuation
                with_branches = self.branching and (style > 0 or not self.by_first_path[v])
                below = torch.cat(branches[v]) if with_branches else None  # [branching position, K, level(, L1)]
                for K, L1 in product(range(self.space.max_K - 1), range(self.space.max_L1 + 1)):
                    if below is None:
                        survivals.append(chain_RD[:, L1 + 1 : L1 + 1 + max_L2])
                        continue
                    own = below[L1 : L1 + self.roots, K]
                    own = own if isinstance(verifier, TopDown) else own[..., L1]
                    survivals.append(factor_TD[: self.roots, L1, None] * own)
            result.append(torch.cat(survivals, dim=-1))
        return torch.stack(result)


def _own(verifier: Verifier) -> TopDown | BottomUp:
    assert isinstance(verifier, TopDown | BottomUp)
    return verifier
