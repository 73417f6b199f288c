"""What an evaluation found: in sentences, and as the tables that the terminal and the report show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from data_gen.models.sampling import Sampling
from pipelines.evaluate.methods import AUTOREGRESSIVE, STATIC
from pipelines.evaluate.replays import WALL, Rows
from pipelines.run import console
from selector.decision import Mode
from selector.train.replay import Ratio

Cells = dict[str, str]  # of one row of a table, by column


def headline(evaluation: dict[str, Any]) -> str:
    """One sentence: where the selector pays on this machine, and where it does not."""
    modes = _modes(evaluation)
    gains: list[str] = []
    kept: list[str] = []
    for row in evaluation["summary"]["by_setting"]:
        if modes[_key(row)].feature_levels:
            of_what = "" if gains else " as fast as the best fixed tree"
            gains.append(f"{row['replay_ratio']:.2f} times{of_what} at {_setting(row)}")
        else:
            kept.append(_setting(row))
    if not gains:
        return "On this machine decisions gain nothing: the selector drafts the best fixed tree everywhere."
    text = f"On this machine the selector, replayed on held-out texts, decodes {', '.join(gains)}"
    return f"{text}; at {', '.join(kept)} it drafts the fixed tree." if kept else f"{text}."


def decisions(evaluation: dict[str, Any]) -> list[str]:
    """For each sampling setting who decides, and why."""
    modes = _modes(evaluation)
    return [f"{_setting(row)}: {_who(modes[_key(row)])}" for row in evaluation["summary"]["by_setting"]]


def _who(mode: Mode) -> str:
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


def _modes(evaluation: dict[str, Any]) -> dict[tuple[float, float], Mode]:
    return {_key(entry): Mode.of(entry) for entry in evaluation["decisions"]}


def _key(row: dict[str, Any]) -> tuple[float, float]:
    return row["temperature"], row["top_p"]


def _setting(row: dict[str, Any]) -> str:
    return str(Sampling(row["temperature"], row["top_p"]))


def _interval(value: float, bounds: Sequence[float], digits: int = 3) -> str:
    return f"{value:.{digits}f} [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def gains(summary: dict[str, Any]) -> list[Cells]:
    """By sampling setting the selector's speed over that of the best fixed tree and of the lookup rule, decoded and
    replayed."""
    return [
        {
            "setting": _setting(row),
            "over the best fixed tree, decoded": _interval(row["wall_ratio"], row["wall_interval_95"]),
            "over the best fixed tree, replayed": str(Ratio(row["replay_ratio"], row["replay_error"])),
            "over the lookup rule, decoded": _interval(row["wall_over_rule"], row["wall_over_rule_interval_95"]),
            "over the lookup rule, replayed": str(Ratio(**row["replay_over_rule"])),
        }
        for row in summary["by_setting"]
    ]


def methods(evaluation: dict[str, Any]) -> list[Cells]:
    """Methods x sampling settings."""
    return [
        {
            "setting": _setting(entry),
            "method": _label(entry),
            "tree": str(tuple(entry["action"])) if entry["action"] else "",
            "tokens a step": f"{entry['block_efficiency']:.2f}",
            "tokens/s": _interval(entry["tokens_per_second"], entry["interval_95"], 0),
            "ratio to best static": _interval(entry["ratio_to_best_static"], entry["ratio_interval_95"]),
            "replayed": ""
            if entry["replay_ratio"] is None
            else str(Ratio(entry["replay_ratio"], entry["replay_error"])),
        }
        for entry in evaluation["methods"]
    ]


def _label(entry: dict[str, Any]) -> str:
    """The method's name, with its verifier where the name does not say it."""
    plain = entry["method"] == AUTOREGRESSIVE or (entry["action"] is None and entry["verifier"] == "transformers")
    told = entry["method"].startswith(f"{STATIC} ")
    return entry["method"] if plain or told else f"{entry['method']} ({entry['verifier']})"


def synthetic(replayed: Rows) -> list[Cells]:
    """What was replayed on other clocks."""
    return [
        {
            "clock": row["clock"],
            "setting": _setting(row),
            "method": row["method"],
            "tree": str(tuple(row["action"])) if row["action"] else "",
            "ratio": str(Ratio(row["ratio"], row["error"])),
        }
        for row in replayed
        if row["clock"] != WALL
    ]


def averages(summary: dict[str, Any]) -> list[Cells]:
    """The selector's speed over each rival's, mean over sampling settings; and its share of the time."""
    ratios = [
        {"figure": figure, "value": _interval(value, summary[f"{figure}_interval_95"])}
        for figure, value in summary.items()
        if f"{figure}_interval_95" in summary
    ]
    return [*ratios, {"figure": "selector_time_share", "value": f"{summary['selector_time_share']:.2%}"}]


def show(evaluation: dict[str, Any]) -> None:
    """The tables and findings of an evaluation on the terminal."""
    caption = (
        "best static: of all verifiers, by the training texts; ratios are to it. "
        "In brackets 95% intervals over sources; ± one standard error over sources"
    )
    summary = evaluation["summary"]
    for title, rows, below in (
        ("Held-out prompts decoded, and held-out texts replayed", methods(evaluation), caption),
        (
            "Held-out texts replayed on synthetic clocks: speed over the best static tree (± one standard error)",
            synthetic(evaluation["replayed"]),
            None,
        ),
        ("The selector's speed, mean over sampling settings", averages(summary), None),
        ("The selector's speed by sampling setting, decoded and replayed", gains(summary), None),
    ):
        if rows:
            table = Table(*rows[0], title=title, title_justify="left", caption=below)
            for row in rows:
                table.add_row(*row.values())
            console.print(table)
    for line in (headline(evaluation), *decisions(evaluation)):
        console.print(line, soft_wrap=True)
    for line in evaluation["disagreements"]:
        console.print(f"decoding and replay disagree: {line}", soft_wrap=True)
