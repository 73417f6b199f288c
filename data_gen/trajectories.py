"""A trajectory, the roots taken from it, and their labels.

A trajectory is written by speculative decoding itself. Roots are the decoder's own steps, each of which follows a
rejection, and every n-th token, as in the paper. All roots of a trajectory read one cache of each model.

Legend: S supertrees, N nodes, V vocabulary, D hidden width, T tokens of the trajectory, A actions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_gen.clock import Clock
from data_gen.decoding import Decoded, Step
from data_gen.drafting import draft_supertrees, nodes_of
from data_gen.expected import expected_and_trunk_labels
from data_gen.features import Row, root_features
from data_gen.labels import survivals
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.slots import Batch
from data_gen.trees import DraftTree, Supertree
from data_gen.verification.profile import Rows
from selector.actions import ActionSpace
from selector.schema import (
    HIDDEN_STATES,
    SCALAR_NAMES,
    SCALARS_KEY,
    TRACE_SCALARS,
    TRUNK_COLUMNS,
    label_columns,
)

PARTS = ("draft", "target", "labels")


def seed_of(*parts: object) -> int:
    """A seed that follows from the parts alone: not from the worker, nor from the order of work."""
    digest = hashlib.sha256("|".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@dataclass(frozen=True)
class Root:
    """A position to label.

    Attributes:
        length: committed tokens, the root token included.
        step: the decoder's own, if it stood there.
        weight: how many of the trajectory's own steps it stands for; 1 where it is none of them.
    """

    length: int
    step: Step | None
    weight: float = 1.0


def choose_roots(prompt: Sequence[int], decoded: Decoded, count: int, stride: int, seed: int) -> list[Root]:
    """Half of the roots from the decoder's own steps, at random; half at every `stride`-th token, the first ones.

    Every trajectory gives as many, but hard text is decoded in more steps than easy text: hence the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    eligible = [step for step in decoded.steps if step.length > 1]
    order = torch.randperm(len(eligible), generator=generator).tolist()[: count // 2]
    steps = [Root(eligible[i].length, eligible[i], len(eligible) / len(order)) for i in sorted(order)]
    total = len(prompt) + len(decoded.tokens)
    strides = [Root(length, None) for length in range(max(len(prompt), 2), total + 1, stride)]
    return steps + strides[: count - count // 2]


class TrajectoryLabeller:
    """Labels roots of one trajectory for several verifiers. The trajectory is passed once; all roots read its cache.

    Args:
        tokens: prompt and continuation.
        samples: supertrees per root, even.
        together: supertrees that are drafted, passed and labelled at once, whichever roots they belong to.

    Attributes:
        clock: seconds by part (`PARTS`), over all calls.
    """

    @torch.inference_mode()
    def __init__(
        self,
        pair: ModelPair,
        tokens: Sequence[int],
        sampling: Sampling,
        samples: int,
        verifiers: Sequence[str],
        together: int = 16,
    ) -> None:
        self.pair, self.tokens, self.sampling = pair, tokens, sampling
        self.samples, self.verifiers, self.together = samples, list(verifiers), together
        self.clock = Clock(pair.device, PARTS)
        self.target, self.draft = CachedModel(pair.target), CachedModel(pair.draft)
        target, draft = self.target.extend(tokens), self.draft.extend(tokens)
        self.target.check()
        self.draft.check()
        self.target_logits_TV, self.draft_logits_TV = target.logits_BWV[0], draft.logits_BWV[0]
        self.target_hidden_TD, self.draft_hidden_TD = target.hidden_BWD[0], draft.hidden_BWD[0]
        self.clock.lap("target")

    def features(self, length: int) -> dict[str, Any]:
        """Trace columns of a root's features: what a decoder would have there, pass times apart."""
        prev, root = length - 2, length - 1
        target, draft = self.sampling.probabilities, self.sampling.draft.probabilities
        features = root_features(
            Row(target(self.target_logits_TV[prev]), self.target_hidden_TD[prev]),
            Row(draft(self.draft_logits_TV[prev]), self.draft_hidden_TD[prev]),
            Row(draft(self.draft_logits_TV[root]), self.draft_hidden_TD[root]),
            length,
            self.sampling,
            latency=None,
        )
        columns: dict[str, Any] = {name: features[name].cpu() for name in HIDDEN_STATES}
        scalars = dict(zip(SCALAR_NAMES, features[SCALARS_KEY].tolist(), strict=True))
        return columns | {name: scalars[name] for name in TRACE_SCALARS}

    @torch.inference_mode()
    def labels(self, roots: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
        """Labels of every verifier at some roots, and what is known along their trunks.

        By the columns of `selector.schema.label_columns`, [A] or [S, A] each, and of `TRUNK_COLUMNS`, [S, T] or
        [S, T, D].

        Args:
            roots: length and seed of each; its supertrees follow from the seed, whatever roots it stands with.

        Raises:
            InputError: a model gives something else than finite numbers.
        """
        efficiency: list[Tensor] = []
        own_trunk: list[Tensor] = []
        survival: list[Tensor] = []
        trunks: list[dict[str, Tensor]] = []
        wanted = [(length, seed, sample) for length, seed in roots for sample in range(self.samples)]
        for start in range(0, len(wanted), self.together):
            part = wanted[start : start + self.together]
            uniforms_SN = torch.stack([_uniforms(seed, sample) for _, seed, sample in part])
            batch = self.supertrees([length for length, _, _ in part], uniforms_SN)
            expected, own = expected_and_trunk_labels(batch, self.verifiers)
            efficiency.append(expected.cpu())
            own_trunk.append(own.cpu())
            trunks.append(trunk_columns(batch))
            firsts = [s for s, (_, _, sample) in enumerate(part) if sample == 0]
            if firsts:  # what is realised, is realised on drafted tokens
                survival.append(survivals(batch.only(firsts), self.verifiers).cpu())
            self.clock.lap("labels")
        shape = (len(roots), self.samples)
        efficiency_VBSA, trunk_VBSA = (torch.cat(parts, dim=1).unflatten(1, shape) for parts in (efficiency, own_trunk))
        survival_VBAT = torch.cat(survival, dim=1)
        known = {name: torch.cat([part[name] for part in trunks]).unflatten(0, shape) for name in trunks[0]}
        return [
            {
                **self._columns(efficiency_VBSA[:, b], trunk_VBSA[:, b], survival_VBAT[:, b], seed),
                **{name: values[b] for name, values in known.items()},
            }
            for b, (_, seed) in enumerate(roots)
        ]

    def _columns(self, efficiency_VSA: Tensor, trunk_VSA: Tensor, survival_VAT: Tensor, seed: int) -> dict[str, Tensor]:
        """Trace columns of one root's labels."""
        u_VA1 = torch.rand(*survival_VAT.shape[:2], 1, generator=torch.Generator().manual_seed(seed + 1))
        realised_VA = (u_VA1 < survival_VAT).sum(-1)  # P(tau >= 0) is 1: counts tau + 1
        result = {}
        for v, name in enumerate(self.verifiers):
            columns = label_columns(name)
            result[columns["mean"]] = efficiency_VSA[v].mean(0)
            result[columns["error"]] = efficiency_VSA[v].std(0) / self.samples**0.5
            result[columns["half"]] = efficiency_VSA[v, : self.samples // 2].mean(0)
            result[columns["realised"]] = realised_VA[v].to(torch.uint8)
            result[columns["trunk"]] = trunk_VSA[v]
        return result

    def supertrees(self, lengths: Sequence[int], uniforms_SN: Tensor) -> Batch:
        """A supertree at each of some lengths, with both models' distributions after its nodes.

        Args:
            uniforms_SN: as in `draft_supertrees`.
        """
        self.clock.skip()
        space = ActionSpace.default()
        roots_SV = torch.stack([self.root_probs(length) for length in lengths])
        sampling = self.sampling.draft
        draft = self.draft.prefixes(lengths)
        trees, q_SNV, hidden_STD = draft_supertrees(draft, roots_SV, space, sampling, uniforms_SN)
        roots_S1D = torch.stack([self.draft_hidden_TD[length - 1] for length in lengths]).unsqueeze(1)
        draft.check()
        self.clock.lap("draft")
        p_SNV = self.target_probs(trees, lengths)
        self.clock.lap("target")
        offsets = range(0, p_SNV.shape[0] * p_SNV.shape[1], p_SNV.shape[1])
        rows = Rows(p_SNV.flatten(0, 1), q_SNV.flatten(0, 1))
        return Batch(trees, rows, offsets, torch.cat([roots_S1D, hidden_STD], dim=1))

    def root_probs(self, length: int) -> Tensor:
        """The draft's distribution after the root token, [V]."""
        return self.sampling.draft.probabilities(self.draft_logits_TV[length - 1])

    def target_probs(self, trees: Sequence[Supertree | DraftTree], lengths: Sequence[int]) -> Tensor:
        """The target's distributions after every node of every tree, in one pass; [S, N, V].

        Rows beyond a tree's nodes are without meaning.
        """
        width = max(len(tree) for tree in trees)
        tokens_SN = torch.zeros(len(trees), width, dtype=torch.int64)
        depths_SN = torch.zeros_like(tokens_SN)
        visible_SNN = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)  # padding sees itself
        for s, tree in enumerate(trees):
            n = len(tree)
            tokens_SN[s, :n], depths_SN[s, :n] = tree.tokens_N, tree.depths_N
            visible_SNN[s, :n, :n] = tree.ancestors_NN()
        tokens_SN[:, 0] = torch.tensor([self.tokens[length - 1] for length in lengths])
        device = self.pair.device
        target = self.target.prefixes([length - 1 for length in lengths])
        logits_SNV = target.forward(tokens_SN.to(device), depths_SN.to(device), visible_SNN).logits_BWV
        target.check()
        return self.sampling.probabilities(logits_SNV)


def trunk_columns(batch: Batch) -> dict[str, Tensor]:
    """`TRUNK_COLUMNS` of each supertree: what is known when a trunk token has been drawn, and what becomes of it."""
    assert batch.trunk_hidden_STD is not None
    decisions = batch.space.decisions
    parents_ST, tokens_ST1 = batch.trunk_ST[:, :decisions], batch.tokens_R[batch.trunk_ST[:, 1 : decisions + 1, None]]
    q_STV = batch.rows.q_NV[parents_ST]
    q_ST, p_ST = (rows_NV[parents_ST].gather(-1, tokens_ST1)[..., 0] for rows_NV in (batch.rows.q_NV, batch.rows.p_NV))
    return {
        TRUNK_COLUMNS["hidden"]: batch.trunk_hidden_STD[:, :decisions].cpu(),
        TRUNK_COLUMNS["token_entropy"]: torch.special.entr(q_STV).sum(-1).cpu(),
        TRUNK_COLUMNS["token_logprob"]: q_ST.log().cpu(),
        TRUNK_COLUMNS["accept"]: (p_ST / q_ST).clamp(max=1).cpu(),
    }


def _uniforms(seed: int, sample: int) -> Tensor:
    """What a root's supertree is drawn with: the same on every device, in every order of work."""
    generator = torch.Generator().manual_seed(seed_of(seed, sample))
    return torch.rand(nodes_of(ActionSpace.default()), generator=generator, dtype=torch.float64)
