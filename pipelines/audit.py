"""Stage `audit`: every verifier on one pair, beside the optimum, without any training.

Measures roots of real trajectories under each of `audit.sampling`, a file per setting, so that an interruption loses
one setting at most; then writes tables (CSV), plots (PNG) and a page to `runs/<name>/audit/`. `--quick` answers one
question instead: does speculation pay here, with which verifier and which tree?
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

from data_gen.audit import Variant, acceptances, efficiencies, variant_efficiencies
from data_gen.decoding import Decoder, Random
from data_gen.models import ModelPair
from data_gen.traces import ROWS_VERSION
from data_gen.trajectories import Root, TrajectoryLabeller, choose_roots, seed_of
from data_gen.trees import Topology
from data_gen.verification import get_verifier
from pipelines import audit_page
from pipelines.config import Config, SamplingSetting
from pipelines.pair import load_pair, pair_names
from pipelines.prompts import encode, prompts_digest, prompts_of
from pipelines.stage import Stage, console, mlflow_run, progress
from selector.actions import Action
from selector.schema import InputError

SPLIT = "validation"
SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("efficiency", pa.list_(pa.float32())),  # verifier x action
        ("overlap", pa.list_(pa.float32())),  # by trunk depth
        ("distance", pa.list_(pa.float32())),
        ("variants", pa.string()),  # JSON
        ("acceptance", pa.string()),  # JSON, null at most roots
    ]
)


def folder_of(config: Config) -> Path:
    return config.folder / "audit"


def plan(config: Config) -> list[str]:
    audit = config.audit
    return [
        f"{audit.roots} roots over {len(audit.sampling)} sampling settings, {len(audit.verifiers)} verifiers, "
        f"{len(variants(config))} further kinds of trees; tables, plots and a page in {folder_of(config)}"
    ]


def run(config: Config, quick: bool = False) -> None:
    if quick:
        from pipelines.audit_quick import answer

        answer(config)
        return
    pair = load_pair(config)
    ways = variants(config)
    depends = {
        "pair": pair.fingerprint,
        "rows_version": ROWS_VERSION,
        "seed": config.seed,
        "dtype": config.pair.dtype,
        "audit": config.audit.model_dump(mode="json", exclude={"quick_roots"}),
        "topologies": {way.name: way.topology.parents for way in ways if way.topology is not None},
        "data": {"tokens": config.data.tokens, "behaviour": config.data.behaviour, "stride": config.data.stride},
        "roots_per_trajectory": config.data.roots_per_trajectory,
        "prompts": {"texts": prompts_digest(config, SPLIT), "tokens": config.prompts.tokens},
    }
    per_setting = roots_per_setting(config)
    folder = folder_of(config)
    stage = Stage("audit", config, json.loads(json.dumps(depends)), (folder / "audit.html",))
    if not stage.begin():
        return
    with mlflow_run(config, "audit") as mlflow, progress() as bar:
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
        for name, value in results.metrics.items():
            mlflow.log_metric(name, value)
    stage.finish()
    for table in results.console:
        console.print(table)
    for line in results.findings:
        stage.say(line)
    stage.say(f"{(folder / 'audit.html').resolve()}")


def variants(config: Config) -> list[Variant]:
    """The further kinds of trees that are drafted at every root.

    Raises:
        InputError: a topology's file is missing, or holds no tree.
    """
    styles: dict[str, tuple[str, ...]] = {}
    for entry in config.audit.styled:
        verifier, _, style = entry.partition(":")
        styles[style] = (*styles.get(style, ()), verifier)
    rivals = tuple(name for name in ("traversal", "lifted_uniform") if name in config.audit.verifiers)
    shaped = tuple(name for name in ("specinfer", *rivals) if name in config.audit.verifiers)
    shapes = [path.stem for path in config.audit.topologies]
    if len({*shapes, *styles}) < len(shapes) + len(styles):
        raise InputError(f"audit.topologies: two files, or a file and a style, share a name: {', '.join(shapes)}")
    return [
        *(Variant(style, verifiers, style=style) for style, verifiers in styles.items()),
        *(Variant(f"draft {heat:g}x as hot", rivals, heat=heat) for heat in config.audit.draft_temperatures),
        *(Variant(path.stem, shaped, topology=_topology(path)) for path in config.audit.topologies),
    ]


def roots_per_setting(config: Config) -> int:
    """InputError where the prompts cannot give as many, before anything is measured."""
    wanted = config.audit.roots // len(config.audit.sampling)
    most = len(prompts_of(config, SPLIT)) * config.data.roots_per_trajectory
    if wanted > most:
        names = " and ".join(pair_names(config))
        raise InputError(
            f"audit.roots: the {SPLIT} prompts of {names} give at most {most} roots a setting, not {wanted}"
        )
    return wanted


def _topology(path: Path) -> Topology:
    try:
        return Topology.from_paths(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"audit.topologies: {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"audit.topologies: {path}: not a list of child-rank paths: {error}") from error


def roots_of(
    config: Config, pair: ModelPair, setting: SamplingSetting, count: int
) -> Iterator[tuple[str, TrajectoryLabeller, Root, int]]:
    """`count` roots of real trajectories: source, labeller, root and a seed of the root's own.

    Fewer, if texts end early.
    """
    sampling, left = setting.build(), count
    for prompt in prompts_of(config, SPLIT):
        seed = seed_of(config.seed, prompt.id, sampling, "audit")
        tokens = encode(pair, prompt, config.prompts.tokens)
        chooser = Random(config.data.behaviour_actions, torch.Generator().manual_seed(seed))
        decoder = Decoder(pair, sampling, get_verifier("traversal"), chooser)
        generator = torch.Generator(device=pair.device).manual_seed(seed + 1)
        decoded = decoder.decode(tokens, config.data.tokens, generator)
        roots = choose_roots(tokens, decoded, config.data.roots_per_trajectory, config.data.stride, seed)
        labeller = TrajectoryLabeller(pair, tokens + decoded.tokens, sampling, 2, config.audit.verifiers)
        for root in roots[:left]:
            yield prompt.source, labeller, root, seed_of(seed, root.length, root.step is None)
        left -= len(roots[:left])
        if left == 0:
            return


def measure(
    config: Config,
    pair: ModelPair,
    setting: SamplingSetting,
    ways: list[Variant],
    count: int,
    done: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Rows of one sampling setting."""
    action = Action(*config.audit.tree)
    closely = config.audit.acceptance_roots // len(config.audit.sampling)
    for number, (source, labeller, root, seed) in enumerate(roots_of(config, pair, setting, count)):
        generator = torch.Generator(device=pair.device).manual_seed(seed)
        with torch.inference_mode():
            labels, overlap_D, distance_D = efficiencies(labeller, root.length, config.audit.verifiers, generator)
            other = {way.name: variant_efficiencies(labeller, root.length, way, action, generator) for way in ways}
            rules = None
            if number * closely // count != (number + 1) * closely // count:  # `closely` of them, evenly spread
                p_V = labeller.sampling.probabilities(labeller.target_logits_TV[root.length - 1])
                found = acceptances(p_V, labeller.root_probs(root.length), generator)
                rules = json.dumps([[*key, value] for key, value in found.items()])
        yield {
            "source": source,
            "efficiency": labels.flatten().tolist(),
            "overlap": overlap_D.tolist(),
            "distance": distance_D.tolist(),
            "variants": json.dumps(other),
            "acceptance": rules,
        }
        done()


def _holds(path: Path, identity: str) -> bool:
    """Whether a file is whole and of these inputs."""
    try:
        return (pq.read_schema(path).metadata or {}).get(b"identity") == identity.encode()
    except (OSError, pa.ArrowInvalid):
        return False


def _write(path: Path, rows: list[dict[str, Any]], identity: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA.with_metadata({"identity": identity})), partial)
    partial.replace(path)
