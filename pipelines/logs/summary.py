"""What a run on logs found: in words for the terminal, on an HTML page, and as metrics for MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pipelines.config import Config
from pipelines.report.page import document, folded, listed, note, table
from pipelines.run import provenance
from selector.files import atomically
from selector.schema import DRAFTER, TEXT
from selector.train.replay import Ratio

Figures = dict[str, Any]
LEVELS = {TEXT: "token ids alone", DRAFTER: "with the drafter's hits"}
SPLITS = {"train": "training texts", "test": "held-out texts"}
LEGEND = (
    "Speeds over plain decoding on the held-out texts, replayed exactly; ratios ± one standard error over sources. "
    "The lookup rule copies where the match has at least some length and otherwise drafts a fixed length; both lengths "
    "are tuned on the training texts. The oracle knows what will be accepted."
)


def write(config: Config, logs: Figures) -> str:
    """Write `report.html` and `report.txt`; returns the text of the latter."""
    words = "\n".join(_in_words(logs, str(config.folder)))
    for name, text in (("report.txt", words + "\n"), ("report.html", _page(config, logs, words))):
        with atomically(config.folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return words


def _in_words(logs: Figures, folder: str) -> Iterable[str]:
    texts, roots = logs["texts"], logs["roots"]
    yield f"{logs['drafter']}: {sum(texts.values())} texts, {texts['test']} held out, {roots['test']:,} positions."
    if not logs["dense"]:
        yield "The log holds only what its own steps drafted: no other policy can be replayed on it."
    for split, words in SPLITS.items():
        own = logs["accepted"][split]
        found = f"up to {own['labelled']:.2f} tokens on average on {words}; the network predicts {own['predicted']:.2f}"
        yield f"A chain of {own['length']} is accepted {found}."
    for entry in logs["by_batch"]:
        place = f"{entry['batch']} different requests" if entry["mixed"] else f"Batch {entry['batch']}"
        over = f"{_over(entry, 'rule')} of the lookup rule, {_over(entry, 'fixed')} of the best fixed length"
        speed = f"{entry['selector']:.2f} times plain decoding"
        yield f"{place}, {LEVELS[entry['level']]}: {speed}, {over} ({entry['fixed_length']})."
    if "decision_seconds" in logs:
        found = logs["decision_seconds"]
        times = " and ".join(f"{1e6 * found[level]:.0f} us {words}" for level, words in LEVELS.items())
        yield f"A decision takes {times}, features at {found['context']:,} tokens included; it is not in these figures."
    if not logs["by_batch"] and logs["dense"]:
        yield "No step times were given: add --timings FILE to measure the selector's gain and to export it."
    yield f"Written to {folder}: report.html, evaluation.json{', selector/' if logs['exported'] else ''}."


def _over(entry: Figures, other: str) -> str:
    return str(Ratio(**entry[f"selector_over_{other}"]))


def metrics(logs: Figures) -> dict[str, float]:
    """The selector over the lookup rule and the fixed length, for every entry of `by_batch`."""
    found = {}
    for entry in logs["by_batch"]:
        place = f"test/{'mixed' if entry['mixed'] else 'equal'}/{entry['level']}"
        for other in ("rule", "fixed"):
            found[f"{place}/over_{other}/batch_{entry['batch']}"] = entry[f"selector_over_{other}"]["value"]
    return found


def _page(config: Config, logs: Figures, words: str) -> str:
    sections = {
        "All requests of a batch take one decision": _batches(logs, mixed=False),
        "Different requests in one batch": _batches(logs, mixed=True),
        "By kind of work": table([row for entry in logs["by_batch"] for row in _kinds(entry)]),
        "Stronger rules": table(list(map(_rival, logs["rivals"]))),
        "Every fixed length": table(list(map(_length, logs["lengths"]))),
        "Provenance": folded("Where this comes from", json.dumps(provenance(config), indent=1)),
    }
    title = f"{config.name}: what a selector gains on logs of {logs['drafter']}"
    return document(title, listed(words.splitlines()), sections.items())


def _batches(logs: Figures, mixed: bool) -> str:
    rows = [
        {
            "batch": entry["batch"],
            "the selector sees": LEVELS[entry["level"]],
            "selector": entry["selector"],
            "over the lookup rule": _over(entry, "rule"),
            "lookup rule": entry["rule"],
            "over the fixed length": _over(entry, "fixed"),
            "best fixed length": f"{entry['fixed']:.2f} ({entry['fixed_length']} tokens)",
            "oracle": entry["oracle"],
        }
        for entry in logs["by_batch"]
        if entry["mixed"] == mixed
    ]
    return table(rows) + note(LEGEND) if rows else ""


def _kinds(entry: Figures) -> list[Figures]:
    place = {"batch": f"{entry['batch']}{' different requests' if entry['mixed'] else ''}", "level": entry["level"]}
    return [
        {
            **place,
            "kind": kind,
            "over the lookup rule": _over(own, "rule"),
            "over the fixed length": _over(own, "fixed"),
        }
        for kind, own in entry["by_kind"].items()
    ]


def _rival(row: Figures) -> Figures:
    over = {f"selector over it, {LEVELS[level]}": str(Ratio(**own)) for level, own in row["selector_over_it"].items()}
    return {"batch": row["batch"], "rule": row["rule"], "times plain decoding": row["speed"], **over}


def _length(row: Figures) -> Figures:
    keys = {"tokens a step": "tokens_per_step", "accepted": "accepted"}
    cells = {f"{name}, {words}": row[split][key] for name, key in keys.items() for split, words in SPLITS.items()}
    return {"drafted": row["length"], **cells}
