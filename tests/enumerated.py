"""Ten roots of a run's held-out texts, twice: labels along every likely continuation, and laws of every likely tree.

`python -m tests.enumerated configs/papers.yaml` takes a root of each of ten texts at T = 0.2, under that setting, where
something unlikely is left out, and under T = 0.6 with the six likeliest tokens, where nothing is. The block efficiency
of `TREE` is, by the drafting side, the sum over trees of likely drafted tokens, of the probability that the tree is
drafted times the exact mean of its law; by the labels' side, the sum over likely target continuations, of their
probability times the label there, with all siblings among the likely tokens. What is unlikely and left out has between
1 and 3 tokens per step.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import torch

from data_gen.models.pair import CachedModel
from data_gen.models.sampling import Sampling
from data_gen.text_labels import label_text
from data_gen.trees import DraftTree
from data_gen.verification import get_verifier
from pipelines.config import load_config
from pipelines.data.recorded import traces_folder
from pipelines.pair.stage import load_pair
from selector.actions import Action, ActionSpace

SETTINGS = Sampling(0.2), Sampling(0.6, top_k=6)
TREE = Action(2, 0, 2)
DRAFTED, CONTINUED, LIKELY, TEXTS = 6, 8, 60, 10
VERIFIERS = "specinfer", "traversal", "lifted_uniform"


@torch.inference_mode()
def main(path: str, *overrides: str) -> None:
    config = load_config(Path(path), list(overrides))
    pair, space = load_pair(config), ActionSpace(2, 0, 2)
    shards = sorted((traces_folder(config) / "test").glob("*.parquet"))
    rows = [
        row
        for shard in shards
        for row in pq.read_table(shard, columns=["tokens", "start", "roots", "temperature", "top_p"]).to_pylist()
    ]
    rows = [row for row in rows if row["temperature"] == 0.2 and row["roots"] > 0]
    worst = dict.fromkeys(VERIFIERS, 0.0)
    for sampling, row in product(SETTINGS, rows[:: max(1, len(rows) // TEXTS)][:TEXTS]):
        text = row["tokens"][: row["start"] + row["roots"] // 2 + 1]

        def probs(
            model: object, extra: list[int], text: list[int] = text, sampling: Sampling = sampling
        ) -> torch.Tensor:
            cached = CachedModel(model)  # type: ignore[arg-type]
            whole = [*text, *extra]
            cached.fill(whole[:-1])
            return sampling.probabilities(cached.extend(whole[-1:]).logits_WV)[0].double()

        q_V, p_V = probs(pair.draft, []), probs(pair.target, [])
        first = q_V.topk(DRAFTED).indices.tolist()
        then = p_V.topk(CONTINUED).indices.tolist()
        q_of = {a: probs(pair.draft, [a]) for a in dict.fromkeys([*first, *then])}
        p_of = {a: probs(pair.target, [a]) for a in dict.fromkeys([*first, *then])}
        paths = [(a, b) for a in first for b in q_of[a].topk(DRAFTED).indices.tolist()]
        weight = {(a, b): float(q_V[a] * q_of[a][b]) for a, b in paths}
        mass = sum(weight.values()) ** 2
        enumerated = dict.fromkeys(VERIFIERS, 0.0)
        for one, two in product(paths, repeat=2):
            if weight[one] * weight[two] == 0:
                continue
            tree = DraftTree.from_paths([], [one, two])
            rows_of = {0: (p_V, q_V)} | {tree.node_of(own[:1]): (p_of[own[0]], q_of[own[0]]) for own in (one, two)}
            p_NV, q_NV = (
                torch.stack([rows_of.get(node, (p_V, q_V))[side] for node in range(len(tree))]) for side in (0, 1)
            )
            for name in VERIFIERS:
                enumerated[name] += weight[one] * weight[two] * get_verifier(name).block_efficiency(tree, p_NV, q_NV)
        labels, continued, left_out = torch.zeros(len(VERIFIERS), dtype=torch.float64), 0.0, 0.0
        for a in then:
            likely = [row_V.topk(LIKELY).indices for row_V in (p_V, q_V, p_of[a], q_of[a])]
            for b in p_of[a].topk(CONTINUED).indices.tolist():
                if (own := float(p_V[a] * p_of[a][b])) == 0:
                    continue
                continued += own
                text_T = torch.tensor([text[-1], a, b])
                said_V: torch.Tensor = torch.cat([text_T, *likely]).unique()
                left_out = max(left_out, *(1 - float(row_V[said_V].sum()) for row_V in (p_V, q_V, p_of[a], q_of[a])))
                p_TV, q_TV = torch.stack([p_V, p_of[a], p_V]), torch.stack([q_V, q_of[a], q_V])
                own_T = torch.searchsorted(said_V, text_T)
                labels_VRA = label_text(own_T, p_TV[:, said_V], q_TV[:, said_V], VERIFIERS, None, space=space)
                labels += own * labels_VRA[:, 0, space.index(TREE)]
        for number, name in enumerate(VERIFIERS):
            low = enumerated[name] + (1 - mass), enumerated[name] + 3 * (1 - mass)
            label = float(labels[number]) + (1 - continued), float(labels[number]) + 3 * (1 - continued)
            worst[name] = max(worst[name], low[0] - label[1], label[0] - low[1])
            print(
                f"{sampling}, {name}: drafted trees {low[0]:.9f} to {low[1]:.9f}, "
                f"labels {label[0]:.9f} to {label[1]:.9f}, of each distribution {left_out:.1e} left out",
                flush=True,
            )
    print("the two intervals are apart by at most", worst)


if __name__ == "__main__":
    main(*sys.argv[1:])
