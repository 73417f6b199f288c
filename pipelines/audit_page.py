"""From measured roots to the audit's tables, plots, findings and page.

All intervals are 95% bootstrap over sources (files), whose roots are not independent; one resample counts for all
sampling settings and verifiers. Block efficiencies are means over the roots. Verifiers are compared by labels along the
same texts; other drafts by drafted trees, beside i.i.d. ones that were drafted at the same roots.
"""

from __future__ import annotations

import csv
import html
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
from rich.table import Table

from data_gen.verification.base import IID
from pipelines.config import Config
from pipelines.report import _STYLE as STYLE
from pipelines.report import _image as image
from pipelines.report import _table as html_table
from selector.actions import Action, ActionSpace

PUBLISHED = ("nss", "naive", "naive_tree", "spectr", "specinfer", "khisti", "block", "greedy_block", "traversal")
TOP_DOWN = ("naive_tree", "spectr", "specinfer", "khisti")
BUDGETS = (4, 8, 16, 32)
MEAN = "mean"
UNPAIRED = (
    "All trees of this table were really drafted, one of each kind at every root. The tables of verifiers hold labels "
    "along the text instead: both are unbiased, but they are not paired, so they agree only within their intervals."
)
Row = dict[str, Any]


@dataclass
class Results:
    """What the stage prints and logs."""

    console: list[Table]
    findings: list[str]
    metrics: dict[str, float]


class Measured:
    """The roots of all settings, with the bootstrap's weights."""

    def __init__(self, config: Config, tables: list[pa.Table]) -> None:
        self.config, self.tables = config, tables
        self.settings = [str(setting.build()) for setting in config.audit.sampling]
        self.verifiers = list(config.audit.verifiers)
        self.actions = ActionSpace.default().actions
        self.sources = sorted({source for table in tables for source in table["source"].to_pylist()})
        rng = np.random.default_rng(config.seed)
        size = len(self.sources)
        resamples = rng.multinomial(size, np.full(size, 1 / size), config.audit.bootstrap)
        self.weights = np.vstack([np.ones(size), resamples])  # [B, sources]; the first counts every source once

    @cached_property
    def efficiency(self) -> list[np.ndarray]:
        """[roots, verifier, A] of every setting."""
        shape = (-1, len(self.verifiers), len(self.actions))
        return [np.array(table["efficiency"].to_pylist()).reshape(shape) for table in self.tables]

    def mean(self, setting: int, values: np.ndarray) -> np.ndarray:
        """The mean of one value per root, [B]; or of several, [B, C] from [roots, C]."""
        return self.mean_over(self.tables[setting]["source"].to_pylist(), values)

    def mean_over(self, sources: list[str], values: np.ndarray) -> np.ndarray:
        """The mean over roots of the given sources; NaN where a resample holds none of them."""
        member = np.equal.outer(self.sources, sources).astype(float)  # [sources, roots]
        counts = self.weights @ member.sum(-1)
        with np.errstate(invalid="ignore"):
            return (self.weights @ (member @ values)) / (counts if values.ndim == 1 else counts[:, None])

    def of(self, setting: int, verifier: str, action: Action) -> np.ndarray:
        column = self.actions.index(action)
        return self.mean(setting, self.efficiency[setting][:, self.verifiers.index(verifier), column])


def interval(values_B: np.ndarray) -> list[float]:
    return [float(bound) for bound in np.nanpercentile(values_B[1:], [2.5, 97.5])]


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
        _write_csv(folder / f"{name}.csv", rows)
    plots = {
        "depth": _plot_depth(results["depth"]),
        "verifiers": _plot_verifiers(verifiers),
        "efficiency": _plot_grid(measured),
    }
    for name, figure in plots.items():
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)
    findings = find(config, verifiers, others, accepted)
    (folder / "audit.html").write_text(_page(config, folder, results, findings), encoding="utf-8")
    metrics = {
        f"audit/{row['verifier']}_over_traversal": row["of traversal"] for row in verifiers if row["setting"] == MEAN
    }
    title = f"Block efficiency on {tuple(tree)}: % above traversal (95% over sources)"
    return Results([_matrix(measured, title, verifiers), _others_table(others)], findings, metrics)


def by_verifier(measured: Measured, tree: Action) -> list[Row]:
    """Every verifier on one tree, by setting and in the mean over settings, beside Traversal."""
    rows: list[Row] = []
    for verifier in measured.verifiers:
        ratios = []
        for s, setting in enumerate(measured.settings):
            mine, base = measured.of(s, verifier, tree), measured.of(s, "traversal", tree)
            ratios.append(mine / base)
            rows.append(_ratio_row(setting, verifier, mine, mine / base))
        rows.append(_ratio_row(MEAN, verifier, None, np.mean(ratios, axis=0)))
    return rows


