"""What a run on logs found: in words on the terminal, and on one page."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.config import Config
from pipelines.report.page import STYLE, folded, listed, note, table
from pipelines.run import provenance
from selector.files import atomically
from selector.schema import DRAFTER, TEXT
from selector.train.replay import Ratio

Figures = dict[str, Any]
LEVELS = {TEXT: "token ids alone", DRAFTER: "with the drafter's hits"}


def write(config: Config, evaluation: Figures) -> str:
    """Write `report.html` and `report.txt`; the latter's text."""
    logs = evaluation["logs"]
    words = "\n".join(in_words(logs, config.folder))
    for name, text in (("report.txt", words + "\n"), ("report.html", _page(config, logs, words))):
        with atomically(config.folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return words


def in_words(logs: Figures, folder: Path) -> Iterable[str]:
    """A line for each batch size, how well accepted lengths are predicted, and where everything is."""
    texts, roots, accepted = logs["texts"], logs["roots"], logs["accepted"]
    yield f"{logs['drafter']}: {sum(texts.values())} texts, {texts['test']} held out, {roots['test']:,} positions."
    if not logs["dense"]:
        yield "The log knows only what its own steps drafted: no other policy can be replayed on it."
    for split, words in (("train", "training"), ("test", "held-out")):
        own = accepted[split]
        yield (
            f"A chain of {own['length']} is accepted {own['labelled']:.2f} tokens far on {words} texts; the network "
            f"expects {own['predicted']:.2f}."
        )
    for entry in logs["by_batch"]:
        place = f"{entry['batch']} different requests" if entry["mixed"] else f"Batch {entry['batch']}"
        over = f"{_ratio(entry, 'rule')} of the best rule, {_ratio(entry, 'fixed')} of the best fixed length"
        speed = f"{entry['selector']:.2f} times plain decoding"
        yield f"{place}, {LEVELS[entry['level']]}: {speed}, {over} ({entry['fixed_length']})."
    if "decision_seconds" in logs:
        found = logs["decision_seconds"]
        times = " and ".join(f"{1e6 * found[level]:.0f} us {words}" for level, words in LEVELS.items())
        yield f"A decision takes {times}, features at {found['context']:,} tokens included; it is not in these figures."
    if not logs["by_batch"] and logs["dense"]:
        yield "No step times were given: --timings FILE says what a selector gains, and exports it."
    yield f"Written to {folder}: report.html, evaluation.json{', selector/' if logs['exported'] else ''}."


def _ratio(entry: Figures, other: str) -> str:
    return str(Ratio(**entry[f"selector_over_{other}"]))


def metrics(logs: Figures) -> dict[str, float]:
    """What MLflow shows of a run."""
    found = {}
    for entry in logs["by_batch"]:
        kind = "mixed" if entry["mixed"] else "equal"
        for other in ("rule", "fixed"):
            name = f"test/{kind}/{entry['level']}/over_{other}/batch_{entry['batch']}"
            found[name] = entry[f"selector_over_{other}"]["value"]
    return found


def _page(config: Config, logs: Figures, words: str) -> str:
    sections = [
        ("All requests of a batch take one decision", _batches(logs, mixed=False)),
        ("Different requests in one batch", _batches(logs, mixed=True)),
        ("By kind of work", table([row for entry in logs["by_batch"] for row in _kinds(entry)])),
        ("Rules of other projects", table([_rival(row) for row in logs["rivals"]])),
        ("Every fixed length", table([_length(row) for row in logs["lengths"]])),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections if content)
    title = f"{config.name}: what a selector gains on logs of {logs['drafter']}"
    made = folded("Where this comes from", json.dumps(provenance(config), indent=1))
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>{STYLE}</head>"
        f"<body><h1>{html.escape(title)}</h1>{listed(words.splitlines())}{body}{made}</body></html>\n"
    )


def _batches(logs: Figures, mixed: bool) -> str:
    rows = [
        {
            "batch": entry["batch"],
            "the selector sees": LEVELS[entry["level"]],
            "best fixed length": f"{entry['fixed']:.2f} ({entry['fixed_length']} tokens)",
            "best rule": entry["rule"],
            "selector": entry["selector"],
            "oracle": entry["oracle"],
            "over the rule": _ratio(entry, "rule"),
            "over the fixed length": _ratio(entry, "fixed"),
        }
        for entry in logs["by_batch"]
        if entry["mixed"] == mixed
    ]
    if not rows:
        return ""
    return table(rows) + note(
        "Speeds over plain decoding on the held-out texts, replayed exactly; ratios ± one standard error over sources. "
        "The rule copies from a match of some length on and else drafts a fixed length, both tuned on the training "
        "texts. The oracle knows what will be accepted."
    )


def _kinds(entry: Figures) -> list[Figures]:
    place = {"batch": f"{entry['batch']}{' different requests' if entry['mixed'] else ''}", "level": entry["level"]}
    return [
        {**place, "kind": kind, "over the rule": _ratio(own, "rule"), "over the fixed length": _ratio(own, "fixed")}
        for kind, own in entry["by_kind"].items()
    ]


def _rival(row: Figures) -> Figures:
    over = {f"selector over it, {LEVELS[level]}": str(Ratio(**own)) for level, own in row["selector_over_it"].items()}
    return {"batch": row["batch"], "rule": row["rule"], "times plain decoding": row["speed"], **over}


def _length(row: Figures) -> Figures:
    names = {"train": "training texts", "test": "held-out texts"}
    tokens = {f"tokens a step, {words}": row[split]["tokens_per_step"] for split, words in names.items()}
    return {
        "drafted": row["length"],
        **tokens,
        **{f"accepted, {words}": row[split]["accepted"] for split, words in names.items()},
    }
