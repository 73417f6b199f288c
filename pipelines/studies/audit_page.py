"""The audit's page."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pyarrow as pa
from rich.table import Table

from pipelines.config import Config
from pipelines.report.page import STYLE, images, listed, note, with_interval
from pipelines.report.page import table as html_table
from pipelines.studies import audit_plots
from pipelines.studies.audit_findings import best_of, find
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
from selector.files import atomically

FEW = 5  # source files: an interval over fewer is not worth its name
ACCEPTANCE = (
    "The chance that one of k drafted children is accepted, mean over sampling settings: the more, the longer the "
    "steps. The optimum is the most that any rule can reach (MDSD). Khisti's figure is a lower bound."
)

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
        "depth": audit_plots.depth(results["depth"]),
        "verifiers": audit_plots.verifiers(verifiers),
        "efficiency": audit_plots.grid(measured),
    }
    for name, figure in plots.items():
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)
    findings = [best_of(verifiers), *find(verifiers, others, accepted)]
    page = _page(config, folder, measured, results, findings)
    with atomically(folder / "audit.html") as partial:
        partial.write_text(page, encoding="utf-8")
    metrics = {f"of traversal/{row['verifier']}": row["of traversal"] for row in verifiers if row["setting"] == MEAN}
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


def _page(config: Config, folder: Path, measured: Measured, results: dict[str, list[Row]], findings: list[str]) -> str:
    """What was found, then what it was found by; the CSV files beside the page have every row."""

    def plot(name: str, words: str) -> str:
        return images({words: base64.b64encode((folder / f"{name}.png").read_bytes()).decode()})

    best, *others = findings
    tree = f"{tuple(config.audit.tree)}: {config.audit.tree[0]} branches of {config.audit.tree[2]} tokens"
    if config.audit.tree[1]:
        tree += f" behind a trunk of {config.audit.tree[1]}"
    sections = [
        (
            f"Verifiers on the tree {tree}",
            plot("verifiers", f"Tokens a step of each verifier over Traversal's. {best}")
            + html_table(_beside_each_other(results["verifiers"], ("verifier",)))
            + note(
                "Tokens a step (block efficiency: accepted tokens, and the one that the verifier adds) as a multiple "
                "of traversal's. In the chart and in brackets: 95% intervals over source files, of which there are "
                f"{len(measured.sources)}"
                f"{'; so few say little' if len(measured.sources) < FEW else ''}."
            ),
        ),
        ("What papers say, and what was found", listed(others)),
        (
            "Other drafts and shapes of trees",
            html_table(_beside_each_other(results["variants"], ("variant", "verifier")))
            + note(f"As multiples of traversal's tokens a step on independent (iid) drafts. {UNPAIRED}"),
        ),
        ("Acceptance at one node", html_table(_by_children(results["acceptance"])) + note(ACCEPTANCE)),
        (
            "How far draft and target drift apart",
            plot("depth", "Acceptance and L1 distance over the tokens after the root, by sampling setting")
            + note(
                "Of one drafted token, over its distance from the root. L1 distance: the sum of |p - q|, which is "
                "twice what acceptance lacks of 1."
            ),
        ),
        (
            "Tokens a step over (K, L), branching at the root",
            plot("efficiency", "Tokens a step over the number and the length of branches, a panel for each verifier")
            + note("Brighter is more; the star marks the most, which the title gives. Mean over sampling settings."),
        ),
        (
            f"Best trees of at most {max(BUDGETS)} drafted tokens",
            html_table(_compared_trees(results))
            + note("(K, L1, L2), tokens a step: among trees that branch at the root, and among all."),
        ),
        ("Every row, by sampling setting and with intervals", listed(f"{name}.csv" for name in results)),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections if content)
    title = f"Audit of {config.name}"
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Espalier: {title}</title>{STYLE}"
    return f"{head}<h1>{title}</h1><p class='lead'>{html.escape(best)}</p>{body}</html>"


def _beside_each_other(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    """One row for each value of some keys, with a column for each sampling setting and for their mean."""
    table: dict[tuple[str, ...], Row] = {}
    for row in rows:
        own = table.setdefault(tuple(row[key] for key in keys), {key: row[key] for key in keys})
        if row["setting"] == MEAN:
            own["mean [95%]"] = with_interval(row["of traversal"], row["interval_95"])
        else:
            own[row["setting"]] = f"{row['of traversal']:.2f}"
    return list(table.values())


def _by_children(rows: list[Row]) -> list[Row]:
    """Acceptance in the mean over settings: a row for each rule, a column for each number of children."""
    table: dict[tuple[str, str], Row] = {}
    for row in (row for row in rows if row["setting"] == MEAN):
        own = table.setdefault((row["style"], row["rule"]), {"drafts": row["style"], "rule": row["rule"]})
        own[f"k = {row['k']} [95%]"] = with_interval(row["acceptance"], row["interval_95"])
    columns = list(dict.fromkeys(column for own in table.values() for column in own))
    return [{column: own.get(column) for column in columns} for own in table.values()]


def _compared_trees(results: dict[str, list[Row]]) -> list[Row]:
    """Traversal's and the best verifier's."""
    means = [row for row in results["verifiers"] if row["setting"] == MEAN]
    shown = {"traversal", max(means, key=lambda row: row["of traversal"])["verifier"]}
    return [
        {
            "setting": row["setting"],
            "verifier": row["verifier"],
            **{where: f"{row[where]}, {row[f'E {where}']:.2f}" for where in ("at the root", "delayed")},
        }
        for row in results["best_trees"]
        if row["verifier"] in shown and row["drafted tokens"] == max(BUDGETS)
    ]
