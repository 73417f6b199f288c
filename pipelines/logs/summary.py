"""What a run on logs found: in words for the terminal, on an HTML page, and as metrics for MLflow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pipelines.config import Config
from pipelines.report.page import write_page
from pipelines.run import provenance
from selector.files import atomically
from selector.schema import DRAFTER, TEXT
from selector.train.replay import Ratio

Figures = dict[str, Any]
LEVELS = {TEXT: "token ids alone", DRAFTER: "with the drafter's hits"}


def write(config: Config, logs: Figures) -> str:
    """Write `report.html` and `report.txt`; returns the text of the latter."""
    words = list(_in_words(logs, str(config.folder)))
    with atomically(config.folder / "report.txt") as partial:
        partial.write_text("\n".join([*words, ""]), encoding="utf-8")
    kinds = [(entry, {"all": entry, **entry["by_kind"]}) for entry in logs["by_batch"]]
    write_page(
        config.folder / "report.html",
        "logs.j2",
        title=f"{config.name}: what a selector gains on logs of {logs['drafter']}",
        lead=words,
        gains=[_gain(entry, kind, own) for entry, each in kinds for kind, own in each.items()],
        rivals=list(map(_rival, logs["rivals"])),
        provenance=json.dumps(provenance(config), indent=1),
    )
    return "\n".join(words)


def _in_words(logs: Figures, folder: str) -> Iterable[str]:
    texts, roots, accepted = (logs[key] for key in ("texts", "roots", "accepted"))
    yield f"{logs['drafter']}: {sum(texts.values())} texts, {texts['test']} held out, {roots['test']:,} positions."
    if not logs["dense"]:
        yield "The log holds only what its own steps drafted: no other policy can be replayed on it."
    if depth := len(accepted["test"]):
        means = f"{accepted['train'][-1]:.2f} tokens on average on training texts, {accepted['test'][-1]:.2f} on others"
        yield f"Accepted of a chain of {depth}: {means}."
    for entry in logs["by_batch"]:
        place = f"{entry['batch']} different requests" if entry["mixed"] else f"Batch {entry['batch']}"
        over = f"{_over(entry, 'rule')} of the lookup rule, {_over(entry, 'fixed')} of the best fixed length"
        speed = f"{entry['selector']:.2f} times plain decoding"
        yield f"{place}, {LEVELS[entry['level']]}: {speed}, {over} ({entry['fixed_length']})."
    if not logs["exported"]:
        yield "No step times were given: add --timings FILE to train a selector, to measure its gain and to export it."
    else:
        found = logs["decision_seconds"]
        times = " and ".join(f"{1e6 * found[level]:.0f} us {words}" for level, words in LEVELS.items())
        yield f"A decision takes {times}, features at {found['context']:,} tokens included; it is not in these figures."
    yield f"Written to {folder}: report.html, evaluation.json{', selector/' if logs['exported'] else ''}."


def _over(entry: Figures, other: str) -> str:
    return str(Ratio(**entry[f"selector_over_{other}"]))


def metrics(logs: Figures) -> dict[str, float]:
    found = {}
    for entry in logs["by_batch"]:
        place = f"test/{'mixed' if entry['mixed'] else 'equal'}/{entry['level']}"
        for other in ("rule", "fixed"):
            found[f"{place}/over_{other}/batch_{entry['batch']}"] = entry[f"selector_over_{other}"]["value"]
    return found


def _gain(entry: Figures, kind: str, own: Figures) -> Figures:
    return {
        "batch": f"{entry['batch']}{' different' if entry['mixed'] else ''}",
        "the selector sees": LEVELS[entry["level"]],
        "kind": kind,
        "selector": own["selector"],
        "over the lookup rule": _over(own, "rule"),
        "over the fixed length": _over(own, "fixed"),
        "lookup rule": own["rule"],
        "best fixed length": f"{own['fixed']:.2f} ({own['fixed_length']} tokens)",
        "oracle": own["oracle"],
    }


def _rival(row: Figures) -> Figures:
    over = {f"selector over it, {LEVELS[level]}": str(Ratio(**own)) for level, own in row["selector_over_it"].items()}
    return {"batch": row["batch"], "rule": row["rule"], "times plain decoding": row["speed"], **over}
