"""The report's plots, each as a base64 PNG."""

from __future__ import annotations

import base64
import io
from collections import Counter

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from pipelines.evaluate.methods import BEST_STATIC, SELECTOR
from pipelines.evaluate.table import decoded, replayed
from pipelines.evaluate.verdict import Evaluation
from selector.actions import Action
from selector.train.data import Timed
from selector.train.module import SelectorModule
from selector.train.tuning import StaticTable

EXAMPLE = Action(1, 8, 0)  # the tree whose predicted block efficiency is compared with its labels


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


def ratios(evaluation: Evaluation) -> dict[str, str]:
    """A plot for each sampling setting, by its description: the speed of every method over the best static tree's."""
    found, pictures = evaluation.table, {}
    for setting, _ in evaluation.settings:
        own = [found.of(setting, name, decoded(BEST_STATIC)) for name in found.methods(setting, decoded(BEST_STATIC))]
        own.sort(key=lambda each: each.method == SELECTOR)  # the selector on top
        beside = {each.method: found.get(setting, each.method, replayed(BEST_STATIC)) for each in own}
        words = (
            f"Speed of every method over the best static tree's at {setting}. The selector's: decoded {own[-1]}, "
            f"replayed {beside[SELECTOR]}."
        )
        right = 1.5 * max(each.value for each in (*own, *beside.values()) if each is not None)
        figure, axis = plt.subplots(figsize=(6, 0.32 * len(own) + 1))
        axis.axvline(1, color="#888", linewidth=1)
        for y, each in enumerate(own):
            colour = "tab:orange" if each.method == SELECTOR else "tab:blue"
            low, high = each.low or 0.0, min(each.high or 2 * right, 2 * right)
            spread = [[each.value - low], [high - each.value]]
            axis.errorbar(each.value, y, xerr=spread, fmt="o", color=colour, capsize=3, markersize=5)
            if (replay := beside[each.method]) is not None:
                axis.plot(replay.value, y, "D", color=colour, markerfacecolor="white", markersize=5)
        axis.set(title=setting, xlabel="speed over the best static tree", xlim=(0, right))
        axis.set(yticks=range(len(own)), yticklabels=[each.method for each in own])
        pictures[words] = _png(figure)
    return pictures


def efficiency_by_tree(timed: Timed) -> str:
    """Tokens a step of every static tree over (L1, L2), one panel per K; the fastest tree is marked."""
    space, table = timed.space, StaticTable.of(timed)
    mean_A, best = table.efficiencies(), space.trees[table.best()]
    rows = min(2, space.max_K)
    figure, axes = plt.subplots(
        rows, -(-space.max_K // rows), figsize=(6, 5.6), sharex=True, sharey=True, squeeze=False
    )
    for K, axis in enumerate(axes.flat, 1):
        grid = [
            [float(mean_A[space.index(Action(K, L1, L2))]) for L2 in range(space.max_L2 + 1)]
            for L1 in range(space.max_L1 + 1)
        ]
        image = axis.imshow(grid, origin="lower", vmin=1, vmax=float(mean_A.max()), cmap="viridis")
        axis.set(title=f"{K} branches" if K > 1 else "chains", xticks=range(0, space.max_L2 + 1, 2))
        if best.K == K:
            axis.plot(best.L2, best.L1, "r*", markersize=14)
    figure.supxlabel("L2, tokens of a branch")
    figure.supylabel("L1, tokens of the trunk")
    figure.colorbar(image, ax=axes, label="tokens a step", shrink=0.8)
    figure.suptitle(f"{timed.sampling}; star: the fastest, {best}")
    return _png(figure)


@torch.no_grad()
def calibration(module: SelectorModule, timed: Timed) -> str:
    """Block efficiency of one tree, predicted against labelled, in ten groups of roots by prediction."""
    space, rows = timed.space, (~timed.texts.unknown_R).nonzero()[:, 0]
    at = space.index(EXAMPLE)
    x = module.scores(timed.texts)[rows, at].double().numpy()
    y = space.efficiencies(timed.survivals_RS[rows])[:, at].double().numpy()
    groups = np.array_split(np.argsort(x), min(10, len(x)))
    labelled = [y[g].mean() for g in groups]
    figure, axis = plt.subplots(figsize=(6, 4))
    axis.plot([x[g].mean() for g in groups], labelled, "o")
    top = max(x.max(), *labelled) + 0.5
    axis.plot([1, top], [1, top], "k--", linewidth=1)
    axis.set(xlabel=f"predicted tokens a step of {EXAMPLE}", ylabel="labelled", title=str(timed.sampling))
    return _png(figure)


def chosen_actions(evaluation: Evaluation) -> str:
    """Share of the decoding steps in which the selector chose each action."""
    entries = [entry for entry in evaluation.found["methods"] if entry["method"] == SELECTOR]
    totals = sum((Counter(entry["actions"]) for entry in entries), Counter[str]())
    shown = [action for action, _ in totals.most_common(15)]
    figure, axis = plt.subplots(figsize=(7, 3.2))
    width = 0.8 / len(entries)
    for i, entry in enumerate(entries):
        shares = [entry["actions"].get(action, 0) / sum(entry["actions"].values()) for action in shown]
        axis.bar(np.arange(len(shown)) + i * width, shares, width, label=entry["setting"])
    axis.set_xticks(np.arange(len(shown)) + 0.4 - width / 2, shown, rotation=60, ha="right")
    axis.set(ylabel="share of steps", xlabel="(K, L1, L2)", ylim=(0, None))
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    return _png(figure)
