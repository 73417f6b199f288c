"""The audit's plots and page."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyarrow as pa
from rich.table import Table

from pipelines.common.page import STYLE, image
from pipelines.common.page import table as html_table
from pipelines.config import Config
from pipelines.studies.audit_findings import find
from pipelines.studies.audit_tables import (
    BUDGETS,
    MEAN,
    Measured,
    Row,
    acceptance_rows,
    best_trees,
    by_variant,
    by_verifier,
    depth_rows,
    efficiency_rows,
)
from selector.actions import Action

UNPAIRED = (
    "All trees of this table were really drafted, one of each kind at every root. The tables of verifiers hold labels "
    "along the text instead: both are unbiased, but they are not paired, so they agree only within their intervals."
)


@dataclass
class Results:
    """What the stage prints and logs."""

    console: list[Table]
    findings: list[str]
    metrics: dict[str, float]


def write(config: Config, folder: Path, tables: list[pa.Table]) -> Results:
    """Write every table and plot and the page; return what to print."""
    measured = Measured(config, tables)
    tree = Action(*config.audit.tree)
    verifiers = by_verifier(measured, tree)
    others = by_variant(measured)
    accepted = acceptance_rows(measured)
    results: dict[str, list[Row]] = {
        "verifiers": verifiers,
        "variants": others,
        "acceptance": accepted,
        "depth": depth_rows(measured),
        "best_trees": best_trees(measured),
        "efficiency": efficiency_rows(measured),
    }
    for name, rows in results.items():
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    plots = {
        "depth": _plot_depth(results["depth"]),
        "verifiers": _plot_verifiers(verifiers),
        "efficiency": _plot_grid(measured),
    }
    for name, figure in plots.items():
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)
    findings = find(verifiers, others, accepted)
    (folder / "audit.html").write_text(_page(config, folder, results, findings), encoding="utf-8")
    metrics = {
        f"audit/{row['verifier']}_over_traversal": row["of traversal"] for row in verifiers if row["setting"] == MEAN
    }
    title = f"Block efficiency on {tuple(tree)}: % above traversal (95% over sources)"
    return Results([_matrix(measured, title, verifiers), _others_table(others)], findings, metrics)


def _matrix(measured: Measured, title: str, rows: list[Row]) -> Table:
    """Per cent more or less than Traversal; the intervals of single settings are in the CSV."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for setting in (*measured.settings, MEAN):
        table.add_column(setting.replace("T=1, ", ""), justify="right", no_wrap=True)
    base = [row for row in rows if row["verifier"] == "traversal" and row["setting"] != MEAN]
    table.add_row("traversal, tokens", *(f"{row['block efficiency']:.2f}" for row in base), "")
    for verifier in measured.verifiers:
        mine = [row for row in rows if row["verifier"] == verifier]
        table.add_row(verifier, *(f"{100 * (row['of traversal'] - 1):+.1f}" for row in mine[:-1]), _percent(mine[-1]))
    return table


def _percent(row: Row) -> str:
    half = (row["interval_95"][1] - row["interval_95"][0]) / 2
    return f"{100 * (row['of traversal'] - 1):+.1f} ±{100 * half:.1f}"


def _others_table(rows: list[Row]) -> Table:
    table = Table(title="Other drafts, mean over settings, beside traversal on i.i.d. drafts", title_justify="left")
    for column in ("drafts", "verifier", "%"):
        table.add_column(column)
    for row in rows:
        if row["setting"] == MEAN:
            table.add_row(row["variant"], row["verifier"], _percent(row))
    return table


def _plot_depth(rows: list[Row]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == setting]
        for axis, key in zip(axes, ("acceptance", "L1 distance"), strict=True):
            axis.plot([row["depth"] for row in mine], [row[key] for row in mine], marker=".", label=setting)
            axis.set(xlabel="tokens after the root", ylabel=key)
    axes[1].legend(fontsize=7)
    return figure


def _plot_verifiers(rows: list[Row]) -> plt.Figure:
    mean = sorted((row for row in rows if row["setting"] == MEAN), key=lambda row: row["of traversal"])
    figure, axis = plt.subplots(figsize=(6, 0.35 * len(mean) + 1))
    values = np.array([row["of traversal"] for row in mean])
    bounds = np.array([row["interval_95"] for row in mean]).T
    axis.barh([row["verifier"] for row in mean], values, xerr=np.abs(bounds - values), capsize=3, alpha=0.8)
    axis.axvline(1, color="k", linewidth=1)
    axis.set(xlabel="block efficiency relative to traversal", xlim=(0, None))
    return figure


def _plot_grid(measured: Measured) -> plt.Figure:
    """Mean block efficiency over (K, L) at the root, one panel per verifier, the best marked."""
    verifiers = measured.verifiers
    figure, axes = plt.subplots(2, -(-len(verifiers) // 2), figsize=(2.2 * -(-len(verifiers) // 2), 4.4), squeeze=False)
    mean_VA = np.mean([values.mean(0) for values in measured.efficiency], axis=0)
    for v, axis in enumerate(axes.flat):
        axis.axis("off")
        if v < len(verifiers):
            grid = np.ones((4, 9))
            for K in range(1, 5):
                for L in range(1, 9):
                    action = Action(K, 0, L) if K > 1 else Action(1, L, 0)
                    grid[K - 1, L] = mean_VA[v, measured.actions.index(action)]
            axis.axis("on")
            axis.imshow(grid, origin="lower", vmin=1, vmax=mean_VA.max(), aspect="auto")
            best = np.unravel_index(grid.argmax(), grid.shape)
            axis.plot(best[1], best[0], "r*")
            axis.set_title(f"{verifiers[v]} {grid.max():.2f}", fontsize=8)
            axis.set(yticks=range(4), yticklabels=range(1, 5), xticks=(0, 4, 8))
    return figure


def _page(config: Config, folder: Path, results: dict[str, list[Row]], findings: list[str]) -> str:
    import base64

    def plot(name: str, words: str) -> str:
        return image(base64.b64encode((folder / f"{name}.png").read_bytes()).decode(), words)

    listed = "".join(f"<li>{html.escape(line)}</li>" for line in findings)
    whole = [row for row in results["best_trees"] if row["drafted tokens"] == max(BUDGETS)]
    sections = [
        ("Findings", f"<ul>{listed}</ul>"),
        (
            f"Verifiers on {config.audit.tree}",
            plot("verifiers", "Block efficiency of each verifier over Traversal's") + html_table(results["verifiers"]),
        ),
        ("Other styles, draft temperatures and shapes", f"<p>{UNPAIRED}</p>{html_table(results['variants'])}"),
        ("Acceptance at one node", html_table(results["acceptance"]) if results["acceptance"] else ""),
        ("Acceptance and L1 distance by depth", plot("depth", "Acceptance and L1 distance by depth")),
        (
            "Block efficiency over (K, L), branching at the root",
            plot("efficiency", "Block efficiency over K and L by verifier"),
        ),
        (f"Best trees of at most {max(BUDGETS)} drafted tokens", html_table(whole)),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections)
    head = f"<!doctype html><meta charset='utf-8'><title>Espalier: audit of {config.name}</title>{STYLE}"
    return f"{head}<h1>Audit: {config.name}</h1>{body}"
