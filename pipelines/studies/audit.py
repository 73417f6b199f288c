"""Stage `audit`: every verifier on one pair, beside the optimum, without any training.

At one root in the middle of every `data.stride` tokens of the target's texts, a tree of every kind is drafted, and the
block efficiency of each verifier on it is computed exactly. At every eighth root the acceptance with one to four
children is measured, too. Intervals are 95% bootstrap over sources, with the same resamples for all settings.

Legend: B the estimate and its bootstrap resamples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from data_gen.models.pair import ModelPair
from data_gen.traces import ROWS_VERSION
from data_gen.trees import Topology
from data_gen.verification.base import IID
from pipelines.config import Config, SamplingSetting
from pipelines.pair.loading import load_pair, pair_names, prompts_depend, prompts_of
from pipelines.quick.texts import DEPTH, SPLIT, texts_of
from pipelines.report.page import document, note, sentence, with_interval
from pipelines.report.page import table as html_table
from pipelines.run import Journal, Stage, console, progress, write_json
from pipelines.statistics import interval, source_weights, sums_by_source
from pipelines.studies.audit_trees import STYLED, TREE, Drafts, RootedText, acceptances
from pipelines.tracking import describe, mlflow_run
from selector.files import atomically
from selector.schema import InputError

SECTIONS = ("pair", "prompts", "sampling", "data", "evaluate", "audit")
MIN_ROOTS = 8  # under each sampling setting
ACCEPTANCE_EVERY = 8  # roots
ON_OTHER_DRAFTS = ("specinfer", "traversal", "lifted_uniform")  # compared on other temperatures and shapes
MEAN = "mean"
NOTES = {
    f"Verifiers on trees of {TREE.K} branches of {TREE.L2} tokens": "Tokens per step (block efficiency: accepted "
    "tokens and the one that the verifier adds) as a multiple of traversal's, by sampling setting and on average. "
    "In brackets: 95% intervals over source files.",
    "Other ways to draft": "As above, relative to traversal on the independent drafts of the same roots.",
    "Acceptance at one node": "The probability that one of k drafted children is accepted, mean over sampling "
    "settings. The optimum is the most that any verifier can reach (MDSD).",
}
Row = dict[str, Any]
Key = tuple[str, int | None, str]  # drafts, number of children (None: a block efficiency), verifier


def plan(config: Config) -> list[str]:
    audit = config.audit
    return [
        f"{audit.roots} roots over {len(config.sampling)} sampling settings, {len(audit.verifiers)} verifiers, "
        f"{len(kinds(config))} kinds of drafted trees; tables in {config.folder / 'audit.json'} and audit.html"
    ]


def run(config: Config) -> None:
    pair, drafts = load_pair(config), kinds(config)
    per_setting = roots_per_setting(config, pair)
    depends = {
        "pair": pair.fingerprint,
        "rows_version": ROWS_VERSION,
        "seed": config.seed,
        "dtype": config.pair.dtype,
        "sampling": [setting.model_dump(mode="json") for setting in config.sampling],
        "audit": config.audit.model_dump(mode="json"),
        "topologies": {each.name: each.topology.parents for each in drafts if each.topology is not None},
        "data": {"tokens": config.data.tokens, "stride": config.data.stride},
        "prompts": prompts_depend(config, SPLIT),
    }
    outputs = config.folder / "audit.json", config.folder / "audit.html"
    stage = Stage("audit", config, json.loads(json.dumps(depends)), outputs)
    if not stage.begin():
        return
    with mlflow_run(config, "audit", SECTIONS) as mlflow, progress() as bar:
        stage.replace()
        task = bar.add_task("measuring roots", total=per_setting * len(config.sampling), note="")
        journal = Journal(config.folder / "audit-roots.jsonl", stage.depends)
        bar.update(task, completed=per_setting * len(journal.entries))
        for setting in config.sampling[len(journal.entries) :]:
            journal.add(list(measure(config, pair, setting, drafts, per_setting, lambda: bar.advance(task))))
        rows = tabulate(config, journal.entries)
        found, tables = _best_of(rows), dict(zip(NOTES, _shown(rows), strict=True))
        write_json(outputs[0], {"found": found, **rows})
        with atomically(outputs[1]) as partial:
            sections = [(title, html_table(table) + note(NOTES[title])) for title, table in tables.items()]
            partial.write_text(document(f"Audit of {config.name}", sentence(found), sections), encoding="utf-8")
        for path in outputs:
            mlflow.log_artifact(str(path))
        means = (row for row in rows["block_efficiency"] if row["setting"] == MEAN and row["drafts"] == IID)
        mlflow.log_metrics({f"of traversal/{row['verifier']}": row["of_traversal"] for row in means})
        describe(mlflow, found)
    stage.finish()
    for title, table in tables.items():
        console.print(_printed(title, table))
    stage.say(found)
    stage.say(f"{outputs[1].resolve()}")


def kinds(config: Config) -> list[Drafts]:
    """The kinds of trees that are drafted at every root, i.i.d. drafts first, with which the others are compared.

    Raises:
        InputError: a topology's file is missing or does not hold a tree, or two kinds share a name.
    """
    others = tuple(name for name in ON_OTHER_DRAFTS if name in config.audit.verifiers)
    result = [
        Drafts(IID, config.audit.verifiers),
        *(Drafts(style, verifiers, style) for style, verifiers in STYLED.items()),
        *(Drafts(f"draft {heat:g}x as hot", others, heat=heat) for heat in config.audit.draft_temperatures),
        *(Drafts(path.stem, others, topology=_topology(path)) for path in config.audit.topologies),
    ]
    names = [drafts.name for drafts in result]
    if len(set(names)) < len(names):
        raise InputError(f"audit.topologies: two kinds of trees share a name: {', '.join(names)}")
    return result


def _topology(path: Path) -> Topology:
    try:
        return Topology.from_paths(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"audit.topologies: {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"audit.topologies: {path}: not a list of child-rank paths: {error}") from error


def roots_per_setting(config: Config, pair: ModelPair) -> int:
    """Raises InputError where the roots are too few, or more than the prompts give."""
    wanted, settings = config.audit.roots // len(config.sampling), len(config.sampling)
    if wanted < MIN_ROOTS:
        raise InputError(f"audit.roots: fewer than {MIN_ROOTS} for each of {settings} sampling settings")
    most = len(prompts_of(config, pair, SPLIT)) * len(_middles(config, config.data.tokens))
    if wanted > most:
        names = " and ".join(pair_names(config))
        raise InputError(
            f"audit.roots: the {SPLIT} prompts of {names} give at most {most} roots a setting, not {wanted}"
        )
    return wanted


def _middles(config: Config, roots: int) -> list[int]:
    """The middle root of every `data.stride` roots of a text with so many roots."""
    end, stride = min(roots, config.data.tokens), config.data.stride
    return [(begin + min(begin + stride, end)) // 2 for begin in range(0, end, stride)]


def measure(
    config: Config,
    pair: ModelPair,
    setting: SamplingSetting,
    drafts: list[Drafts],
    count: int,
    done: Callable[[], None],
) -> Iterator[Row]:
    """The results at up to `count` roots of one sampling setting, as JSON values."""
    sampling, number = setting.build(), 0
    for source, written, generator in texts_of(config, pair, sampling):
        text = RootedText(pair, written, sampling)
        for root in _middles(config, len(written.tokens) - written.start - DEPTH)[: count - number]:
            closely = number % ACCEPTANCE_EVERY == 0
            p_V, q_V = text.target_probs_TV[root], text.draft_probs_TV[root]
            yield {
                "source": source,
                "efficiency": {each.name: text.efficiencies(root, each, generator) for each in drafts},
                "acceptance": acceptances(p_V, q_V, config.audit.verifiers, generator) if closely else [],
            }
            number += 1
            done()
        if number == count:
            return


def tabulate(config: Config, measured: list[list[Row]]) -> dict[str, list[Row]]:
    """The rows of `audit.json`, by sampling setting and for the mean of all settings."""
    settings = [*(str(setting.build()) for setting in config.sampling), MEAN]
    means = _means(config, measured)
    base = means[IID, None, "traversal"]
    efficiencies, accepted = [], []
    for (drafts, k, verifier), own in means.items():
        if len(own) < len(measured):  # an optimum that took too long under some of the settings
            continue
        ratios = _with_mean([mine_B / base_B for mine_B, base_B in zip(own, base, strict=True)])
        for setting, mine_B, ratio_B in zip(settings, _with_mean(own), ratios, strict=True):
            row: Row = {"drafts": drafts, "verifier": verifier, "setting": setting}
            if k is None:
                row |= {"block_efficiency": float(mine_B[0]), "of_traversal": float(ratio_B[0])}
                efficiencies.append(row | {"interval_95": interval(ratio_B)})
            else:
                row |= {"k": k, "acceptance": float(mine_B[0])}
                accepted.append(row | {"interval_95": interval(mine_B)})
    return {"block_efficiency": efficiencies, "acceptance": accepted}


def _means(config: Config, measured: list[list[Row]]) -> dict[Key, list[np.ndarray]]:
    """Means over roots, [B], of each sampling setting."""
    sources = sorted({root["source"] for roots in measured for root in roots})
    weights = source_weights(len(sources), config.seed)
    result: dict[Key, list[np.ndarray]] = {}
    for roots in measured:
        values: dict[Key, list[tuple[str, float]]] = {}
        for root in roots:
            found = [(drafts, None, *each) for drafts, own in root["efficiency"].items() for each in own.items()]
            for drafts, k, verifier, value in (*found, *root["acceptance"]):
                values.setdefault((drafts, k, verifier), []).append((root["source"], value))
        for key, pairs in values.items():
            of, numbers = zip(*pairs, strict=True)
            totals, counts = (weights @ sums_by_source(each, of, sources) for each in (numbers, [1.0] * len(of)))
            with np.errstate(invalid="ignore"):  # a resample may hold none of these sources
                result.setdefault(key, []).append(totals / counts)
    return result


def _with_mean(values: list[np.ndarray]) -> list[np.ndarray]:
    return [*values, np.mean(values, axis=0)]


def _best_of(rows: dict[str, list[Row]]) -> str:
    """The best verifier, in one sentence."""
    means = [row for row in rows["block_efficiency"] if (row["setting"], row["drafts"]) == (MEAN, IID)]
    best = max(means, key=lambda row: row["of_traversal"])
    more = with_interval(best["of_traversal"], best["interval_95"])
    return (
        f"The best verifier here, {best['verifier']}, yields {more} times as many tokens per step as traversal in the "
        "mean over the sampling settings."
    )


def _shown(rows: dict[str, list[Row]]) -> list[list[Row]]:
    """The three tables, with settings or numbers of children as columns."""
    efficiency = rows["block_efficiency"]
    acceptance = [{**row, "k": f"k = {row['k']}"} for row in rows["acceptance"] if row["setting"] == MEAN]
    return [
        _beside([row for row in efficiency if row["drafts"] == IID], ("verifier",), "setting", "of_traversal"),
        _beside([row for row in efficiency if row["drafts"] != IID], ("drafts", "verifier"), "setting", "of_traversal"),
        _beside(acceptance, ("drafts", "verifier"), "k", "acceptance"),
    ]


def _beside(rows: list[Row], keys: tuple[str, ...], column: str, value: str) -> list[Row]:
    """One row for each value of some keys, with a cell for each value of another one."""
    columns = dict.fromkeys(row[column] for row in rows)
    table: dict[tuple[str, ...], Row] = {}
    for row in rows:
        own = table.setdefault(tuple(row[key] for key in keys), {**{key: row[key] for key in keys}, **columns})
        own[row[column]] = with_interval(row[value], row["interval_95"])
    return list(table.values())


def _printed(title: str, rows: list[Row]) -> Table:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(cell or "" for cell in row.values()))
    return table
