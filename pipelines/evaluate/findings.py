"""What an evaluation found, in sentences and as the tables that the terminal and the report show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from data_gen.models.sampling import Sampling
from pipelines.evaluate.methods import AUTOREGRESSIVE, STATIC
from pipelines.evaluate.replays import WALL, Rows
from pipelines.run import console
from selector.decision import Mode
from selector.train.replay import Ratio

Cells = dict[str, str]  # of one row of a table, by column


def setting_of(row: dict[str, Any]) -> str:
    """The sampling setting of any row of an evaluation."""
    return str(Sampling(row["temperature"], row["top_p"]))


def _decided(evaluation: dict[str, Any]) -> Iterable[tuple[dict[str, Any], Mode]]:
    """The gains under every sampling setting, and what decides there."""
    return zip(evaluation["summary"]["by_setting"], map(Mode.of, evaluation["decisions"]), strict=True)


def headline(evaluation: dict[str, Any]) -> str:
    """One sentence: where the selector pays on this machine, and where it does not."""
    gains: list[str] = []
    kept: list[str] = []
    for row, mode in _decided(evaluation):
        if mode.feature_levels:
            of_what = "" if gains else " as fast as the best fixed tree"
            gains.append(f"{row['replay_ratio']:.2f} times{of_what} at {setting_of(row)}")
        else:
            kept.append(setting_of(row))
    if not gains:
        return "On this machine decisions gain nothing: the selector drafts the best fixed tree everywhere."
    text = f"On this machine the selector, replayed on held-out texts, decodes {', '.join(gains)}"
    return f"{text}; at {', '.join(kept)} it drafts the fixed tree." if kept else f"{text}."


def decisions(evaluation: dict[str, Any]) -> list[str]:
    """For each sampling setting what decides, and why."""
    return [f"{setting_of(row)}: {_reason(mode)}" for row, mode in _decided(evaluation)]


def _reason(mode: Mode) -> str:
    if mode.rule is not None:
        return (
            f"The lookup rule decides here: it is two standard errors ahead of the best fixed tree, and the network is "
            f"not ahead of it. It copies {mode.rule.length} tokens after a match of {mode.rule.least} or more, and "
            f"drafts {mode.action} elsewhere."
        )
    if mode.decides:
        levels = " and then ".join(mode.feature_levels)
        return (
            "The network decides here: it is two standard errors ahead of the best fixed tree, and ahead of the lookup "
            f"rule. It is asked with {levels} features."
        )
    return (
        "Neither the network nor the lookup rule is two standard errors ahead of the best fixed tree, so "
        f"{mode.action} is drafted everywhere."
    )


def _interval(value: float, bounds: Sequence[float], digits: int = 3) -> str:
    return f"{value:.{digits}f} [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def _replayed(value: float | None, error: float | None) -> str:
    return "" if value is None or error is None else str(Ratio(value, error))


def _tree(row: dict[str, Any]) -> str:
    return str(tuple(row["action"])) if row["action"] else ""


def gains(summary: dict[str, Any]) -> list[Cells]:
    """By sampling setting the selector's speed over that of the best fixed tree and of the lookup rule."""
    return [
        {
            "setting": setting_of(row),
            "over the best fixed tree, decoded": _interval(row["wall_ratio"], row["wall_interval_95"]),
            "over the best fixed tree, replayed": str(Ratio(row["replay_ratio"], row["replay_error"])),
            "over the lookup rule, decoded": _interval(row["wall_over_rule"], row["wall_over_rule_interval_95"]),
            "over the lookup rule, replayed": str(Ratio(**row["replay_over_rule"])),
        }
        for row in summary["by_setting"]
    ]


def methods(evaluation: dict[str, Any]) -> list[Cells]:
    """Every method under every sampling setting."""
    return [
        {
            "setting": setting_of(entry),
            "method": _label(entry),
            "tree": _tree(entry),
            "tokens a step": f"{entry['block_efficiency']:.2f}",
            "tokens/s": _interval(entry["tokens_per_second"], entry["interval_95"], 0),
            "ratio to best static": _interval(entry["ratio_to_best_static"], entry["ratio_interval_95"]),
            "replayed": _replayed(entry["replay_ratio"], entry["replay_error"]),
        }
        for entry in evaluation["methods"]
    ]


def _label(entry: dict[str, Any]) -> str:
    """The method's name, with its verifier where the name does not say it."""
    method, verifier = entry["method"], entry["verifier"]
    said = method == AUTOREGRESSIVE or verifier == "transformers" or method.startswith(f"{STATIC} ")
    return method if said else f"{method} ({verifier})"


def synthetic(replayed: Rows) -> list[Cells]:
    """What was replayed on synthetic clocks."""
    return [
        {
            "clock": row["clock"],
            "setting": setting_of(row),
            "method": row["method"],
            "tree": _tree(row),
            "ratio": str(Ratio(row["ratio"], row["error"])),
        }
        for row in replayed
        if row["clock"] != WALL
    ]


def averages(summary: dict[str, Any]) -> list[Cells]:
    """The selector's speed over that of other methods, mean over sampling settings; and its share of the time."""
    ratios = [
        {"figure": figure, "value": _interval(value, summary[f"{figure}_interval_95"])}
        for figure, value in summary.items()
        if f"{figure}_interval_95" in summary
    ]
    return [*ratios, {"figure": "selector_time_share", "value": f"{summary['selector_time_share']:.2%}"}]


def show(evaluation: dict[str, Any]) -> None:
    """The tables and findings of an evaluation on the terminal."""
    caption: str | None = (
        "best static: the fastest tree of all verifiers on the training texts; ratios are to it. "
        "In brackets 95% intervals over sources; ± one standard error over sources"
    )
    summary = evaluation["summary"]
    on_clocks = "Held-out texts replayed on synthetic clocks: speed over the best static tree (± one standard error)"
    for title, rows in (
        ("Held-out prompts decoded, and held-out texts replayed", methods(evaluation)),
        (on_clocks, synthetic(evaluation["replayed"])),
        ("The selector's speed, mean over sampling settings", averages(summary)),
        ("The selector's speed by sampling setting, decoded and replayed", gains(summary)),
    ):
        if rows:
            table = Table(*rows[0], title=title, title_justify="left", caption=caption)
            caption = None
            for row in rows:
                table.add_row(*row.values())
            console.print(table)
    for line in (headline(evaluation), *decisions(evaluation)):
        console.print(line, soft_wrap=True)
    for line in evaluation["disagreements"]:
        console.print(f"decoding and replay disagree: {line}", soft_wrap=True)
