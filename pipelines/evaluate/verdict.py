"""The verdict of an evaluation: under each sampling setting what is exported, how fast it is, what else there is, and
what to do next. Speeds are over plain decoding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from data_gen.models.gguf import SMOLLM2
from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.config.sections import Pair
from pipelines.evaluate.methods import BEST_STATIC, COPYING, STATIC
from pipelines.pair.loading import pair_names
from pipelines.run import console, table
from selector.actions import EMPTY
from selector.decision import Mode
from selector.train.replay import Ratio

Cells = dict[str, str]  # of one row of a table, by column
MOST, SOME = 0.5, 0.15  # shares of a gain
ASKED = """pair.tokenizer.apply_chat_template(
    [{"role": "user", "content": "Write a Python function that counts the vowels of a word, and a test of it."}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)"""
BEGUN = 'pair.tokenizer("def main():", return_tensors="pt", return_token_type_ids=False)'
SNIPPET = """from data_gen.generate import speculative_generate
{imported}

pair = {load}("{target}", "{draft}", "{device}", "{dtype}")
inputs = {inputs}.to(pair.device)
ours = {{"custom_generate": speculative_generate, "draft_model": pair.draft, "selector": "{selector}"}}
text = pair.target.generate(**inputs, **ours, max_new_tokens=200, {settings})
print(pair.tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def title(config: Config, device: str) -> str:
    """The run, its pair and the machine."""
    target, draft = (name.rstrip("/").rpartition("/")[2] for name in (config.pair.target, config.pair.drafting))
    own = config.pair.drafting == Pair.model_fields["draft"].default
    return f"{config.name}: {target} with {'its draft' if own else draft} on {device}"


def setting_of(row: dict[str, Any]) -> str:
    """The sampling setting of any row of an evaluation."""
    return str(Sampling(row["temperature"], row["top_p"]))


def verdicts(evaluation: dict[str, Any]) -> list[str]:
    """One paragraph for each sampling setting."""
    rows = zip(evaluation["summary"]["by_setting"], evaluation["decisions"], strict=True)
    return [f"{setting_of(row)}: {_verdict(row, Mode.of(mode))} {wall_clock(row)}" for row, mode in rows]


def wall_clock(row: dict[str, Any]) -> str:
    """Whether the gain over the two rivals that need no learning is there in wall-clock time."""
    rivals = {COPYING: "ratio_vs_lookup_rule", BEST_STATIC: "ratio_vs_best_static_delayed"}
    said = (f"over the {rival} {_stands(row['paired'][figure])}" for rival, figure in rivals.items())
    equal = row["equal_texts"] and " All methods wrote the same text for {} of {} prompts.".format(*row["equal_texts"])
    return f"In wall-clock time, prompt by prompt, the selector's gain {' and '.join(said)}.{equal or ''}"


def _stands(ratio: dict[str, Any]) -> str:
    low, high = ratio["interval_95"]
    if low == high == 1:
        return "is nil (both decode alike)"
    words = "is there" if low > 1 else "is a loss" if high < 1 else "cannot be told from none"
    return f"{words} ({measured(ratio, 3)})"


def _verdict(row: dict[str, Any], mode: Mode) -> str:
    """The fastest choice, and what is exported if that is another one. A choice that loses is never praised."""
    speeds, exported = _speeds(row), _exported(row)
    best = max(speeds, key=lambda choice: (round(speeds[choice].value, 2), choice == exported))
    if best != exported:
        said = f"the {best} is {rounded(speeds[best])} times as fast as plain decoding in replay."
        if _drafts_nothing(mode):
            return f"{said} Plain decoding is exported, because on the validation texts nothing was surely faster."
        return f"{said} The {exported}, which is exported, is {_both(row)}.{_copying(speeds, exported)}"
    if _drafts_nothing(mode):
        return "plain decoding is exported: nothing that drafts is faster here."
    rule = max((choice for choice in speeds if choice.startswith(COPYING)), key=lambda choice: speeds[choice].value)
    over_rule = row["paired"]["ratio_vs_lookup_rule"]
    if exported != rule and over_rule["interval_95"][1] < 1:
        of = measured(over_rule)
        return f"the {rule} is faster than the {exported}, which is exported and decodes at {of} of its speed."
    return f"the {exported} is exported. It is {_both(row)}.{_copying(speeds, exported)}"


def _drafts_nothing(mode: Mode) -> bool:
    return not mode.feature_levels and mode.action == EMPTY


def _speeds(row: dict[str, Any]) -> dict[str, Ratio]:
    return {each["choice"]: Ratio(**each["over_plain"]) for each in row["choices"]}


def _exported(row: dict[str, Any]) -> str:
    (found,) = (each["choice"] for each in row["choices"] if each["exported"])
    return str(found)


def rounded(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ±{ratio.error:.2f}"


def _both(row: dict[str, Any]) -> str:
    """The speed of what is exported, replayed and decoded."""
    replayed = rounded(Ratio(**row["replayed"]["ratio_vs_autoregressive"]))
    return f"{replayed} times as fast as plain decoding in replay and {decoded_over_plain(row)} times in decoding"


def _copying(speeds: dict[str, Ratio], exported: str) -> str:
    """How much of the gain is copying: what the lookup rule adds to the static tree's speed, as a share of what the
    exported choice adds to that of plain decoding."""
    gain = speeds[exported].value - 1
    if exported == STATIC or gain < 0.01:
        return ""
    share = min(1.0, max(0.0, (speeds[COPYING].value - speeds[STATIC].value) / gain))
    much = "Most" if share >= MOST else "Some" if share >= SOME else "Little"
    return f" {much} of the gain is text that repeats itself: copying gives {share:.0%} of it."


def decisions(evaluation: dict[str, Any]) -> list[str]:
    """For each sampling setting what decides, and why."""
    rows, modes = evaluation["summary"]["by_setting"], map(Mode.of, evaluation["decisions"])
    return [f"{setting_of(row)}: {_reason(mode)}" for row, mode in zip(rows, modes, strict=True)]


def _reason(mode: Mode) -> str:
    if mode.decides:
        levels = " and then ".join(mode.feature_levels)
        longer = f" On texts of more than {mode.longest} tokens the lookup rule decides." if mode.longest else ""
        return (
            "The network decides: on the validation texts it is ahead of the static tree by two standard errors over "
            f"sources, and of the lookup rule as well. It is asked with {levels} features.{longer}"
        )
    if mode.rule is not None:
        return (
            "The lookup rule decides: on the validation texts it is ahead of the static tree by two standard errors "
            "over sources, and the network is not ahead of it by two. It copies "
            f"{mode.rule.length} tokens after a match of {mode.rule.least} or more, and drafts {mode.action} elsewhere."
        )
    return (
        "On the validation texts neither the network nor the lookup rule is ahead of the static tree by two standard "
        f"errors over sources, so {mode.action} is drafted everywhere."
    )


def measured(ratio: dict[str, Any], digits: int = 2) -> str:
    """A decoded ratio with its 95% interval, if it has one: there is none for a single source."""
    low, high = ratio["interval_95"]
    bounds = f" [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(high) else ""
    return f"{ratio['value']:.{digits}f}{bounds}"


def decoded_over_plain(row: dict[str, Any]) -> str:
    """The decoded speed of what is exported under one sampling setting."""
    return measured(row["paired"]["ratio_vs_autoregressive"])


def choices(evaluation: dict[str, Any]) -> list[Cells]:
    """By sampling setting what is exported, its speed, and what each of the other choices would give."""
    rows = []
    for row, mode in zip(evaluation["summary"]["by_setting"], evaluation["decisions"], strict=True):
        speeds, exported = _speeds(row), _exported(row)
        others = (f"{choice} {rounded(speed)}" for choice, speed in speeds.items() if choice != exported)
        rows.append(
            {
                "setting": setting_of(row),
                "exported": "plain decoding" if _drafts_nothing(Mode.of(mode)) else exported,
                "replayed": rounded(speeds[exported]),
                "the others, replayed": "\n".join(others),
                "decoded": decoded_over_plain(row),
            }
        )
    return rows


def show(title: str, evaluation: dict[str, Any]) -> None:
    """The verdict on the terminal."""
    console.print(table(choices(evaluation), f"{title}\nSpeed over plain decoding"))
    for line in verdicts(evaluation):
        console.print(line, soft_wrap=True)


def next_steps(config: Config, evaluation: dict[str, Any]) -> tuple[list[str], str]:
    """What to do with the run's output, in sentences; and a program that decodes with the exported selector, which is
    empty where no draft pays or nothing is exported yet."""
    pays = [
        (_speeds(row)[_exported(row)].value, setting)
        for setting, row, mode in zip(
            config.sampling, evaluation["summary"]["by_setting"], evaluation["decisions"], strict=True
        )
        if not _drafts_nothing(Mode.of(mode))
    ]
    if not pays:
        return ["Decode without a draft: drafting does not pay with this pair on this machine."], ""
    folder = config.folder / "selector"
    if not (folder / "config.json").exists():
        return ["`espalier export` packages the selector."], ""
    lines = [f"The exported selector is {folder.resolve()}. This program decodes with it:"]
    engines = sorted(path for path in (config.folder / "engines").glob("*") if path.is_dir())
    lines += [f"For {engine.name} see {_guide(engine)}." for engine in engines]
    setting = max(pays, key=lambda each: each[0])[1].build()
    own, names = config.pair, pair_names(config)
    settings = ", ".join(f"{key}={value!r}" for key, value in setting.generation.items() if value is not None)
    module, load = ("heads", "load_pair_with_head") if own.head else ("pair", "ModelPair.load")
    imported = f"from data_gen.models.{module} import {load.partition('.')[0]}"
    target = own.target if own.target == SMOLLM2 else names[0]
    values = {"target": target, "draft": names[1], "device": own.device, "dtype": own.dtype, "selector": str(folder)}
    inputs = ASKED if config.prompts.chat else BEGUN
    return lines, SNIPPET.format(settings=settings, imported=imported, load=load, inputs=inputs, **values)


def _guide(folder: Path) -> Path:
    """The page that says how to use an engine's files."""
    return next(iter(sorted(folder.glob("README*"))), folder).resolve()
