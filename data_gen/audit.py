"""What every verifier yields at one root, exact given the drafted trees: the measurements behind `make audit`.

Legend: A actions, D trunk depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.drafting import draft_topology, draft_tree, draw_children, nodes_of
from data_gen.expected import expected_labels
from data_gen.sampling import Sampling
from data_gen.trajectories import TrajectoryLabeller
from data_gen.trees import DraftTree, Topology
from data_gen.verification import STYLED, VERIFIERS, TopDown, acceptance, get_verifier, optimal_acceptance
from data_gen.verification.acceptance import CLOSED_FORMS
from data_gen.verification.base import GREEDY, IID, WITHOUT_REPLACEMENT
from data_gen.verification.profile import Rows
from selector.actions import Action, ActionSpace

MOST_TOKENS = 1 << 14  # `alpha*` without replacement goes token by token: seconds a node beyond
DRAWS = 16  # child lists per node, where acceptance has no closed form
WITHOUT = "specinfer", "naive_tree"  # top-down verifiers whose acceptance without replacement is estimated


@dataclass(frozen=True)
class Variant:
    """Another way to draft: a branching style, a draft temperature (as a multiple of the target's), or a shape."""

    name: str
    verifiers: tuple[str, ...]
    style: str = IID
    heat: float = 1.0
    topology: Topology | None = None


def efficiencies(
    labeller: TrajectoryLabeller, length: int, verifiers: Sequence[str], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """One supertree: block efficiency [verifier, A]; and along its trunk the overlap and the L1 distance, [D] each."""
    uniforms_1N = torch.rand(1, nodes_of(ActionSpace.default()), generator=generator, dtype=torch.float64)
    batch = labeller.supertrees([length], uniforms_1N)
    inner_D = batch.trunk_ST[0, :-1]
    distance_D = (batch.rows.p_NV[inner_D].double() - batch.rows.q_NV[inner_D].double()).abs().sum(-1)
    return expected_labels(batch, verifiers)[:, 0].cpu(), (1 - distance_D / 2).cpu(), distance_D.cpu()


def variant_efficiencies(
    labeller: TrajectoryLabeller, length: int, variant: Variant, action: Action, generator: torch.Generator
) -> dict[str, float]:
    """Block efficiency by verifier on one tree of a variant; of `action`'s shape unless the variant has its own."""
    own = labeller.sampling.draft
    sampling = Sampling(own.temperature * variant.heat, own.top_p)
    root_V = sampling.probabilities(labeller.draft_logits_TV[length - 1])
    draft = labeller.draft.prefix(length)
    tree: DraftTree
    if variant.topology is None:
        drafted = draft_tree(draft, root_V, action, sampling, generator, variant.style)
        tree, q_NV = drafted.tree, drafted.probs_NV
    else:
        tree, q_NV = draft_topology(draft, root_V, variant.topology, sampling, generator, variant.style)
    p_NV = labeller.target_probs([tree], [length])[0]
    return {name: get_verifier(name, variant.style).block_efficiency(tree, p_NV, q_NV) for name in variant.verifiers}


def acceptances(p_V: Tensor, q_V: Tensor, generator: torch.Generator) -> dict[tuple[str, int, str], float]:
    """Acceptance at one node by (style, k, rule); the rule `optimum` is `alpha*`."""
    result: dict[tuple[str, int, str], float] = {}
    for k in range(1, ActionSpace.default().max_K + 1):
        result |= {(IID, k, name): acceptance(name, p_V, q_V, k) for name in CLOSED_FORMS}
        result |= {(IID, k, "optimum"): optimal_acceptance(p_V, q_V, k)}
        if k > 1:
            result[GREEDY, k, "optimum"] = optimal_acceptance(p_V, q_V, k, GREEDY)
            if int((q_V > 0).sum()) <= MOST_TOKENS:
                result[WITHOUT_REPLACEMENT, k, "optimum"] = optimal_acceptance(p_V, q_V, k, WITHOUT_REPLACEMENT)
            result |= {(WITHOUT_REPLACEMENT, k, name): _drawn(name, p_V, q_V, k, generator) for name in WITHOUT}
    return result


def _drawn(name: str, p_V: Tensor, q_V: Tensor, k: int, generator: torch.Generator) -> float:
    """Mean acceptance over child lists drawn without replacement; exact given the lists."""
    verifier = (VERIFIERS | STYLED)[name](WITHOUT_REPLACEMENT)
    assert isinstance(verifier, TopDown)
    node_M = torch.zeros(1, dtype=torch.int64, device=p_V.device)
    profile = Rows(p_V.double().unsqueeze(0), q_V.double().unsqueeze(0)).profile(node_M)
    total = 0.0
    for _ in range(DRAWS):
        entries = draw_children(q_V, k, WITHOUT_REPLACEMENT, generator)
        total += float(verifier.pull(profile, torch.tensor([entries], device=p_V.device)).sum())
    return total / DRAWS
