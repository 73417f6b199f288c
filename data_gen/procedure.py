"""The straightforward way to label, as in DDTE: every action drafts and verifies trees of its own.

Kept to measure the supertree against: the same models, caches, batches and verifiers, `samples` trees per action side
by side. It takes `L1 + L2 - 1` draft passes and one target pass per action, some 2,000 per root.

Legend: S samples, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_gen.drafting import Layout, action_layout, draft_layout
from data_gen.trajectories import TrajectoryLabeller
from data_gen.trees import DraftTree, Forest
from data_gen.verification import get_verifier
from selector.actions import EMPTY, Action


@torch.inference_mode()
def label_action(
    labeller: TrajectoryLabeller,
    length: int,
    action: Action,
    samples: int,
    verifiers: Sequence[str],
    generator: torch.Generator,
) -> Tensor:
    """E[tau + 1] of an action on independent trees of its own, exact given each; float64 [verifier, S].

    Args:
        generator: on the CPU.
    """
    if action == EMPTY:
        return torch.ones(len(verifiers), samples, dtype=torch.float64)
    layout = action_layout(action)
    uniforms_SN = torch.rand(samples, len(layout.parents) - 1, generator=generator, dtype=torch.float64)
    roots_SV = labeller.root_probs(length).expand(samples, -1)
    sampling = labeller.sampling.draft
    tokens_SN, q_SNV, _ = draft_layout(
        labeller.draft.prefixes([length] * samples), roots_SV, layout, sampling, uniforms_SN
    )
    trees, sources = zip(*(_tree(tokens_N, layout) for tokens_N in tokens_SN.tolist()), strict=True)
    p_SNV = labeller.target_probs(trees, [length] * samples)
    forest = Forest(trees)
    p_NV = torch.cat([p_SNV[s, : len(tree)] for s, tree in enumerate(trees)])
    q_NV = torch.cat([q_SNV[s, source] for s, source in enumerate(sources)])
    own_N = torch.arange(samples).repeat_interleave(torch.tensor(list(map(len, trees))))
    rows = []
    for name in verifiers:
        stops_N = get_verifier(name).stops(forest, p_NV, q_NV).cpu()
        rows.append(torch.zeros(samples, dtype=torch.float64).index_add_(0, own_N, stops_N * (1 + forest.depths_N)))
    return torch.stack(rows)


def passes(action: Action) -> int:
    """Model passes for an action; the draft's first distribution comes with the prefix."""
    return 0 if action == EMPTY else action.L1 + action.L2


def _tree(tokens: list[int], layout: Layout) -> tuple[DraftTree, list[int]]:
    """The tree with equal prefixes merged, and for each of its nodes one of the layout that stands for it."""
    branches = layout.branches[-1]
    tree = DraftTree.from_paths([tokens[n] for n in layout.trunk], [[tokens[n] for n in path] for path in branches])
    source = [0] * len(tree)
    trunk = tree.path_to(tree.branch_nodes[0][0])
    for nodes, own in [(trunk, layout.trunk), *((n[1:], b) for n, b in zip(tree.branch_nodes, branches, strict=True))]:
        for node, slot in zip(nodes, own, strict=True):
            source[node] = slot
    return tree, source
