"""`audit --quick`: does speculation pay on this machine, with which verifier and which tree? Two minutes, no training.

A coarse latency profile and a few dozen labelled roots; the prediction is a ratio of sums, tokens over seconds. The
winner among thousands of candidates is chosen on one half of the roots and judged on the other.
"""

from __future__ import annotations

import torch
from rich.table import Table

from data_gen import latency
from data_gen.audit import efficiencies
from pipelines.audit import roots_of
from pipelines.config import Config
from pipelines.pair import load_pair
from pipelines.stage import console, mlflow_run, progress
from selector.actions import EMPTY, Action, ActionSpace

REPEATS = 4
SHOWN = 5


def answer(config: Config) -> None:
    """Print the best verifiers and trees, and the verdict."""
    pair = load_pair(config)
    name = latency.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    lengths = (config.prompts.tokens + config.data.tokens // 2,)
    grid = latency.Grid(lengths, config.latency.widths, config.latency.nodes, REPEATS)
    verifiers = config.audit.verifiers
    setting = config.sampling[0]
    space = ActionSpace.default()
    with mlflow_run(config, "audit-quick") as mlflow, progress() as bar:
        task = bar.add_task("timing and labelling", total=REPEATS + config.audit.quick_roots, note="")
        profile = latency.measure(pair, grid, verifiers, name, lambda: bar.advance(task))
        labels = []
        for _, labeller, root, seed in roots_of(config, pair, setting, config.audit.quick_roots):
            generator = torch.Generator(device=pair.device).manual_seed(seed)
            labels.append(efficiencies(labeller, root.length, verifiers, generator)[0])
            bar.advance(task)
        tokens_RVA = torch.stack(labels)
        seconds_VA = torch.stack([profile.table(space.actions, v, False)[1][0] for v in verifiers])
        chosen_on, judged_on = tokens_RVA[::2].mean(0), tokens_RVA[1::2].mean(0)
        plain = 1 / seconds_VA[:, space.index(EMPTY)].min()
        speed_VA = chosen_on / seconds_VA
        best_V = speed_VA.argmax(-1)
        order = speed_VA.max(-1).values.argsort(descending=True).tolist()
        gains = {verifiers[v]: float(judged_on[v, best_V[v]] / seconds_VA[v, best_V[v]] / plain) for v in order}
        for verifier, gain in gains.items():
            mlflow.log_metric(f"quick/{verifier}_over_autoregressive", gain)
    table = Table(title=f"{setting.build()}, {name}; {config.audit.quick_roots} roots", title_justify="left")
    for column in ("verifier", "best tree", "block eff.", "predicted x autoregressive"):
        table.add_column(column, justify="left" if column == "verifier" else "right")
    for v in order[:SHOWN]:
        action = space.actions[int(best_V[v])]
        efficiency = float(judged_on[v, best_V[v]])
        table.add_row(verifiers[v], _shape(action), f"{efficiency:.2f}", f"{gains[verifiers[v]]:.2f}")
    console.print(table)
    first = order[0]
    gain, action = gains[verifiers[first]], space.actions[int(best_V[first])]
    if action != EMPTY and gain > 1:
        console.print(f"audit: speculation pays: {gain:.2f}x with {verifiers[first]} on {_shape(action)}")
    else:
        console.print("audit: speculation does not pay here: decode without a draft")


def _shape(action: Action) -> str:
    return str(tuple(action))
