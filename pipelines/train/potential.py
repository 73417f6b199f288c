"""The table that says, before any training, whether a selector pays."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from data_gen.models.sampling import Sampling
from selector.train.data import Setting, Timed
from selector.train.potential import Potential, potential
from selector.train.tuning import SURE


def potentials(pairs: dict[Setting, tuple[Timed, Timed]]) -> dict[Setting, Potential]:
    """For each sampling setting, of texts to fit on and texts to judge on."""
    return {setting: potential(*pair) for setting, pair in pairs.items()}


def table_of(found: dict[Setting, Potential]) -> Table:
    """One line a setting."""
    table = Table(title="Does a selector pay here? A quick linear model, on sources it has not seen")
    table.title_justify = "left"
    for column in ("setting", "explained variance", "autocorrelation", "in long repeats", "gain", "verdict"):
        table.add_column(column, justify="left" if column in ("setting", "verdict") else "right")
    for setting, each in found.items():
        shares = f"{each.explained:.0%}", f"{each.autocorrelation:.2f}", f"{each.repeats:.0%}"
        table.add_row(str(Sampling(*setting)), *shares, str(each.gain), _verdict(each))
    table.caption = (
        "explained variance: of the labels of a chain of 8; autocorrelation: of acceptance, 4 tokens apart; "
        "gain: replayed speed over the best static tree, decisions paid for, ± one standard error over sources"
    )
    return table


def _verdict(found: Potential) -> str:
    low, high = (found.gain.value + sign * SURE * found.gain.error for sign in (-1, 1))
    return "yes" if low > 1 else "no" if high < 1.01 else "perhaps: train one"


def rows_of(found: dict[Setting, Potential]) -> list[dict[str, Any]]:
    """As JSON has it."""
    return [
        {
            "temperature": temperature,
            "top_p": top_p,
            **asdict(each),
            "gain": each.gain.value,
            "gain_error": each.gain.error,
        }
        for (temperature, top_p), each in found.items()
    ]