def by_variant(measured: Measured) -> list[Row]:
    """Other styles, draft temperatures and shapes, beside Traversal on i.i.d. trees that were drafted as they were."""
    rows: list[Row] = []
    parsed = [[json.loads(text) for text in table["variants"].to_pylist()] for table in measured.tables]
    for name, verifiers in {name: list(values) for name, values in parsed[0][0].items()}.items():
        for verifier in verifiers:
            ratios = []
            for s, setting in enumerate(measured.settings):
                drafted = np.array([(row[name][verifier], row[IID]["traversal"]) for row in parsed[s]])
                mine, base = measured.mean(s, drafted).T
                ratios.append(mine / base)
                rows.append({"variant": name, **_ratio_row(setting, verifier, mine, ratios[-1])})
            rows.append({"variant": name, **_ratio_row(MEAN, verifier, None, np.mean(ratios, axis=0))})
    return rows


def _ratio_row(setting: str, verifier: str, mine: np.ndarray | None, ratio: np.ndarray) -> Row:
    return {
        "setting": setting,
        "verifier": verifier,
        "block efficiency": "" if mine is None else float(mine[0]),
        "of traversal": float(ratio[0]),
        "interval_95": interval(ratio),
    }


def acceptance_rows(measured: Measured) -> list[Row]:
    """Mean acceptance at one node by style, k and rule, beside `alpha*` (MDSD, table 1); Khisti's is a lower bound."""
    rows: list[Row] = []
    for setting, table in zip(measured.settings, measured.tables, strict=True):
        found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        texts, sources = table["acceptance"].to_pylist(), table["source"].to_pylist()
        asked = [source for source, text in zip(sources, texts, strict=True) if text]
        for text in texts:
            for style, k, rule, value in json.loads(text) if text else []:
                found[style, k, rule].append(value)
        for (style, k, rule), values in found.items():
            mean_B = measured.mean_over(asked, np.array(values))
            row = {"setting": setting, "style": style, "k": k, "rule": rule, "acceptance": float(mean_B[0])}
            rows.append(row | {"interval_95": interval(mean_B), "roots": len(values)})
    return rows


def depth_rows(measured: Measured) -> list[Row]:
    """Overlap (the acceptance of one draft) and L1 distance at a root and the text's next tokens (DDTE, figure 1)."""
    rows: list[Row] = []
    for s, (setting, table) in enumerate(zip(measured.settings, measured.tables, strict=True)):
        overlap, distance = (np.array(table[name].to_pylist()) for name in ("overlap", "distance"))
        for depth in range(overlap.shape[1]):
            accepted, far = measured.mean(s, overlap[:, depth]), measured.mean(s, distance[:, depth])
            row = {"setting": setting, "depth": depth, "acceptance": float(accepted[0])}
            row |= {"interval_95": interval(accepted), "L1 distance": float(far[0]), "L1 interval_95": interval(far)}
            rows.append(row)
    return rows


def efficiency_rows(measured: Measured) -> list[Row]:
    """Mean block efficiency of every verifier and action."""
    rows: list[Row] = []
    for s, (setting, values) in enumerate(zip(measured.settings, measured.efficiency, strict=True)):
        mean_BC = measured.mean(s, values.reshape(len(values), -1))
        low, high = np.nanpercentile(mean_BC[1:], [2.5, 97.5], axis=0)
        pairs = [(verifier, action) for verifier in measured.verifiers for action in measured.actions]
        for c, (verifier, (K, L1, L2)) in enumerate(pairs):
            row = {"setting": setting, "verifier": verifier, "K": K, "L1": L1, "L2": L2}
            row |= {"block efficiency": float(mean_BC[0, c]), "interval_95": [float(low[c]), float(high[c])]}
            rows.append(row)
    return rows


def best_trees(measured: Measured) -> list[Row]:
    """For each verifier and number of drafted tokens, the best tree that branches at the root and the best delayed one.

    The best of many means is a little too high; both columns have that in common.
    """
    nodes_A = np.array([K * L2 + L1 for K, L1, L2 in measured.actions])
    at_root_A = np.array([L1 == 0 or K == 1 for K, L1, L2 in measured.actions])
    rows: list[Row] = []
    for setting, values in zip(measured.settings, measured.efficiency, strict=True):
        for v, verifier in enumerate(measured.verifiers):
            mean_A = values[:, v].mean(0)
            for budget in BUDGETS:
                row: Row = {"setting": setting, "verifier": verifier, "drafted tokens": budget}
                for name, allowed_A in (("at the root", at_root_A), ("delayed", np.ones_like(at_root_A))):
                    best = int(np.where(allowed_A & (nodes_A <= budget), mean_A, 0).argmax())
                    row |= {name: str(tuple(measured.actions[best])), f"E {name}": float(mean_A[best])}
                rows.append(row)
    return rows


