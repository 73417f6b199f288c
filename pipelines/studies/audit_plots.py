"""The audit's plots."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from pipelines.studies.audit_tables import MEAN, Measured, Row
from selector.actions import Action


def depth(rows: list[Row]) -> plt.Figure:
    """Acceptance and L1 distance over the tokens after the root, a line for each sampling setting."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == setting]
        for axis, key in zip(axes, ("acceptance", "L1 distance"), strict=True):
            axis.plot([row["depth"] for row in mine], [row[key] for row in mine], marker=".", label=setting)
            axis.set(xlabel="tokens after the root", ylabel=key)
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def verifiers(rows: list[Row]) -> plt.Figure:
    """Every verifier beside Traversal, in the mean over sampling settings; bars start at zero."""
    mean = sorted((row for row in rows if row["setting"] == MEAN), key=lambda row: row["of traversal"])
    figure, axis = plt.subplots(figsize=(6, 0.35 * len(mean) + 1))
    values = np.array([row["of traversal"] for row in mean])
    bounds = np.array([row["interval_95"] for row in mean]).T
    axis.barh([row["verifier"] for row in mean], values, xerr=np.abs(bounds - values), capsize=3, alpha=0.8)
    axis.axvline(1, color="k", linewidth=1)
    axis.set(xlabel="tokens a step, relative to traversal", xlim=(0, None))
    return figure


def grid(measured: Measured) -> plt.Figure:
    """Mean block efficiency over (K, L) at the root, one panel per verifier, the best marked."""
    names = measured.verifiers
    lines = -(-len(names) // 4)
    figure, axes = plt.subplots(lines, 4, figsize=(8, 1.6 * lines), squeeze=False, layout="constrained")
    mean_VA = np.mean([values.mean(0) for values in measured.efficiency], axis=0)
    for v, axis in enumerate(axes.flat):
        axis.axis("off")
        if v < len(names):
            mean_KL = np.ones((4, 9))
            for K in range(1, 5):
                for L in range(1, 9):
                    action = Action(K, 0, L) if K > 1 else Action(1, L, 0)
                    mean_KL[K - 1, L] = mean_VA[v, measured.actions.index(action)]
            axis.axis("on")
            axis.imshow(mean_KL, origin="lower", vmin=1, vmax=mean_VA.max(), aspect="auto")
            best = np.unravel_index(mean_KL.argmax(), mean_KL.shape)
            axis.plot(best[1], best[0], "r*")
            axis.set_title(f"{names[v]} {mean_KL.max():.2f}", fontsize=8)
            axis.set(yticks=range(4), yticklabels=range(1, 5), xticks=(0, 4, 8))
    figure.supxlabel("L, tokens of a branch", fontsize=9)
    figure.supylabel("K, branches", fontsize=9)
    return figure
