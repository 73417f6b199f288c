"""What is found by drafting at a few roots of held-out texts: how well drafts are used, and block
efficiencies as DDTE estimates them, from the exact laws of drafted trees.

MDSD (arXiv 2502.18779) compares how drafts are drawn by the most that any verifier could accept.
Khisti's verifier has no labels along a text, so it is compared on the same drafted trees with one
that has; and the mean of this one's laws with its labels at the same roots, which estimate the same
number.

Legend: R roots, L lists of drafts, k drafts of a list, N nodes, V vocabulary, C columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data_gen.drafting.sampled import draft_tree
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.traces import read_manifest, space_of
from data_gen.verification import get_verifier, optimal_acceptance
from data_gen.verification.distributions import Rows, sample
from pipelines.config import Config
from pipelines.data.recorded import traces_folder
from pipelines.evaluate.table import Figure, replayed_figure
from pipelines.run import watched
from selector.actions import IID, STYLES, Action
from selector.sampling import Sampling
from selector.schema import survival_column
from selector.train.replay import jackknifed

# roots of each setting; trees, and lists of drafts, that are drawn at each
ROOTS, DRAWS, LISTS = 12, 4, 16
TREE = Action(4, 0, 8)  # the static tree from the root with the most tokens per step
KHISTI = "khisti"
AT_ONE_NODE = ("nss", "naive_tree", "spectr", "specinfer", KHISTI, "priority")


@torch.inference_mode()
def drafted(config: Config, pair: ModelPair, labelled: str) -> Iterator[Figure]:
    """The figures of each setting, with one standard error over roots. `labelled` is the verifier
    with labels."""
    for number, sampling in enumerate(
        watched([setting.build() for setting in config.sampling], "drafting trees")
    ):
        # by measure, numerator and denominator at each root
        fractions: dict[str, list[list[float]]] = defaultdict(list)
        generator = torch.Generator(device=pair.device).manual_seed(config.seed)
        for row in _rows(config, sampling, labelled, (number + 0.5) / len(config.sampling)):
            root = row["start"] + row["roots"] // 2
            target, draft = CachedModel(pair.target), CachedModel(pair.draft)
            for model in (target, draft):
                model.fill(row["tokens"][:root])
            q_V = sampling.draft.probabilities(
                draft.extend(row["tokens"][root : root + 1]).logits_WV[0]
            )
            tokens, distances = defaultdict[str, list[float]](list), list[Tensor]()
            for _ in range(DRAWS):
                tree = draft_tree(draft, q_V, TREE, sampling.draft, generator)
                draft.keep([])
                tokens_N = tree.tree.tokens_N.clone()
                tokens_N[0] = row["tokens"][root]
                target_pass = target.forward(tokens_N, tree.tree.depths_N, tree.tree.ancestors_NN())
                target.keep([])
                p_NV = sampling.probabilities(target_pass.logits_WV)
                for name in (KHISTI, labelled):
                    tokens[name].append(
                        get_verifier(name).block_efficiency(tree.tree, p_NV, tree.probs_NV)
                    )
                l1_N = (p_NV - tree.probs_NV).abs().sum(-1)
                distances.append(
                    torch.stack([l1_N[nodes].mean() for nodes in tree.tree.levels[: TREE.L2]])
                )
            for depth, distance in enumerate(torch.stack(distances).mean(0).tolist()):
                fractions[f"L1 distance at depth {depth}"].append([distance, 1.0])
            mean = {name: sum(values) / DRAWS for name, values in tokens.items()}
            for name in mean:
                fractions[f"drafted tokens per step, {TREE}, {name}"].append([mean[name], 1.0])
            fractions[f"labelled over drafted {labelled}, {TREE}"].append(
                [float(row["labelled"]), mean[labelled]]
            )
            fractions[f"drafted {KHISTI} over {labelled}, {TREE}"].append(
                [mean[KHISTI], mean[labelled]]
            )
            for measure, fraction in _accepted(p_NV[0], q_V, generator):
                fractions[measure].append(fraction)
        for measure, columns in fractions.items():
            columns_and_roots = torch.tensor(columns), torch.arange(len(columns))
            ratio = jackknifed(*columns_and_roots, lambda sums_C: sums_C[..., 0] / sums_C[..., 1])
            yield replayed_figure(str(sampling), "drafts", measure, ratio)


def _accepted(
    p_V: Tensor, q_V: Tensor, generator: torch.Generator
) -> Iterator[tuple[str, list[float]]]:
    """At one node: the optimal acceptance of K drafts by how they are drawn, by itself and over
    that of i.i.d. drafts; and over that, each verifier's, whose law is exact given the drafts and
    is averaged over lists of them."""
    rows = Rows(p_V.double().unsqueeze(0), q_V.double().unsqueeze(0))
    node_L = rows.at(torch.zeros(LISTS, dtype=torch.int64, device=q_V.device))
    for k in (2, 3, 4):
        optimal = {style: optimal_acceptance(p_V, q_V, k, style) for style in STYLES}
        for style, value in optimal.items():
            yield f"optimal acceptance, K={k}, {style}", [value, 1.0]
            yield f"optimal acceptance over i.i.d. drafts', K={k}, {style}", [value, optimal[IID]]
        entries_Lk = sample(q_V, LISTS * k, generator).view(LISTS, k)
        for name in AT_ONE_NODE:
            pull_Lk = get_verifier(name).pull(node_L, entries_Lk)  # type: ignore[attr-defined]
            yield (
                f"drafted acceptance over the optimum, K={k}, {name}",
                [float(pull_Lk.sum(-1).mean()), optimal[IID]],
            )


def _rows(
    config: Config, sampling: Sampling, verifier: str, shift: float
) -> Iterator[dict[str, Any]]:
    """Held-out texts of a setting, evenly over their order, which is that of the prompts' lengths;
    other ones, by `shift`, for each setting. `labelled` is the label of `TREE` at the root in the
    middle."""
    folder, columns = traces_folder(config), ["tokens", "start", "roots", survival_column(verifier)]
    names = sorted(name for name in read_manifest(folder)["shards"] if name.startswith("test/"))
    shards = [
        pq.read_table(folder / name, columns=[*columns, "temperature", "top_p"]) for name in names
    ]
    in_setting = (pc.field("temperature") == sampling.temperature) & (
        pc.field("top_p") == sampling.top_p
    )
    texts, space = (
        pa.concat_tables(shards).filter(in_setting & (pc.field("roots") > 0)),
        space_of(shards[0]),
    )
    for number in range(ROOTS):
        (row,) = texts.slice(int(len(texts) * (number + shift) / ROOTS), 1).to_pylist()
        survivals_RS = torch.tensor(row[survival_column(verifier)]).view(row["roots"], -1)
        label = space.efficiencies(survivals_RS[row["roots"] // 2].float())[space.index(TREE)]
        yield row | {"labelled": label}
