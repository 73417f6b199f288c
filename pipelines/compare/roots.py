"""What is found by drafting at a few roots of held-out texts: how well drafts are used, and block
efficiencies as DDTE estimates them, from the exact laws of drafted trees.

MDSD (arXiv 2502.18779) compares how drafts are drawn by the most that any verifier could accept.
Khisti's verifier has no labels along a text, so it is compared on the same drafted trees with one
that has; and the mean of this one's laws with its labels at the same roots, which estimate the same
number.

Legend: R roots, L lists of drafts, k drafts of a list, N nodes, V vocabulary, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_gen.drafting.sampled import Draft, draft_tree
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling, probabilities
from data_gen.traces import space_of
from data_gen.verification import get_verifier, optimal_acceptance
from data_gen.verification.distributions import Rows, sample
from pipelines.config import Config
from pipelines.data.recorded import rows_of, samplings_of
from pipelines.evaluate.table import ACCEPTANCE, DRAFTED, EFFICIENCY, Figure, quotient
from pipelines.terminal import watched
from selector.actions import IID, STYLES, Action
from selector.schema import survival_column
from selector.train.replay import jackknifed

ROOTS = 12  # of each setting
DRAWS = 4  # trees that are drawn at each root
LISTS = 16  # lists of drafts that are drawn at each root
TREE = Action(4, 0, 8)  # the static tree from the root with the most tokens per step
KHISTI = "khisti"
DISTANCE = "L1 distance"
# what figures are based on, beside drafted trees
LABELLED = "labelled"
OPTIMAL = "optimal"
AT_ONE_NODE = ("nss", "naive_tree", "spectr", "specinfer", KHISTI, "priority")


class _Fraction(NamedTuple):
    """What one root tells of a figure with these columns."""

    columns: dict[str, Any]
    numerator: float
    denominator: float = 1.0


@torch.inference_mode()
def drafted(config: Config, pair: ModelPair, labelled: str) -> Iterator[Figure]:
    """The figures of each setting, with one standard error over roots. `labelled` is the verifier
    with labels."""
    samplings = samplings_of(config)
    for number, sampling in enumerate(watched(samplings, "drafting trees")):
        generator = torch.Generator(device=pair.device).manual_seed(config.seed)
        shift = (number + 0.5) / len(samplings)
        by_root = [
            list(_fractions(pair, row, sampling, labelled, generator))
            for row in _rows(config, sampling, labelled, shift)
        ]
        for fractions in zip(*by_root, strict=True):
            ratio = jackknifed(
                torch.tensor([fraction[1:] for fraction in fractions]),
                torch.arange(len(fractions)),
                quotient,
            )
            yield Figure.of_ratio(ratio, setting=str(sampling), **fractions[0].columns)


def _fractions(
    pair: ModelPair,
    row: dict[str, Any],
    sampling: Sampling,
    labelled: str,
    generator: torch.Generator,
) -> Iterator[_Fraction]:
    """Every figure at the root in the middle of a text, in the same order for all texts."""
    root = row["start"] + row["roots"] // 2
    target = CachedModel(pair.target)
    draft = CachedModel(pair.draft)
    for model in (target, draft):
        model.fill(row["tokens"][:root])
    root_pass = draft.extend(row["tokens"][root : root + 1])
    q_V = probabilities(root_pass.logits_WV[0], sampling.draft)
    root_token = row["tokens"][root]
    trees = [_drawn(target, draft, q_V, root_token, sampling, generator) for _ in range(DRAWS)]
    distances = []
    for drawn, p_NV in trees:
        l1_N = (p_NV - drawn.probs_NV).abs().sum(-1)
        nodes_by_depth = drawn.tree.nodes_by_depth[: TREE.L2]
        distances.append(torch.stack([l1_N[nodes].mean() for nodes in nodes_by_depth]))
    for depth, distance in enumerate(torch.stack(distances).mean(0).tolist()):
        columns = {"method": "drafts", "statistic": DISTANCE, "depth": depth}
        yield _Fraction({**columns, "basis": DRAFTED}, distance)
    mean = {}
    for name in (KHISTI, labelled):
        verifier = get_verifier(name)
        tokens = [
            verifier.block_efficiency(drawn.tree, p_NV, drawn.probs_NV) for drawn, p_NV in trees
        ]
        mean[name] = sum(tokens) / DRAWS
    columns = {"statistic": EFFICIENCY, "basis": DRAFTED}
    for name, tokens_per_step in mean.items():
        yield _Fraction({**columns, "method": name}, tokens_per_step)
    yield _Fraction(
        {"statistic": EFFICIENCY, "basis": LABELLED, "method": labelled, "rival": DRAFTED},
        float(row["labelled"]),
        mean[labelled],
    )
    yield _Fraction({**columns, "method": KHISTI, "rival": labelled}, mean[KHISTI], mean[labelled])
    _, p_NV = trees[-1]
    yield from _accepted(p_NV[0], q_V, generator)  # at the root, the same for all trees


def _drawn(
    target: CachedModel,
    draft: CachedModel,
    q_V: Tensor,
    root_token: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[Draft, Tensor]:
    """A tree from a root after which the draft has the distribution `q_V`, and the target's
    distributions after every node, [N, V]. Both caches are then as before."""
    drafted_tree = draft_tree(draft, q_V, TREE, sampling.draft, generator)
    draft.keep([])
    tree = drafted_tree.tree
    tokens_N = tree.tokens_N.clone()
    tokens_N[0] = root_token
    target_pass = target.forward(tokens_N, tree.depths_N, tree.ancestors_NN())
    target.keep([])
    return drafted_tree, probabilities(target_pass.logits_WV, sampling)


def _accepted(p_V: Tensor, q_V: Tensor, generator: torch.Generator) -> Iterator[_Fraction]:
    """At one node: the optimal acceptance of K drafts by how they are drawn, by itself and over
    that of i.i.d. drafts; and over that, each verifier's, whose law is exact given the drafts and
    is averaged over lists of them."""
    rows = Rows(p_V.double().unsqueeze(0), q_V.double().unsqueeze(0))
    node_L = rows.at(torch.zeros(LISTS, dtype=torch.int64, device=q_V.device))
    for k in (2, 3, 4):
        columns = {"statistic": ACCEPTANCE, "K": k}
        optimal = {style: optimal_acceptance(p_V, q_V, k, style) for style in STYLES}
        for style, value in optimal.items():
            of_style = {**columns, "basis": OPTIMAL, "method": style}
            yield _Fraction(of_style, value)
            yield _Fraction({**of_style, "rival": IID}, value, optimal[IID])
        entries_Lk = sample(q_V, LISTS * k, generator).view(LISTS, k)
        for name in AT_ONE_NODE:
            pull_Lk = get_verifier(name).pull(node_L, entries_Lk)  # type: ignore[attr-defined]
            of_verifier = {**columns, "basis": DRAFTED, "method": name, "rival": OPTIMAL}
            yield _Fraction(of_verifier, float(pull_Lk.sum(-1).mean()), optimal[IID])


def _rows(
    config: Config, sampling: Sampling, verifier: str, shift: float
) -> Iterator[dict[str, Any]]:
    """Held-out texts of a setting, evenly over their order, which is that of the prompts' lengths;
    other ones, by `shift`, for each setting. `labelled` is the label of `TREE` at the root in the
    middle."""
    texts = rows_of(config, "test", sampling)
    space = replace(space_of(texts), ranked=())
    for number in range(ROOTS):
        (row,) = texts.slice(int(len(texts) * (number + shift) / ROOTS), 1).to_pylist()
        survivals_RS = torch.tensor(row[survival_column(verifier)]).view(row["roots"], -1)
        efficiency_A = space.efficiencies(survivals_RS[row["roots"] // 2].float())
        yield row | {"labelled": efficiency_A[space.index(TREE)]}
