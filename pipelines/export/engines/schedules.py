"""Tables of one engine for a run: a file for each sampling setting, what it is predicted to gain, and how to use it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.config import Config, SamplingSetting
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.export.engines.engine import Engine, Served, ranges_of
from pipelines.export.engines.lengths import Choice, best_lengths
from pipelines.export.engines.sglang import SGLANG
from pipelines.export.engines.tensorrt_llm import TENSORRT_LLM
from pipelines.export.engines.vllm import VLLM
from pipelines.latency.timings import engine_path, load_engine_profile
from pipelines.pair.loading import pair_names
from pipelines.run import Stage
from pipelines.tracking import mlflow_run
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import InputError, read_manifest, sha256
from selector.train.data import Texts

ENGINES = {"vllm": VLLM, "sglang": SGLANG, "tensorrt-llm": TENSORRT_LLM}
# on a chain many verifiers are one: token by token, or the block as a whole
STANDARD = ("naive", "naive_tree", "specinfer")
BLOCK = ("block", "traversal", "lifted_uniform")


def run(config: Config, name: str) -> None:
    """Write the tables of an engine under `engines/<name>/`."""
    engine, profile = ENGINES[name], load_engine_profile(config)
    folder = config.folder / "engines" / name
    target, draft = pair_names(config)
    depends = {
        "latency": sha256(engine_path(config)),
        "traces": {file: shard["sha256"] for file, shard in read_manifest(traces_folder(config))["shards"].items()},
        "pair": [target, draft],
        "read": engine.read,
    }
    stage = Stage(f"export-{name}", config, depends, (folder,))
    texts = load_traces(config, profile.pair)["validation"]
    verifiers = chain_verifiers(engine, config.verifiers, name)
    if not stage.begin():
        return
    with mlflow_run(config, f"export-{name}", ("sampling", "verifiers")) as mlflow:
        stage.replace()
        with atomically(folder) as partial:
            partial.mkdir(parents=True)
            sections = []
            for setting in config.sampling:
                served, choices = table_of(engine, setting, texts, verifiers, profile, (target, draft))
                sections.append(_section(engine, served, choices, setting, partial, folder))
                if served is None or not served.longest:
                    stage.say(f"{setting.build()}: no table, {_why(served)}")
            (partial / "README.md").write_text(_readme(name, engine, profile, sections))
        mlflow.log_artifacts(str(folder), f"engines/{name}")
    stage.say(f"{folder}: README.md says how to use it, and what it is predicted to gain")
    stage.finish()


def chain_verifiers(engine: Engine, verifiers: tuple[str, ...], name: str) -> tuple[str, str]:
    """Of the run's verifiers the one that the engine is to use on chains, and the one that it uses unasked.

    Raises:
        InputError: there are labels of neither.
    """
    standard = next((each for each in verifiers if each in STANDARD), None)
    block = next((each for each in verifiers if each in BLOCK), None)
    chosen = (block if engine.blocks else None) or standard
    if chosen is None:
        raise InputError(f"verifiers: {name} verifies chains as one of {', '.join(STANDARD)} does: add one of them")
    return chosen, standard or chosen


def table_of(
    engine: Engine,
    setting: SamplingSetting,
    texts: Texts,
    verifiers: tuple[str, str],
    profile: LatencyProfile,
    pair: tuple[str, str],
) -> tuple[Served | None, list[Choice]]:
    """The table of one sampling setting; None where the engine does not draft as the labels suppose."""
    sampled = draws(setting)
    if sampled is None:
        return None, []
    own = texts.setting_of((setting.temperature, setting.top_p))
    verifier, usual = verifiers
    choices = best_lengths(own, verifier, profile, engine.defaults, usual, engine.first_is_longest)
    return Served(*pair, verifier in BLOCK, sampled, ranges_of(choices)), choices


def draws(setting: SamplingSetting) -> bool | None:
    """Whether the draft of a setting is drawn at the request's temperature (or is the likeliest token); None where its
    temperature is another one, which engines do not know."""
    own = setting.temperature if setting.draft_temperature is None else setting.draft_temperature
    if own == 0:
        return False
    return True if own == setting.temperature else None


def _why(served: Served | None) -> str:
    return "the engine knows no draft temperature" if served is None else "drafting pays at no batch size"


def file_name(setting: SamplingSetting, engine: Engine) -> str:
    nucleus = f"-top_p-{setting.top_p:g}" if setting.top_p < 1 else ""
    return f"temperature-{setting.temperature:g}{nucleus}.{engine.suffix}"


def _section(
    engine: Engine, served: Served | None, choices: list[Choice], setting: SamplingSetting, partial: Path, folder: Path
) -> str:
    """Write one setting's file; its part of the page."""
    lines = [f"## {setting.build()}", ""]
    if served is None or not served.longest:
        return "\n".join([*lines, f"No table: {_why(served)}.", ""])
    name = file_name(setting, engine)
    (partial / name).write_text(engine.write(served))
    (partial / f"{Path(name).stem}.prediction.json").write_text(json.dumps(_rows(choices), indent=1) + "\n")
    names = list(dict.fromkeys(gain for choice in choices for gain in choice.gains))
    head = ["requests", "drafted", "tokens a step", "tokens/s", *(f"over {each}" for each in names)]
    lines += ["```sh", engine.command(served, str(folder / name)), "```", "", "| " + " | ".join(head) + " |"]
    lines += ["|" + "---|" * len(head)]
    for choice in choices:
        gains = [str(choice.gains.get(each, "not timed")) for each in names]
        cells = [
            choice.batch,
            choice.length,
            f"{choice.tokens_per_step:.2f}",
            f"{choice.tokens_per_second:.0f}",
            *gains,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def _rows(choices: list[Choice]) -> list[dict[str, Any]]:
    return [asdict(choice) for choice in choices]


def _readme(name: str, engine: Engine, profile: LatencyProfile, sections: list[str]) -> str:
    return f"""# Chains for {name}

How many tokens each request drafts, by how many are decoded together: the fastest by replay of the run's validation
texts on the step times of {profile.device}. The engine takes one table for all
requests, so there is one for each sampling setting: take that of most of your requests.
Written after {name} {engine.read}.

Predicted: `b E[tokens | L] / T(b, L)` tokens per second for b requests with chains of L tokens, where T was timed and E
follows from the labels; ± one standard error over the texts' sources. This supposes that all requests of a batch decode
(prompts are not counted), at contexts as long as those of the texts, and that what one accepts says nothing of when the
others end. A batch size between two timed ones takes the length of the larger one.

{engine.limits}

""" + "\n".join(sections)
