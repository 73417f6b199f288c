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

from data_gen.decoding import Decoded, Step
from data_gen.drafting import draft_supertrees
from data_gen.features import Row, root_features
from data_gen.labels import survivals
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.trees import DraftTree, Supertree
from selector.actions import ActionSpace
from selector.schema import HIDDEN_STATES, SCALAR_NAMES, SCALARS_KEY, TRACE_SCALARS, label_columns


def seed_of(*parts: object) -> int:
    """A seed that follows from the parts alone: not from the worker, nor from the order of work."""
    digest = hashlib.sha256("|".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@dataclass(frozen=True)
class Root:
    """A position to label: `length` committed tokens, the root token included; `step` if the decoder stood there."""

    length: int
    step: Step | None


def choose_roots(prompt: Sequence[int], decoded: Decoded, count: int, stride: int, seed: int) -> list[Root]:
    """Half of the roots from the decoder's own steps, at random; half at every `stride`-th token, the first ones."""
    generator = torch.Generator().manual_seed(seed)
    eligible = [step for step in decoded.steps if step.length > 1]
    order = torch.randperm(len(eligible), generator=generator).tolist()[: count // 2]
    steps = [Root(eligible[i].length, eligible[i]) for i in sorted(order)]
    total = len(prompt) + len(decoded.tokens)
    strides = [Root(length, None) for length in range(max(len(prompt), 2), total + 1, stride)]
    return steps + strides[: count - count // 2]


class TrajectoryLabeller:
    """Labels roots of one trajectory for several verifiers.

    Args:
        tokens: prompt and continuation.
        samples: supertrees per root, even.
    """

    @torch.inference_mode()
    def __init__(
        self, pair: ModelPair, tokens: Sequence[int], sampling: Sampling, samples: int, verifiers: Sequence[str]
    ) -> None:
        self.pair, self.tokens, self.sampling = pair, tokens, sampling
        self.samples, self.verifiers = samples, list(verifiers)
        self.target, self.draft = CachedModel(pair.target), CachedModel(pair.draft)
        passes = self.target.extend(tokens), self.draft.extend(tokens)
        self.target_logits_TV, self.draft_logits_TV = (p.logits_BWV[0] for p in passes)
        self.target_hidden_TD, self.draft_hidden_TD = (p.hidden_BWD[0] for p in passes)

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
    def labels(self, length: int, seed: int) -> dict[str, Tensor]:
        """Labels of every verifier at a root, by the columns of `selector.schema.label_columns`, [A] each."""
        generator = torch.Generator(device=self.pair.device).manual_seed(seed)
        samples = self.supertrees(length, self.samples, generator)
        survival_VSAT = survivals(samples, self.verifiers).cpu()
        efficiency_VSA = survival_VSAT.sum(-1)
        u_VA1 = torch.rand(*survival_VSAT[:, 0, :, :1].shape, generator=torch.Generator().manual_seed(seed + 1))
        realised_VA = (u_VA1 < survival_VSAT[:, 0]).sum(-1)  # P(tau >= 0) is 1: counts tau + 1
        result = {}
        for v, name in enumerate(self.verifiers):
            columns = label_columns(name)
            result[columns["mean"]] = efficiency_VSA[v].mean(0)
            result[columns["error"]] = efficiency_VSA[v].std(0) / self.samples**0.5
            result[columns["half"]] = efficiency_VSA[v, : self.samples // 2].mean(0)
            result[columns["realised"]] = realised_VA[v].to(torch.uint8)
        return result

    def supertrees(
        self, length: int, samples: int, generator: torch.Generator
    ) -> list[tuple[Supertree, Tensor, Tensor]]:
        """Supertrees at a root with the target's and the draft's distributions after their nodes, [N, V] each."""
        sampling = self.sampling.draft
        drafts = draft_supertrees(
            self.draft.prefix(length, samples),
            self.root_probs(length),
            samples,
            ActionSpace.default(),
            sampling,
            generator,
        )
        targets = self.target_probs([tree for tree, _ in drafts], length)
        return [(tree, p_NV, q_NV) for (tree, q_NV), p_NV in zip(drafts, targets, strict=True)]

    def root_probs(self, length: int) -> Tensor:
        """The draft's distribution after the root token, [V]."""
        return self.sampling.draft.probabilities(self.draft_logits_TV[length - 1])

    def target_probs(self, trees: Sequence[Supertree | DraftTree], length: int) -> list[Tensor]:
        """The target's distributions after every node of every tree, in one pass; [N, V] each."""
        width = max(len(tree) for tree in trees)
        tokens_SN = torch.zeros(len(trees), width, dtype=torch.int64)
        depths_SN = torch.zeros_like(tokens_SN)
        visible_SNN = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)  # padding sees itself
        for s, tree in enumerate(trees):
            n = len(tree)
            tokens_SN[s, :n], depths_SN[s, :n] = tree.tokens_N, tree.depths_N
            visible_SNN[s, :n, :n] = tree.ancestors_NN()
        tokens_SN[:, 0] = self.tokens[length - 1]
        device = self.pair.device
        target = self.target.prefix(length - 1, len(trees))
        logits_SNV = target.forward(tokens_SN.to(device), depths_SN.to(device), visible_SNN).logits_BWV
        return [self.sampling.probabilities(logits_SNV[s, : len(tree)]) for s, tree in enumerate(trees)]
