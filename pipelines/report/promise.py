"""What the stage `quick` promised, beside what came out."""

from __future__ import annotations

from typing import Any

from pipelines.config import Config
from pipelines.evaluate.methods import COPYING, STATIC
from pipelines.evaluate.verdict import Cells, decoded_over_plain, setting_of
from pipelines.run import read_json
from selector.train.replay import Ratio


def promised(config: Config, evaluation: dict[str, Any], pair: str) -> list[Cells]:
    """One row for each sampling setting that `quick` was run for; empty where it was not run with this pair.

    Args:
        pair: the fingerprint of the pair that was evaluated.
    """
    path = config.folder / "quick.json"
    if not path.exists():
        return []
    quick = read_json(path, "quick")
    if quick["pair"] != pair:
        return []
    promises = {(row["temperature"], row["top_p"]): row["promise"] for row in quick["settings"]}
    rows = []
    for row in evaluation["summary"]["by_setting"]:
        promise = promises.get((row["temperature"], row["top_p"]))
        if promise is None:
            continue
        kind = COPYING if promise["copies"] else STATIC
        found = {each["choice"]: Ratio(**each["over_plain"]) for each in row["choices"]}
        rows.append(
            {
                "setting": setting_of(row),
                "quick's choice": f"{promise['choice']}, {promise['verifier']}",
                "promised": str(Ratio(promise["value"], promise["error"])),
                "that kind of choice, tuned and replayed": f"{found[kind]} ({kind})",
                "exported, replayed": str(Ratio(**row["replayed"]["ratio_vs_autoregressive"])),
                "exported, decoded": decoded_over_plain(row),
            }
        )
    return rows
