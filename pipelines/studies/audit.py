"""Stage `audit`: every verifier on one pair, beside the optimum, without any training.

Texts that the target has written are cut into stretches of `data.stride` tokens. All tokens of a stretch are labelled;
the other kinds of trees, which have no labels, are drafted at one root, in its middle. Each of `audit.sampling` has a
file of its own, so that an interruption loses one setting at most. Then come tables (CSV), plots (PNG) and a page in
`runs/<name>/audit/`.

Legend: R roots of a text, D depths, A actions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data_gen.audit import RootedText, Variant, acceptances, variant_efficiencies
from data_gen.models.pair import ModelPair
from data_gen.traces import ROWS_VERSION
from data_gen.trees import Topology
from data_gen.verification.base import IID
from pipelines.config import Config, SamplingSetting
from pipelines.pair.loading import load_pair, pair_names, prompts_depend, prompts_of
from pipelines.quick.texts import SPLIT, texts_of
from pipelines.run import Stage, console, progress
from pipelines.studies import audit_page
from pipelines.tracking import describe, mlflow_run
from selector.actions import Action, ActionSpace
from selector.files import atomically
from selector.schema import InputError

SECTIONS = ("pair", "prompts", "data", "evaluate", "audit")

SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("efficiency", pa.list_(pa.float32())),  # verifier x action, mean over the stretch
        ("overlap", pa.list_(pa.float32())),  # by depth along the text, mean over the stretch
        ("distance", pa.list_(pa.float32())),
        ("variants", pa.string()),  # JSON, at the root
        ("acceptance", pa.string()),  # JSON, null at most roots
    ]
)


def folder_of(config: Config) -> Path:
    return config.folder / "audit"


def plan(config: Config) -> list[str]:
    audit = config.audit
    return [
        f"{audit.roots} roots over {len(audit.sampling)} sampling settings, {len(audit.verifiers)} verifiers, "
        f"{len(variants(config))} kinds of drafted trees; tables, plots and a page in {folder_of(config)}"
    ]


def run(config: Config) -> None:
    pair = load_pair(config)
    ways = variants(config)
    depends = {
        "pair": pair.fingerprint,
        "rows_version": ROWS_VERSION,
        "seed": config.seed,
        "dtype": config.pair.dtype,
        "audit": config.audit.model_dump(mode="json"),
        "topologies": {way.name: way.topology.parents for way in ways if way.topology is not None},
        "data": {"tokens": config.data.tokens, "stride": config.data.stride},
        "prompts": prompts_depend(config, SPLIT),
    }
    per_setting = roots_per_setting(config, pair)
    folder = folder_of(config)
    stage = Stage("audit", config, json.loads(json.dumps(depends)), (folder / "audit.html",))
    if not stage.begin():
        return
    with mlflow_run(config, "audit", SECTIONS) as mlflow, progress() as bar:
        stage.replace()
        task = bar.add_task("measuring roots", total=per_setting * len(config.audit.sampling), note="")
        measured = {**stage.depends, "audit": {**stage.depends["audit"], "bootstrap": None}}
        identity = hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()
        for number, setting in enumerate(config.audit.sampling):
            path = folder / f"roots-{number}.parquet"
            if not _holds(path, identity):
                rows = list(measure(config, pair, setting, ways, per_setting, lambda: bar.advance(task)))
                _write(path, rows, identity)
            bar.update(task, completed=(number + 1) * per_setting)
        tables = [pq.read_table(folder / f"roots-{number}.parquet") for number in range(len(config.audit.sampling))]
        results = audit_page.write(config, folder, tables)
        mlflow.log_artifacts(str(folder))
        mlflow.log_metrics(results.metrics)
        describe(mlflow, results.findings[0])
    stage.finish()
    for table in results.console:
        console.print(table)
    for line in results.findings:
        stage.say(line)
    stage.say(f"{(folder / 'audit.html').resolve()}")


def variants(config: Config) -> list[Variant]:
    """The kinds of trees that are drafted at every root; i.i.d. ones among them, which the others are compared with.

    Raises:
        InputError: a topology's file is missing, or holds no tree.
    """
    rivals = tuple(name for name in ("traversal", "lifted_uniform") if name in config.audit.verifiers)
    shaped = tuple(name for name in ("specinfer", *rivals) if name in config.audit.verifiers)
    styles: dict[str, tuple[str, ...]] = {IID: shaped}
    for entry in config.audit.styled:
        verifier, _, style = entry.partition(":")
        styles[style] = tuple(dict.fromkeys((*styles.get(style, ()), verifier)))
    shapes = [path.stem for path in config.audit.topologies]
    if len({*shapes, *styles}) < len(shapes) + len(styles):
        raise InputError(f"audit.topologies: two files, or a file and a style, share a name: {', '.join(shapes)}")
    return [
        *(Variant(style, verifiers, style=style) for style, verifiers in styles.items()),
        *(Variant(f"draft {heat:g}x as hot", rivals, heat=heat) for heat in config.audit.draft_temperatures),
        *(Variant(path.stem, shaped, topology=_topology(path)) for path in config.audit.topologies),
    ]


def roots_per_setting(config: Config, pair: ModelPair) -> int:
    """InputError where the prompts cannot give as many, before anything is measured."""
    wanted = config.audit.roots // len(config.audit.sampling)
    most = len(prompts_of(config, pair, SPLIT)) * len(stretches(config, config.data.tokens))
    if wanted > most:
        names = " and ".join(pair_names(config))
        raise InputError(
            f"audit.roots: the {SPLIT} prompts of {names} give at most {most} roots a setting, not {wanted}"
        )
    return wanted


def stretches(config: Config, roots: int) -> list[slice]:
    """The stretches of a text with so many roots."""
    end, stride = min(roots, config.data.tokens), config.data.stride
    return [slice(begin, min(begin + stride, end)) for begin in range(0, end, stride)]


def _topology(path: Path) -> Topology:
    try:
        return Topology.from_paths(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"audit.topologies: {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"audit.topologies: {path}: not a list of child-rank paths: {error}") from error


def measure(
    config: Config,
    pair: ModelPair,
    setting: SamplingSetting,
    ways: list[Variant],
    count: int,
    done: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Rows of one sampling setting, one for each of `count` stretches; fewer if texts end early."""
    action, number = Action(*config.audit.tree), 0
    closely = config.audit.acceptance_roots // len(config.audit.sampling)
    for source, text, generator in texts_of(config, pair, setting.build()):
        efficiency_VRA = ActionSpace.default().efficiencies(text.survivals(config.audit.verifiers, generator))
        distance_RD = text.distances()
        for own in stretches(config, text.roots)[: count - number]:
            root, distance_D = (own.start + own.stop) // 2, distance_RD[own].mean(0)
            asked = number * closely // count != (number + 1) * closely // count  # `closely` of them, evenly spread
            other = {way.name: variant_efficiencies(text, root, way, action, generator) for way in ways}
            yield {
                "source": source,
                "efficiency": efficiency_VRA[:, own].mean(1).flatten().tolist(),
                "overlap": (1 - distance_D / 2).tolist(),
                "distance": distance_D.tolist(),
                "variants": json.dumps(other),
                "acceptance": _acceptances(text, root, generator) if asked else None,
            }
            number += 1
            done()
        if number == count:
            return


def _acceptances(text: RootedText, root: int, generator: torch.Generator) -> str:
    found = acceptances(text.target_probs_TV[root], text.draft_probs_TV[root], generator)
    return json.dumps([[*key, value] for key, value in found.items()])


def _holds(path: Path, identity: str) -> bool:
    """Whether a file is whole and of these inputs."""
    try:
        return (pq.read_schema(path).metadata or {}).get(b"identity") == identity.encode()
    except (OSError, pa.ArrowInvalid):
        return False


def _write(path: Path, rows: list[dict[str, Any]], identity: str) -> None:
    with atomically(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA.with_metadata({"identity": identity})), partial)
