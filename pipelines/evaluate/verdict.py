"""The verdict of an evaluation: under each sampling setting what is exported, how fast it is, what else there is, and
what to do next. Speeds are over plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen.models.gguf import SMOLLM2
from pipelines.config import Config
from pipelines.config.sections import Pair
from pipelines.evaluate.methods import BEST_STATIC, COPYING, NETWORK, PLAIN, SELECTOR, STATIC
from pipelines.evaluate.table import Figure, Table, decoded, replayed, setting_name
from pipelines.pair.loading import pair_names
from pipelines.run import console, read_json, table, write_json
from selector import decision
from selector.actions import EMPTY
from selector.decision import Mode

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


@dataclass(frozen=True)
class Evaluation:
    """What `evaluation.json` holds, and the table beside it."""

    found: dict[str, Any]
    table: Table

    @staticmethod
    def files(config: Config) -> tuple[Path, Path]:
        return config.folder / "evaluation.json", config.folder / "evaluation.parquet"

    @classmethod
    def read(cls, config: Config) -> Evaluation:
        """InputError unless there is one."""
        found, figures = cls.files(config)
        return cls(read_json(found, "evaluate"), Table.read(figures))

    def write(self, config: Config) -> None:
        """Each file whole or not at all."""
        found, figures = self.files(config)
        write_json(found, self.found)
        self.table.write(figures)

    @property
    def settings(self) -> list[tuple[str, Mode]]:
        """The sampling settings, and what decides under each of them."""
        rows = zip(self.found["summary"]["by_setting"], self.found["decisions"], strict=True)
        return [(setting_name(row["temperature"], row["top_p"]), Mode.of(mode)) for row, mode in rows]


def verdicts(evaluation: Evaluation) -> list[str]:
    """One paragraph for each sampling setting."""
    found, rows = evaluation.table, evaluation.found["summary"]["by_setting"]
    return [
        f"{setting}: {_verdict(found, setting, mode)} {wall_clock(found, setting, row['equal_texts'])}"
        for (setting, mode), row in zip(evaluation.settings, rows, strict=True)
    ]


def wall_clock(found: Table, setting: str, equal: list[int] | None) -> str:
    """Whether the gain over the two rivals that need no learning is there in wall-clock time."""
    said = (
        f"over the {rival} {_stands(found.of(setting, SELECTOR, decoded(rival)))}" for rival in (COPYING, BEST_STATIC)
    )
    alike = equal and " All methods wrote the same text for {} of {} prompts.".format(*equal)
    return f"In wall-clock time, prompt by prompt, the selector's gain {' and '.join(said)}.{alike or ''}"


def _stands(ratio: Figure) -> str:
    if ratio.low == ratio.high == 1:
        return "is nil (both decode alike)"
    if ratio.low is None or ratio.high is None:
        return f"has no interval ({ratio.text(3)})"
    words = "is there" if ratio.low > 1 else "is a loss" if ratio.high < 1 else "cannot be told from none"
    return f"{words} ({ratio.text(3)})"


def exported(mode: Mode) -> str:
    """What is exported, in words."""
    if mode.decider == decision.NETWORK:
        return NETWORK
    return COPYING if mode.decider == decision.RULE else "plain decoding" if _drafts_nothing(mode) else STATIC


def _drafts_nothing(mode: Mode) -> bool:
    return mode.decider == decision.STATIC and mode.action == EMPTY


def _verdict(found: Table, setting: str, mode: Mode) -> str:
    """The fastest choice, and what is exported if that is another one. A choice that loses is never praised."""
    name, rivals = exported(mode), _others(found, setting, mode)
    best = max(rivals, key=lambda each: each.value)
    if _drafts_nothing(mode):
        if round(best.value, 2) <= 1:
            return "plain decoding is exported: nothing that drafts is faster here."
        return (
            f"the {best.method} is {best} times as fast as plain decoding in replay. Plain decoding is exported, "
            "because on the validation texts nothing was surely faster."
        )
    own = found.of(setting, SELECTOR, replayed(PLAIN))
    both = f"{own} times as fast as plain decoding in replay and {found.of(setting, SELECTOR, decoded(PLAIN))} times in"
    both = f"{both} decoding.{_copying(found, setting, own, name)}"
    if round(best.value, 2) > round(own.value, 2):
        said = f"the {best.method} is {best} times as fast as plain decoding in replay."
        return f"{said} The {name}, which is exported, is {both}"
    over_rule = found.of(setting, SELECTOR, decoded(COPYING))
    if over_rule.high is not None and over_rule.high < 1:
        return f"the {COPYING} is faster than the {name}, which is exported and decodes at {over_rule} of its speed."
    return f"the {name} is exported. It is {both}"


def _others(found: Table, setting: str, mode: Mode) -> list[Figure]:
    names = [name for name in (BEST_STATIC, COPYING, NETWORK) if name != exported(mode)]
    ratios = [found.get(setting, name, replayed(PLAIN)) for name in names]
    return [ratio for ratio in ratios if ratio is not None]


def _copying(found: Table, setting: str, own: Figure, name: str) -> str:
    """How much of the gain is copying: what the lookup rule adds to the best static tree's speed, as a share of what
    the exported choice adds to that of plain decoding."""
    if name == STATIC or own.value < 1.01:
        return ""
    rule, tree = (found.of(setting, each, replayed(PLAIN)).value for each in (COPYING, BEST_STATIC))
    share = min(1.0, max(0.0, (rule - tree) / (own.value - 1)))
    much = "Most" if share >= MOST else "Some" if share >= SOME else "Little"
    return f" {much} of the gain is text that repeats itself: copying gives {share:.0%} of it."


def decisions(evaluation: Evaluation) -> list[str]:
    """For each sampling setting what decides, and why."""
    return [f"{setting}: {_reason(mode)}" for setting, mode in evaluation.settings]


def _reason(mode: Mode) -> str:
    if mode.decider == decision.NETWORK:
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


def choices(evaluation: Evaluation) -> list[Cells]:
    """By sampling setting what is exported, its speed, and what each of the other choices would give."""
    found = evaluation.table
    return [
        {
            "setting": setting,
            "exported": exported(mode),
            "replayed": str(found.of(setting, SELECTOR, replayed(PLAIN))),
            "the others, replayed": "\n".join(f"{each.method} {each}" for each in _others(found, setting, mode)),
            "decoded": str(found.of(setting, SELECTOR, decoded(PLAIN))),
        }
        for setting, mode in evaluation.settings
    ]


def show(title: str, evaluation: Evaluation) -> None:
    """The verdict on the terminal."""
    console.print(table(choices(evaluation), f"{title}\nSpeed over plain decoding"))
    for line in verdicts(evaluation):
        console.print(line, soft_wrap=True)


def next_steps(config: Config, evaluation: Evaluation) -> tuple[list[str], str]:
    """What to do with the run's output, in sentences; and a program that decodes with the exported selector, which is
    empty where no draft pays or nothing is exported yet."""
    pays = [
        (evaluation.table.of(name, SELECTOR, replayed(PLAIN)).value, setting)
        for setting, (name, mode) in zip(config.sampling, evaluation.settings, strict=True)
        if not _drafts_nothing(mode)
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
    return next(iter(sorted(folder.glob("README*"))), folder).resolve()