def find(config: Config, verifiers: list[Row], others: list[Row], accepted: list[Row]) -> list[str]:
    """What the papers say, and whether it holds here."""
    mean = {row["verifier"]: row for row in verifiers if row["setting"] == MEAN}
    other = {(row["variant"], row["verifier"]): row["of traversal"] for row in others if row["setting"] == MEAN}
    ratio = {name: row["of traversal"] for name, row in mean.items()}
    published = {name: value for (variant, name), value in other.items() if variant == IID and name in PUBLISHED}
    published |= {name: value for name, value in ratio.items() if name in PUBLISHED}
    lines = []
    if len(published) > 2:
        first, last = max(published, key=published.__getitem__), min(published, key=published.__getitem__)
        lines.append(f"DDTE, Traversal first of the published verifiers: {_holds(first == 'traversal')} ({first})")
        lines.append(f"DDTE, NSS last: {_holds(last == 'nss')} ({last}, {published[last]:.2f} of traversal)")
    close = {name: published[name] for name in TOP_DOWN if name in published}
    if len(close) > 1:
        spread = max(close.values()) - min(close.values())
        listed = ", ".join(f"{name} {value:.3f}" for name, value in close.items())
        lines.append(f"DDTE, top-down verifiers within 0.05 of each other: {_holds(spread < 0.05)} ({listed})")
    for (variant, name), value in other.items():
        if variant == "without_replacement" and name in ratio:
            with_ = other.get((IID, name), ratio[name])
            against = f"block efficiency {value:.3f} of traversal's, with replacement {with_:.3f}"
            lines.append(
                f"without replacement beats with on the whole tree, {name}: {_holds(value > with_)} ({against})"
            )
    lines += [*_with_and_without(accepted), *_against_the_optimum(accepted)]
    best = max(ratio, key=ratio.__getitem__)
    low, high = mean[best]["interval_95"]
    mine = [row for row in verifiers if row["verifier"] == best and row["setting"] != MEAN]
    below = [row["setting"] for row in mine if row["interval_95"][1] < 1]
    lines.append(
        f"the bar, 16% above traversal in the mean and never below it: "
        f"{'reached' if ratio[best] >= 1.16 and not below else 'missed'} by {best}, {ratio[best]:.3f} "
        f"[{low:.3f}, {high:.3f}] over {len(config.audit.sampling)} settings; lowest in one setting "
        f"{min(row['of traversal'] for row in mine):.3f}"
    )
    return lines


def _with_and_without(accepted: list[Row]) -> list[str]:
    """SpecInfer's acceptance at one node, in the mean over settings and k > 1."""
    by_style = {
        style: [r["acceptance"] for r in accepted if (r["rule"], r["style"]) == ("specinfer", style) and r["k"] > 1]
        for style in ("iid", "without_replacement")
    }
    if not all(by_style.values()):
        return []
    with_, without = (float(np.mean(values)) for values in by_style.values())
    claim = "MDSD, without replacement beats with at one node, specinfer"
    return [f"{claim}: {_holds(without > with_)} (accepts {without:.3f}, with replacement {with_:.3f})"]


def _against_the_optimum(accepted: list[Row]) -> list[str]:
    optimum = {(r["setting"], r["style"], r["k"]): r["acceptance"] for r in accepted if r["rule"] == "optimum"}
    missed: dict[tuple[str, str, str], float] = {}
    for row in accepted:
        known = (row["setting"], row["style"], row["k"]) in optimum
        if known and row["rule"] in PUBLISHED and row["rule"] != "khisti" and row["k"] > 1:
            gap = optimum[row["setting"], row["style"], row["k"]] - row["acceptance"]
            missed[row["rule"], row["style"], row["setting"]] = gap
    if not missed:
        return []
    nearest = min(missed, key=missed.__getitem__)
    holds = _holds(min(missed.values()) > 1e-9)
    return [
        f"MDSD, no published rule reaches the bound: {holds} (nearest {', '.join(nearest)}, by {missed[nearest]:.4f})"
    ]


def _holds(claim: bool) -> str:
    return "holds" if claim else "does not hold"


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
    axis.set(xlabel="block efficiency relative to traversal", xlim=(min(0.5, values.min()), None))
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

    def plot(name: str) -> str:
        return image(base64.b64encode((folder / f"{name}.png").read_bytes()).decode())

    listed = "".join(f"<li>{html.escape(line)}</li>" for line in findings)
    whole = [row for row in results["best_trees"] if row["drafted tokens"] == max(BUDGETS)]
    sections = [
        ("Findings", f"<ul>{listed}</ul>"),
        (f"Verifiers on {config.audit.tree}", plot("verifiers") + html_table(results["verifiers"])),
        ("Other styles, draft temperatures and shapes", f"<p>{UNPAIRED}</p>{html_table(results['variants'])}"),
        ("Acceptance at one node", html_table(results["acceptance"]) if results["acceptance"] else ""),
        ("Acceptance and L1 distance by depth", plot("depth")),
        ("Block efficiency over (K, L), branching at the root", plot("efficiency")),
        (f"Best trees of at most {max(BUDGETS)} drafted tokens", html_table(whole)),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections)
    head = f"<!doctype html><meta charset='utf-8'><title>Espalier: audit of {config.name}</title>{STYLE}"
    return f"{head}<h1>Audit: {config.name}</h1>{body}"


def _write_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
