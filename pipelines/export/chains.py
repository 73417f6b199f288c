"""The fastest chain lengths for an engine by batch size: a file for each sampling setting, and how to use it.

All requests of a batch draft chains of one length, and a step takes as long as the engine's timings say for that batch
and length. So with b requests and chains of L tokens, `tokens per second = b E[tokens | L] / T(b, L)`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipelines.config import Config, SamplingSetting
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.export.engines import ENGINES, Defaults, Engine, Range, Served
from pipelines.latency.timings import engine_path, load_engine_profile
from pipelines.pair.loading import pair_names
from pipelines.run import Stage
from pipelines.tracking import mlflow_run
from selector.actions import ActionSpace
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import InputError, read_manifest, sha256
from selector.train.data import Texts, Timed
from selector.train.replay import Ratio, ratio_of_speeds
from selector.train.tuning import StaticTable

# verifiers that verify chains alike: token by token, or as a block
STANDARD = ("naive", "naive_tree", "specinfer")
BLOCK = ("block", "traversal", "lifted_uniform")


@dataclass(frozen=True)
class BestLength:
    """The fastest length for one batch size.

    Attributes:
        tokens_per_second: of all requests together.
        gains: speed over the engine's defaults, by their names; without those whose length was not timed.
    """

    batch: int
    length: int
    tokens_per_step: float
    tokens_per_second: float
    gains: dict[str, Ratio]


def run(config: Config, name: str) -> None:
    """Write the tables of an engine under `engines/<name>/`."""
    engine, profile = ENGINES[name], load_engine_profile(config)
    folder = config.folder / "engines" / name
    pair = pair_names(config)
    depends = {
        "latency": sha256(engine_path(config)),
        "traces": {file: shard["sha256"] for file, shard in read_manifest(traces_folder(config))["shards"].items()},
        "pair": list(pair),
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
                served, lengths = table_of(engine, setting, texts, verifiers, profile, pair)
                if served is not None and served.longest:
                    lines = _written(engine, served, lengths, setting, partial, folder)
                else:
                    reason = "drafting pays at no batch size" if served else "the engine has no draft temperature"
                    stage.say(f"{setting.build()}: no table, {reason}")
                    lines = [f"No table: {reason}."]
                sections.append("\n".join([f"## {setting.build()}", "", *lines, ""]))
            (partial / "README.md").write_text(_readme(name, engine, profile, sections))
        mlflow.log_artifacts(str(folder), f"engines/{name}")
    stage.say(f"{folder}: README.md says how to use it, and what it is predicted to gain")
    stage.finish()


def chain_verifiers(engine: Engine, verifiers: tuple[str, ...], name: str) -> tuple[str, str]:
    """The one of the run's verifiers that the engine should use on chains, and the one that it uses by default.

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
) -> tuple[Served | None, list[BestLength]]:
    """The table of one sampling setting; None where the engine cannot draft as the labels suppose.

    Args:
        verifiers: as `chain_verifiers` returns them.
    """
    sampled = draws(setting)
    if sampled is None:
        return None, []
    own = texts.setting_of((setting.temperature, setting.top_p))
    verifier, usual = verifiers
    lengths = best_lengths(own, verifier, profile, engine.defaults, usual, engine.first_is_longest)
    return Served(*pair, verifier in BLOCK, sampled, ranges_of(lengths)), lengths


def draws(setting: SamplingSetting) -> bool | None:
    """Whether drafts are sampled at the request's temperature, or are the most probable tokens (False); None for
    another draft temperature, which engines do not support."""
    own = setting.temperature if setting.draft_temperature is None else setting.draft_temperature
    return own > 0 if own in (0, setting.temperature) else None


