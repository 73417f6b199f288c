"""What the papers say of verifiers, and whether it holds on the measured roots."""

from __future__ import annotations

import numpy as np

from data_gen.verification.base import IID
from pipelines.studies.audit_tables import MEAN, Row

PUBLISHED = ("nss", "naive", "naive_tree", "spectr", "specinfer", "khisti", "block", "greedy_block", "traversal")
TOP_DOWN = ("naive_tree", "spectr", "specinfer", "khisti")


def best_of(verifiers: list[Row]) -> str:
    """The verifier that accepts the most, and how much, in one sentence."""
    mean = [row for row in verifiers if row["setting"] == MEAN]
    best = max(mean, key=lambda row: row["of traversal"])
    (low, high), name = best["interval_95"], best["verifier"]
    own = [row["of traversal"] for row in verifiers if row["verifier"] == name and row["setting"] != MEAN]
    between = f" [{low:.3f}, {high:.3f}]" if low < high else ""  # one source has no interval
    return (
        f"The best verifier here, {name}, yields {best['of traversal']:.3f}{between} times as many "
        f"tokens a step as traversal in the mean over {len(own)} sampling settings, {min(own):.3f} in the worst."
    )


def find(verifiers: list[Row], others: list[Row], accepted: list[Row]) -> list[str]:
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
    by_setting = [row for row in accepted if row["setting"] != MEAN]
    lines += [*_with_and_without(by_setting), *_against_the_optimum(by_setting)]
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
    """With i.i.d. drafts: there acceptance is exact, where other drafts have a mean of a few draws."""
    optimum = {(r["setting"], r["style"], r["k"]): r["acceptance"] for r in accepted if r["rule"] == "optimum"}
    missed: dict[tuple[str, str], float] = {}
    for row in accepted:
        known = (row["setting"], row["style"], row["k"]) in optimum
        if known and row["style"] == IID and row["rule"] in PUBLISHED and row["rule"] != "khisti" and row["k"] > 1:
            gap = optimum[row["setting"], row["style"], row["k"]] - row["acceptance"]
            missed[row["rule"], row["setting"]] = gap
    if not missed:
        return []
    nearest = min(missed, key=missed.__getitem__)
    holds = _holds(min(missed.values()) > 1e-9)
    return [
        f"MDSD, no published rule reaches the bound: {holds} (nearest {', '.join(nearest)}, by {missed[nearest]:.4f})"
    ]


def _holds(claim: bool) -> str:
    return "holds" if claim else "does not hold"
