"""What an evaluation found, in words: the first thing that a reader of its report should see."""

from __future__ import annotations

from typing import Any

from data_gen.models.sampling import Sampling
from selector.train.replay import Ratio


def headline(evaluation: dict[str, Any]) -> str:
    """One sentence: where the selector pays on this machine, and where it does not."""
    decides = {(mode["temperature"], mode["top_p"]): bool(mode["feature_levels"]) for mode in evaluation["decisions"]}
    gains: list[str] = []
    kept: list[str] = []
    for row in evaluation["summary"]["by_setting"]:
        setting = str(Sampling(row["temperature"], row["top_p"]))
        if decides[row["temperature"], row["top_p"]]:
            of_what = "" if gains else " as fast as the best fixed tree"
            gains.append(f"{row['replay_ratio']:.2f} times{of_what} at {setting}")
        else:
            kept.append(setting)
    if not gains:
        return "On this machine nothing is gained by deciding: the selector keeps the best fixed tree everywhere."
    text = f"On this machine the selector, replayed on held-out texts, decodes {', '.join(gains)}"
    return f"{text}; at {', '.join(kept)} it keeps the fixed tree." if kept else f"{text}."


def details(evaluation: dict[str, Any]) -> list[dict[str, str]]:
    """By sampling setting the two measurements of the gain, as cells of a table."""
    trees = {(mode["temperature"], mode["top_p"]): mode for mode in evaluation["decisions"]}
    rows = []
    for row in evaluation["summary"]["by_setting"]:
        low, high = row["wall_interval_95"]
        mode = trees[row["temperature"], row["top_p"]]
        rows.append(
            {
                "setting": str(Sampling(row["temperature"], row["top_p"])),
                "decides": _how(mode),
                "replayed ± error": str(Ratio(row["replay_ratio"], row["replay_error"])),
                "decoded [95%]": f"{row['wall_ratio']:.3f} [{low:.3f}, {high:.3f}]",
                "replayed at decoded times": str(Ratio(**row["paced_ratio"])) if row["paced_ratio"] else "",
                "over the rule, replayed": str(Ratio(**row["replay_over_rule"])),
                "at decoded times": str(Ratio(**row["paced_over_rule"])) if row["paced_over_rule"] else "",
            }
        )
    return rows


def _how(mode: dict[str, Any]) -> str:
    """How a selector decides under a setting, in a few words."""
    if mode["rule"]:
        least, length = mode["rule"]
        return f"by rule: lookup {length} from a match of {least} on, else {tuple(mode['action'])}"
    return (
        f"yes, {' then '.join(mode['feature_levels'])}"
        if mode["feature_levels"]
        else f"no, drafts {tuple(mode['action'])}"
    )
