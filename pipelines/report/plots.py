"""The report's plots, each as a base64 PNG."""

from __future__ import annotations

import base64
import io

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from pipelines.evaluate.methods import BEST_STATIC, SELECTOR
from pipelines.evaluate.table import decoded, replayed
from pipelines.evaluate.verdict import Evaluation


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
