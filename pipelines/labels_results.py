"""What the `labels` stage makes of its measurements: tables, and a figure.

Legend: R roots, S supertrees, P trees per action, V verifiers, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from data_gen.expected import CHOOSING
from data_gen.procedure import passes
from pipelines.config import Config
from selector.actions import ActionSpace

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EXACT, EXPECTED = "exact", "averaged"  # the latter is what the data stage stores
# at how many trunk depths all choices of branches are averaged
WAYS = {
    EXACT: None,
    "averaged, no choices": 0,
    EXPECTED: CHOOSING,
    "averaged, all choices": ActionSpace.default().max_L1 + 1,
}
BOOTSTRAP = 2000
SAMPLES = (1, 2, 4, 8)  # supertrees per root
CHOSEN_BY = (*SAMPLES, 32)  # where as many are left to judge by


@dataclass
class Measured:
    """Everything that is measured at the roots."""

    ours: list[float] = field(default_factory=list)  # seconds per root, in the run's batches
    theirs: list[float] = field(default_factory=list)  # seconds per root
    own_RVPA: list[Tensor] = field(default_factory=list)
    pool_RVSA: dict[str, list[Tensor]] = field(default_factory=lambda: {way: [] for way in WAYS})
    model_seconds: list[float] = field(default_factory=list)  # per supertree
    label_seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by way and verifier, per supertree


def agreement(config: Config, measured: Measured) -> list[dict[str, Any]]:
    """Mean label of both procedures over actions and roots, and how far the 233 actions are apart."""
    own_RVPA, pool_RVSA = torch.stack(measured.own_RVPA), torch.stack(measured.pool_RVSA[EXPECTED])
    difference_RVA = pool_RVSA.mean(2) - own_RVPA.mean(2)
    # trees of different actions are independent, labels of one supertree are not
    own_RV = (own_RVPA.var(2) / own_RVPA.shape[2]).sum(-1) / own_RVPA.shape[-1] ** 2
    pool_RV = pool_RVSA.mean(-1).var(2) / pool_RVSA.shape[2]
    spread_V = (own_RV + pool_RV).sum(0).sqrt() / len(own_RVPA)
    # four trees say little of their variance; exact labels of an action's tree in the pool have the same one
    own_RVA = torch.stack(measured.pool_RVSA[EXACT]).var(2)
    variance_RVA = own_RVA / own_RVPA.shape[2] + pool_RVSA.var(2) / pool_RVSA.shape[2]
    drafted = torch.tensor([action.nodes > 0 for action in ActionSpace.default()])
    z_VA = (difference_RVA.sum(0) / variance_RVA.sum(0).sqrt().clamp(min=1e-12))[:, drafted]
    rows = []
    for v, name in enumerate(config.verifiers):
        mean, half = float(difference_RVA[:, v].mean()), 1.96 * float(spread_V[v])
        rows.append(
            {
                "verifier": name,
                "a tree per action": float(own_RVPA[:, v].mean()),
                "supertrees": float(pool_RVSA[:, v].mean()),
                "difference": [mean, mean - half, mean + half],
                "largest |z|": float(z_VA[v].abs().max()),
                "actions within 1.96": float((z_VA[v].abs() < 1.96).double().mean()),
            }
        )
    return rows


def speed(config: Config, measured: Measured) -> list[dict[str, Any]]:
    """Labelled roots per second, and the ratio at equal label variance, with a bootstrap over roots.

    Also with exact labels on both sides; ours' time includes the averaging then too.
    """
    ours_R, theirs_R = np.array(measured.ours), np.array(measured.theirs)
    own_RV = torch.stack(measured.own_RVPA).var(2).mean(-1).numpy() / config.labels.samples
    pool_RV = {
        way: torch.stack(v).var(2).mean(-1).numpy() / config.data.samples for way, v in measured.pool_RVSA.items()
    }
    picks = np.random.default_rng(0).integers(len(ours_R), size=(BOOTSTRAP, len(ours_R)))

    def ratio(way: str, v: int, rows_R: np.ndarray) -> float:
        seconds = theirs_R[rows_R].mean() / ours_R[rows_R].mean()
        return float(seconds * own_RV[rows_R, v].mean() / pool_RV[way][rows_R, v].mean())

    rows = []
    for v, name in enumerate(config.verifiers):
        row: dict[str, Any] = {
            "verifier": name,
            "roots/s": float(1 / ours_R.mean()),
            "roots/s, theirs": float(1 / theirs_R.mean()),
            "variance": float(pool_RV[EXPECTED][:, v].mean()),
            "variance, theirs": float(own_RV[:, v].mean()),
        }
        for title, way in (("at equal variance", EXPECTED), ("both exact", EXACT)):
            low, high = np.percentile([ratio(way, v, pick) for pick in picks], [2.5, 97.5])
            row[title] = [ratio(way, v, np.arange(len(ours_R))), float(low), float(high)]
        space = ActionSpace.default()
        row["passes"] = (space.max_L1 + space.max_L2) * -(-config.data.samples // config.data.together)
        rows.append({**row, "passes, theirs": sum(map(passes, space))})
    return rows


def errors(config: Config, measured: Measured) -> list[dict[str, Any]]:
    """Root mean square error of a label over actions and roots by the number of supertrees, and what one costs."""
    models = float(np.mean(measured.model_seconds))
    rows = []
    for way, values in measured.pool_RVSA.items():
        variance_V = torch.stack(values).var(2).mean((0, 2))
        for v, name in enumerate(config.verifiers):
            labelling = float(np.mean(measured.label_seconds[way][name]))
            row: dict[str, Any] = {"labels": way, "verifier": name}
            row |= {str(samples): float((variance_V[v] / samples).sqrt()) for samples in SAMPLES}
            rows.append(row | {"ms each": 1e3 * (models + labelling), "labelling": labelling / (models + labelling)})
    return rows


def choices(measured: Measured, verifiers: tuple[str, ...]) -> list[dict[str, Any]]:
    """What choosing every root's tree by its own label gains over the best static tree (negative: loses), in speed.

    Chosen by `argmax E - g T` on some of the supertrees, with the static tree's speed for g, and judged on the others.
    A tree's time is taken as `8 + L1 + L2`: a target pass as dear as eight draft passes. 95% bootstrap over roots.
    """
    cost_A = torch.tensor([8.0 + action.L1 + action.L2 for action in ActionSpace.default()], dtype=torch.float64)
    rows = []
    for way in (EXACT, EXPECTED):
        pool_RVSA = torch.stack(measured.pool_RVSA[way])
        for v, name in enumerate(verifiers):
            row: dict[str, Any] = {"labels": way, "verifier": name}
            enough = [samples for samples in CHOSEN_BY if 2 * samples <= pool_RVSA.shape[2]]
            row |= {str(samples): _gain(pool_RVSA[:, v], cost_A, samples) for samples in enough}
            rows.append(row)
    return rows


def _gain(pool_RSA: Tensor, cost_A: Tensor, samples: int) -> list[float]:
    """Over disjoint sets of `samples` supertrees; the value and its interval."""
    R, S, _ = pool_RSA.shape
    speed_A = pool_RSA.mean((0, 1)) / cost_A
    static, g = int(speed_A.argmax()), speed_A.max()
    tokens_R, seconds_R, static_R = torch.zeros(3, R, dtype=torch.float64)
    for start in range(0, S - samples + 1, samples):
        picked_S = torch.zeros(S, dtype=torch.bool)
        picked_S[start : start + samples] = True
        label_RA, judged_RA = pool_RSA[:, picked_S].mean(1), pool_RSA[:, ~picked_S].mean(1)
        best_R = (label_RA - g * cost_A).argmax(-1)
        tokens_R += judged_RA.gather(-1, best_R.unsqueeze(-1))[:, 0]
        seconds_R += cost_A[best_R]
        static_R += judged_RA[:, static] / cost_A[static]
    weights = np.vstack([np.ones(R), np.random.default_rng(0).multinomial(R, np.full(R, 1 / R), BOOTSTRAP)])
    rounds = S // samples
    speed = (weights @ tokens_R.numpy()) / (weights @ seconds_R.numpy())
    gains = speed / (weights @ static_R.numpy() / (rounds * R)) - 1
    return [float(gains[0]), *(float(bound) for bound in np.percentile(gains[1:], [2.5, 97.5]))]


def allocation(pool_RVSA: list[Tensor]) -> dict[str, float]:
    """How much lower the mean variance would be if roots got samples in proportion to their standard deviation.

    `known`: by the true one; `pilot`: by that of two samples, which every root gets first, of eight on average.
    """
    deviation_R = torch.stack(pool_RVSA).var(2).mean((1, 2)).sqrt()
    guessed_R = torch.stack([values[:, :2].var(1).mean().sqrt() for values in pool_RVSA]).clamp(min=1e-9)
    variance_R = deviation_R**2
    share_R = 2 + 6 * guessed_R / guessed_R.mean()
    return {
        "known": float(variance_R.mean() / deviation_R.mean() ** 2),
        "pilot": float((variance_R / 8).mean() / (variance_R / share_R).mean()),
    }


TITLES = {
    "agreement": "Supertrees and a tree per action: mean block efficiency over all actions and roots",
    "speed": "Supertrees and (theirs) a tree per action, interleaved; model passes of one root alone",
    "error": "Root mean square error of a label by supertrees per root, and the cost of each",
    "choice": "Speed gained over the best static tree by choosing each root's own by its label, by supertrees per root",
    "labelling": "Labelling alone",
}


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    result = Table(title=title, title_justify="left")
    for column in rows[0]:
        result.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        result.add_row(*(_cell(value) for value in row.values()))
    return result


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "{:.3g}\n[{:.3g}, {:.3g}]".format(*value)
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def plot(rows: list[dict[str, Any]], path: Path) -> Path:
    """Error by cost, one panel per verifier."""
    verifiers = list(dict.fromkeys(row["verifier"] for row in rows))
    figure, axes = plt.subplots(1, len(verifiers), figsize=(4.2 * len(verifiers), 3.6), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], verifiers, strict=True):
        for way in WAYS:
            row = next(row for row in rows if (row["labels"], row["verifier"]) == (way, name))
            cost = [samples * row["ms each"] for samples in SAMPLES]
            axis.plot(cost, [row[str(samples)] for samples in SAMPLES], marker="o", label=way)
        axis.set(xscale="log", yscale="log", xlabel="ms per root", title=name)
    axes[0][0].set_ylabel("error of a label, tokens")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
