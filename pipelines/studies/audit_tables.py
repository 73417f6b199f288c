"""From measured roots to the audit's tables.

All intervals are 95% bootstrap over sources (files), whose roots are not independent; one resample counts for all
sampling settings and verifiers. Block efficiencies are means over the roots. Verifiers are compared by labels along the
same texts; other drafts by drafted trees, beside i.i.d. ones that were drafted at the same roots.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from data_gen.verification.base import IID
from pipelines.config import Config
from pipelines.statistics import interval, source_weights
from selector.actions import Action, ActionSpace

BUDGETS = (4, 8, 16, 32)
MEAN = "mean"
Row = dict[str, Any]


class Measured:
    """The roots of all settings, with the bootstrap's weights."""

    def __init__(self, config: Config, tables: list[pa.Table]) -> None:
        self.config, self.tables = config, tables
        self.settings = [str(setting.build()) for setting in config.audit.sampling]
        self.verifiers = list(config.audit.verifiers)
        self.actions = ActionSpace.default().trees
        self.sources = sorted({source for table in tables for source in table["source"].to_pylist()})
        self.weights = source_weights(len(self.sources), config.seed, resamples=config.audit.bootstrap)

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
    """Mean acceptance at one node by style, k and rule, beside `alpha*` (MDSD, table 1); Khisti's is a lower bound.

    By setting, and in the mean over settings.
    """
    rows: list[Row] = []
    means: dict[tuple[str, int, str], list[np.ndarray]] = defaultdict(list)
    for setting, table in zip(measured.settings, measured.tables, strict=True):
        found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        texts, sources = table["acceptance"].to_pylist(), table["source"].to_pylist()
        asked = [source for source, text in zip(sources, texts, strict=True) if text]
        for text in texts:
            for style, k, rule, value in json.loads(text) if text else []:
                found[style, k, rule].append(value)
        for (style, k, rule), values in found.items():
            mean_B = measured.mean_over(asked, np.array(values))
            means[style, k, rule].append(mean_B)
            rows.append(_acceptance_row(setting, style, k, rule, mean_B, len(values)))
    return rows + [_acceptance_row(MEAN, *key, np.mean(own, axis=0)) for key, own in means.items()]


def _acceptance_row(setting: str, style: str, k: int, rule: str, mean_B: np.ndarray, roots: int | None = None) -> Row:
    row = {"setting": setting, "style": style, "k": k, "rule": rule, "acceptance": float(mean_B[0])}
    return row | {"interval_95": interval(mean_B), "roots": "" if roots is None else roots}


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
        pairs = [(verifier, action) for verifier in measured.verifiers for action in measured.actions]
        for c, (verifier, (K, L1, L2)) in enumerate(pairs):
            row = {"setting": setting, "verifier": verifier, "K": K, "L1": L1, "L2": L2}
            row |= {"block efficiency": float(mean_BC[0, c]), "interval_95": interval(mean_BC[:, c])}
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
