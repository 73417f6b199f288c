"""What an evaluation found: in words, as tables for the terminal and the report, and as MLflow's
metrics."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen.models.sampling import generation_arguments
from pipelines.config import SMOLLM2, Config, Pair
from pipelines.evaluate import logged
from pipelines.evaluate.methods import (
    BEST_STATIC,
    COPYING,
    NETWORK,
    PLAIN,
    SELECTOR,
    STATIC,
    drafts_in_words,
)
from pipelines.evaluate.table import (
    ALL,
    DECODED,
    EFFICIENCY,
    ORIGINS,
    REPLAYED,
    SHARE,
    Cells,
    Figure,
    Table,
    correlations_in_words,
    fastest_first,
    sampling_name_of,
    text_of,
)
from pipelines.latency.stage import load_profile
from pipelines.pair.stage import pair_names
from pipelines.run import read_json, write_json
from pipelines.terminal import console, table
from pipelines.tracking import EXPORTED, metric_name, named
from selector import decision
from selector.actions import EMPTY
from selector.decision import Setting

ASKED = """pair.tokenizer.apply_chat_template(
    [{"role": "user", "content": "Write a Python function that counts vowels, and a test of it."}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)"""
BEGUN = 'pair.tokenizer("def main():", return_tensors="pt", return_token_type_ids=False)'
SNIPPET = """from data_gen.generate import speculative_generate
from data_gen.models.pair import ModelPair

pair = ModelPair.load("{target}", "{draft}", "{device}", "{dtype}")
inputs = {inputs}.to(pair.device)
ours = {{"custom_generate": speculative_generate, "draft_model": pair.draft}}
ours["selector"] = "{selector}"
text = pair.target.generate(**inputs, **ours, max_new_tokens=200, {arguments})
print(pair.tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
# on the terminal, which is narrow
SHOWN = ("method", "drafts", "tokens/step", "decoded", "replayed")
NOTE = (
    "Decoded: held-out prompts, two methods compared on the same prompt in the same round, with "
    "95% intervals over sources. Replayed: held-out texts, ± one standard error over sources. "
    "Neither includes the training seed or the choice of the pair. Best static tree: the fastest "
    "tree of all verifiers on the training texts."
)


@dataclass(frozen=True)
class Evaluation:
    """What `evaluation.json` holds, and the table beside it."""

    contents: dict[str, Any]
    table: Table

    @staticmethod
    def files(config: Config) -> tuple[Path, Path]:
        return config.folder / "evaluation.json", config.folder / "evaluation.parquet"

    @classmethod
    def read(cls, config: Config) -> Evaluation:
        """InputError unless there is one."""
        json_path, table_path = cls.files(config)
        return cls(read_json(json_path, "evaluate"), Table.read(table_path))

    def write(self, config: Config) -> None:
        json_path, table_path = self.files(config)
        write_json(json_path, self.contents)
        self.table.write(table_path)

    @property
    def settings(self) -> list[tuple[str, Setting]]:
        """The sampling settings, and what decides under each of them."""
        rows = self.contents["summary"]["by_setting"]
        names = [sampling_name_of(row["temperature"], row["top_p"]) for row in rows]
        settings = [Setting.of(decision_row) for decision_row in self.contents["decisions"]]
        return list(zip(names, settings, strict=True))


def title(config: Config, evaluation: Evaluation) -> str:
    if "logs" in evaluation.contents:
        drafter = evaluation.contents["logs"]["drafter"]
        return f"{config.name}: what a selector gains on logs of {drafter}"
    target = _last_part(config.pair.target)
    draft = _last_part(config.pair.draft)
    if config.pair.draft == Pair.model_fields["draft"].default:
        draft = "its draft"
    return f"{config.name}: {target} with {draft} on {load_profile(config).device}"


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def metrics(evaluation: Evaluation) -> dict[str, float]:
    """MLflow's metrics: the selector's speed over every rival by sampling setting, and its mean
    over the best static tree, by which selectors are compared."""
    if "logs" in evaluation.contents:
        return logged.metrics(evaluation.table)
    rows = evaluation.contents["summary"]["by_setting"]
    speeds = {EXPORTED: statistics.mean(row["replay_ratio"] for row in rows)}
    for row, (sampling_name, _) in zip(rows, evaluation.settings, strict=True):
        measured = {EXPORTED: row["replay_ratio"]}
        for figure in evaluation.table.select(setting=sampling_name, method=SELECTOR, kind=ALL):
            measured[metric_name(figure.label)] = figure.value
        speeds |= named(measured, row)
    return speeds


def verdicts(evaluation: Evaluation) -> list[str]:
    """What to do; then a line for each sampling setting: what is exported, and whether that is a
    loss; what is faster in replay; and the selector's gain in wall-clock time over the lookup rule
    and the best static tree. Of a log what replay tells."""
    table = evaluation.table
    if "logs" in evaluation.contents:
        return list(logged.in_words(evaluation.contents["logs"], table))
    advice = []
    lines = []
    for sampling_name, setting in evaluation.settings:
        columns = {"setting": sampling_name, "method": SELECTOR, "rival": PLAIN}
        wall = table.of(**columns, basis=DECODED)
        advice.append(f"{sampling_name}: {_advice(setting, wall)}")
        lines.append(f"{sampling_name}: {_verdict(table, sampling_name, setting, wall)}")
    return [f"What to do: {'; '.join(advice)}.", *lines, *correlations_in_words(table)]


def _advice(setting: Setting, wall: Figure) -> str:
    """What to do under a sampling setting; `wall` is the selector's speed over plain decoding."""
    if _is_loss(wall) or exported(setting) == PLAIN:
        return "decode plainly"
    words = "let the network decide"
    if exported(setting) != NETWORK:
        words = drafts_in_words(setting)
    words += f", {wall.text()} times plain decoding"
    if wall.value < 1:
        words += " (WARNING: not faster)"
    return words


def _verdict(table: Table, sampling_name: str, setting: Setting, wall: Figure) -> str:
    name = exported(setting)
    over_plain = {"setting": sampling_name, "rival": PLAIN}
    replay = table.of(**over_plain, method=SELECTOR)
    text = (
        f"the {name} is exported. It is {replay.text()} times as fast as plain decoding in replay "
        f"and {wall.text()} times in decoding."
    )
    if name == PLAIN:
        text = "plain decoding is exported: on the validation texts nothing was surely faster."
    if _is_loss(wall):
        text = f"A LOSS, so plain decoding is exported: {text.replace('is exported', 'was chosen')}"
    rivals = {}
    for rival in (BEST_STATIC, COPYING, NETWORK):
        figure = table.get(**over_plain, method=rival)
        if rival != name and figure is not None:
            rivals[rival] = figure
    static_name = f"the {BEST_STATIC}"
    if BEST_STATIC in rivals and _is_same(rivals[BEST_STATIC]):
        static_name = PLAIN
    fastest = max(rivals, key=lambda rival: rivals[rival].value)
    if round(rivals[fastest].value, 2) > round(replay.value, 2):
        fastest_name = static_name if fastest == BEST_STATIC else f"the {fastest}"
        text += (
            f" {fastest_name[0].upper()}{fastest_name[1:]} is faster in replay: "
            f"{rivals[fastest].text()} times."
        )
    gains = []
    for rival, rival_name in ((COPYING, f"the {COPYING}"), (BEST_STATIC, static_name)):
        gain = table.of(setting=sampling_name, method=SELECTOR, rival=rival, basis=DECODED)
        gains.append(f"over {rival_name} {_stands(gain)}")
    return (
        f"{text} In wall-clock time, prompt by prompt, the selector's gain {' and '.join(gains)}."
    )


def _is_same(ratio: Figure) -> bool:
    """Whether two methods do the same everywhere: their speeds are exactly equal."""
    return ratio.low == ratio.high == 1


def _stands(ratio: Figure) -> str:
    if _is_same(ratio):
        return "is zero (both decode alike)"
    if ratio.low is None or ratio.high is None:
        return f"has no interval ({ratio.text(3)})"
    if ratio.low > 1:
        words = "is there"
    elif ratio.high < 1:
        words = "is a loss"
    else:
        words = "cannot be told from none"
    return f"{words} ({ratio.text(3)})"


def _is_loss(ratio: Figure) -> bool:
    """Whether it is surely below 1."""
    return ratio.high is not None and ratio.high < 1


def losses(evaluation: Evaluation) -> list[str]:
    """The labels of the settings under which the selector was surely slower than plain decoding,
    which is exported there."""
    if "logs" in evaluation.contents:
        return logged.losses(evaluation.contents["logs"], evaluation.table)
    lost = []
    for sampling_name, setting in evaluation.settings:
        columns = {"setting": sampling_name, "method": SELECTOR, "rival": PLAIN}
        if _is_loss(evaluation.table.of(**columns, basis=DECODED)):
            lost.append(setting.label)
    return lost


def exported(setting: Setting) -> str:
    if setting.decider == decision.NETWORK:
        return NETWORK
    if setting.decider == decision.RULE:
        return COPYING
    return PLAIN if setting.action == EMPTY else STATIC


def methods(evaluation: Evaluation) -> dict[str, list[Cells]]:
    """By sampling setting every method, the fastest first: its speed over plain decoding, the
    selector's over it."""
    table = evaluation.table
    if "logs" in evaluation.contents:
        return logged.methods(table)
    rows_by_sampling: dict[str, list[tuple[float, str, Cells]]] = {}
    for entry in [*evaluation.contents["methods"], *evaluation.contents["replayed"]]:
        sampling_name = entry["setting"]
        of_method = {"setting": sampling_name, "method": entry["method"]}
        wall = table.get(**of_method, rival=PLAIN, basis=DECODED)
        replay = table.get(**of_method, rival=PLAIN)
        speed = wall or replay
        measured = {**of_method, "basis": DECODED}
        cells = {
            "method": _label(entry),
            "tokens/s": text_of(table.get(**measured), 0),
            "tokens/step": text_of(table.get(**measured, statistic=EFFICIENCY)),
            "decoded": text_of(wall),
            "replayed": text_of(replay),
            "drafts": entry["drafts"],
        }
        over_it = {"setting": sampling_name, "method": SELECTOR, "rival": entry["method"]}
        for basis in (DECODED, REPLAYED):
            cells[f"selector over it, {basis}"] = text_of(table.get(**over_it, basis=basis), 3)
        rows = rows_by_sampling.setdefault(sampling_name, [])
        rows.append((speed.value if speed else 1.0, entry["drafts"], cells))
    return {name: fastest_first(rows) for name, rows in rows_by_sampling.items()}


def _label(entry: dict[str, Any]) -> str:
    method = entry["method"]
    verifier = entry["verifier"]
    # plain decoding has no verifier, and the names of others tell theirs
    needless = method == PLAIN or verifier == "transformers" or verifier in method
    return method if needless else f"{method} ({verifier})"


def origins(evaluation: Evaluation) -> list[Cells]:
    """What the selector's tokens came from by sampling setting and kind of prompts, and its decoded
    speed there."""
    rows: list[Cells] = []
    for sampling_name, _ in evaluation.settings:
        for kind in evaluation.table.kinds(setting=sampling_name):
            columns = {"setting": sampling_name, "kind": kind, "method": SELECTOR, "basis": DECODED}
            cells = {"setting": sampling_name, "prompts": kind}
            for origin in ORIGINS:
                share = evaluation.table.of(**columns, statistic=SHARE + origin)
                cells[origin] = f"{share.value:.0%}"
            for words, rival in (("over plain", PLAIN), ("over the rule", COPYING)):
                cells[words] = text_of(evaluation.table.get(**columns, rival=rival))
            rows.append(cells)
    return rows


def show_words(title: str, evaluation: Evaluation) -> None:
    console.print(title)
    for line in verdicts(evaluation):
        console.print(line, soft_wrap=True)


def show(title: str, evaluation: Evaluation) -> None:
    show_words(title, evaluation)
    for sampling_name, rows in methods(evaluation).items():
        shown = [{name: row[name] for name in SHOWN} for row in rows]
        console.print(table(shown, f"{sampling_name}: speed of all methods over plain decoding"))
    console.print(NOTE, soft_wrap=True)
    console.print(
        f"Decisions take {evaluation.contents['summary']['selector_time_share']:.2%} of the time."
    )


def next_step(config: Config, evaluation: Evaluation) -> tuple[str, str]:
    """What to do with the run's output; and a program that decodes with the exported selector,
    where there is one."""
    if "logs" in evaluation.contents:
        if evaluation.contents["logs"]["exported"]:
            return "docs/logs.md says how an engine decides with the selector.", ""
        return "", ""
    if all(exported(setting) == PLAIN for _, setting in evaluation.settings):
        return "Decode without a draft: drafting does not pay with this pair on this machine.", ""
    folder = config.folder / "selector"
    if not (folder / "config.json").exists():
        return "`espalier export` packages the selector.", ""
    generation = generation_arguments(config.sampling[0].build())
    arguments = [f"{key}={value!r}" for key, value in generation.items() if value is not None]
    pair = config.pair
    target, draft = pair_names(config)
    program = SNIPPET.format(
        target=pair.target if pair.target == SMOLLM2 else target,
        draft=draft,
        device=pair.device,
        dtype=pair.dtype,
        inputs=ASKED if config.prompts.chat else BEGUN,
        selector=folder,
        arguments=", ".join(arguments),
    )
    return f"The exported selector is {folder.resolve()}. This program decodes with it:", program