def best_lengths(
    texts: Texts, verifier: str, profile: LatencyProfile, defaults: Defaults, usual: str, first_is_longest: bool = False
) -> list[BestLength]:
    """One for each batch size that was timed, ascending, among the lengths that were timed.

    Args:
        texts: of one sampling setting.
        verifier: whose labels hold for the chains.
        defaults: what the engine drafts without a table; the fastest of several candidates is compared with.
        usual: the verifier whose labels hold for the defaults.
        first_is_longest: whether the smallest batch must have the longest chains.
    """
    assert profile.batches is not None
    result: list[BestLength] = []
    for batch, target in zip(profile.batches.sizes, profile.batches.target, strict=True):
        own, longest = profile.at_batch(batch), min(target.sizes[-1] - 1, ActionSpace.default().depth)
        mine = _chains(texts, verifier, own)
        other = mine if usual == verifier else _chains(texts, usual, own)
        length = _fastest(mine, range((result[0].length if first_is_longest and result else longest) + 1))
        chosen = mine.replayed(length)
        gains = {}
        for name, by_batch in defaults.items():
            candidates = by_batch[max(size for size in by_batch if size <= batch)]
            if known := [each for each in candidates if each <= longest]:
                usually = other.replayed(_fastest(other, known))
                gains[name] = ratio_of_speeds(chosen, usually, texts.source_number_X)
        result.append(BestLength(batch, length, chosen.block_efficiency, batch * chosen.speed, gains))
    return result


def _chains(texts: Texts, verifier: str, profile: LatencyProfile) -> StaticTable:
    """All chains of the traces' action space, by length."""
    space = replace(ActionSpace.default(), max_K=1)
    survivals_RS = texts.survivals[verifier][:, : space.depth]  # a chain's come first
    return StaticTable.of(Timed(replace(texts, survivals={verifier: survivals_RS}), verifier, profile, space))


def _fastest(chains: StaticTable, lengths: Sequence[int]) -> int:
    """The fastest of some lengths; the first of equally fast ones."""
    return max(lengths, key=chains.speeds().tolist().__getitem__)


def ranges_of(lengths: list[BestLength]) -> list[Range]:
    """Lengths by ranges of batch sizes. A size between two timed ones takes the length of the larger one, because it is
    padded to that one's graph."""
    ranges: list[Range] = []
    for each in lengths:
        if ranges and ranges[-1].length == each.length:
            ranges[-1] = ranges[-1]._replace(last=each.batch)
        else:
            ranges.append(Range(ranges[-1].last + 1 if ranges else 1, each.batch, each.length))
    return ranges


def _written(
    engine: Engine, served: Served, lengths: list[BestLength], setting: SamplingSetting, partial: Path, folder: Path
) -> list[str]:
    """Write one setting's file and prediction to `partial`; the lines of its section, with paths in `folder`."""
    nucleus = f"-top_p-{setting.top_p:g}" if setting.top_p < 1 else ""
    name = f"temperature-{setting.temperature:g}{nucleus}"
    rows = [asdict(each) for each in lengths]
    (partial / f"{name}.{engine.suffix}").write_text(engine.write(served))
    (partial / f"{name}.prediction.json").write_text(json.dumps(rows, indent=1) + "\n")
    over = list(dict.fromkeys(gain for each in lengths for gain in each.gains))
    table = [["requests", "drafted", "tokens a step", "tokens/s", *(f"over {each}" for each in over)]]
    table.append(["---"] * len(table[0]))
    for each in lengths:
        gains = [str(each.gains.get(gain, "not timed")) for gain in over]
        numbers = str(each.batch), str(each.length), f"{each.tokens_per_step:.2f}", f"{each.tokens_per_second:.0f}"
        table.append([*numbers, *gains])
    command = engine.command(served, str(folder / f"{name}.{engine.suffix}"))
    return ["```sh", command, "```", "", *("| " + " | ".join(cells) + " |" for cells in table)]


def _readme(name: str, engine: Engine, profile: LatencyProfile, sections: list[str]) -> str:
    return f"""# Chains for {name}

Each table says how many tokens every request drafts, by the number of requests decoded together. The lengths are the
fastest by replay of the run's validation texts with the step times of {profile.device}. There is one table for each
sampling setting, and the engine takes one for all requests: choose the setting that most of your requests
have. The files follow {name} {engine.read}.

The prediction is `b E[tokens | L] / T(b, L)` tokens per second for b requests with chains of L tokens, where T was
timed and E follows from the labels; ± one standard error over the texts' sources. It assumes that all requests of a
batch decode (prompts are not counted), that contexts are as long as those of the texts, and that a request's accepted
tokens are independent of when the others end. A batch size between two timed ones takes the length of the larger one.

{engine.limits}

""" + "\n".join(sections)
