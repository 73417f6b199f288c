"""Stage `logs`: from an engine's logs to a selector, without a model: training, exact replay, artefact, report.

It says what a selector gains over the best fixed length and over the best rule at each batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from data_gen.texts.logs import LoggedText, distinct, drafter_of, foreign, read_logs, read_trace_log
from data_gen.traces import versions
from pipelines.config import Config
from pipelines.latency.timings import profile_of, read_timings, remarks
from pipelines.logs import report
from pipelines.logs.artefact import decision_seconds, export
from pipelines.logs.judging import monitored, predictions, tune, untuned
from pipelines.logs.lengths import accepted, fixed_lengths
from pipelines.logs.rivals import rivals
from pipelines.logs.table import entries, rival_rows
from pipelines.logs.texts import VERIFIER, Labeller, space_of, split
from pipelines.run import Stage, console, progress, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.fitting import fit
from selector.actions import ActionSpace
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.runtime.tokens import TokenStatistics
from selector.schema import LOG, InputError, sha256
from selector.train.data import SPLITS, Texts, Timed
from selector.train.module import RootsModule, SelectorModule

SECTIONS = ("prompts", "sampling", "latency", "train", "logs")

LOGS_VERSION = 1  # bump it when the same logs give other figures
SQUARED = 0.03  # weight of the squared error: lookups of 20 tokens would else outweigh all that is said of drafts
OUTPUTS = ("evaluation.json", "report.html", "report.txt", "training")


def plan(config: Config) -> list[str]:
    texts, tested, drafter = _read(config)
    space = space_of([*texts, *tested], drafter, config.logs.longest_lookup)
    roots = sum(text.roots for text in (*texts, *tested))
    return [
        f"{len(texts) + len(tested)} texts, {roots:,} positions; {drafter} of up to {space.depth} tokens, lookups of "
        f"up to {max(space.lookups)}",
        f"train {config.train.epochs} epochs, replay, write {config.folder / 'selector'}",
    ]


def run(config: Config) -> None:
    texts, tested, drafter = _read(config)
    space = space_of([*texts, *tested], drafter, config.logs.longest_lookup)
    splits = split(texts, tested, config.prompts.validation, config.prompts.test)
    profile = _profile(config, drafter)
    outputs = tuple(config.folder / name for name in (*OUTPUTS, *(["selector"] if profile else [])))
    stage = Stage("logs", config, _depends(config), outputs)
    for file in foreign([*texts, *tested]):
        stage.say(f"{file}: hardly any of its tokens occur in the other files: is it of another tokenizer?")
    if not stage.begin():
        console.print((config.folder / "report.txt").read_text(), soft_wrap=True)
        return
    with mlflow_run(config, "logs", SECTIONS) as mlflow:
        stage.replace()
        logged = _labelled(config, splits, drafter, space)
        module = _trained(config, logged, profile, mlflow)
        evaluation = {"logs": _evaluated(config, module, logged, profile, mlflow.active_run().info.run_id)}
        write_json(config.folder / "evaluation.json", evaluation)
        words = report.write(config, evaluation)
        mlflow.log_metrics(report.metrics(evaluation["logs"]))
        for path in outputs:
            if path.is_dir():
                mlflow.log_artifacts(str(path), path.name)
            else:
                mlflow.log_artifact(str(path))
        describe(mlflow, words)
    console.print(words, soft_wrap=True)
    stage.finish()


@dataclass(frozen=True)
class Logged:
    """The texts of a run by split, as they were logged and as labelled ones.

    Attributes:
        tokens: statistics by token of the training texts.
    """

    drafter: str
    space: ActionSpace
    texts: dict[str, list[LoggedText]]
    data: dict[str, Texts]
    tokens: TokenStatistics

    @property
    def is_dense(self) -> bool:
        """Whether everything is known at every root, so that any policy can be replayed."""
        return not any(bool(texts.survivals[VERIFIER].isnan().any()) for texts in self.data.values())

    def timed(self, profile: LatencyProfile) -> dict[str, Timed]:
        return {name: Timed(texts, VERIFIER, profile, self.space) for name, texts in self.data.items()}


def _read(config: Config) -> tuple[list[LoggedText], list[LoggedText], str]:
    """Texts, those of held-out files, and the drafter."""
    if not config.logs.files:
        raise InputError("logs.files: name at least one log: espalier logs FILES.. --timings FILE")
    texts, tested = (_texts(paths, config) for paths in (config.logs.files, config.logs.test))
    kept = distinct([*texts, *tested])
    twice = len(texts) + len(tested) - len(kept)
    if twice:
        console.print(f"[bold]logs[/]: {twice} texts occur a second time; one of each counts", soft_wrap=True)
    held_out = {text.place for text in tested}
    texts, tested = ([text for text in kept if (text.place in held_out) == of] for of in (False, True))
    return texts, tested, drafter_of(kept, config.logs.drafter)


def _texts(paths: Sequence[Path], config: Config) -> list[LoggedText]:
    """Of files and of the trace stores of other runs."""
    stores = [path for path in paths if (path / "manifest.json").exists()]
    sampling = config.sampling[0].build()
    own = [text for folder in stores for text in read_trace_log(folder, sampling)]
    return [*read_logs([path for path in paths if path not in stores]), *own]


def _digest(path: Path) -> str:
    store = path / "manifest.json"
    return sha256(store if store.exists() else path)


def _depends(config: Config) -> dict[str, Any]:
    """Everything that the figures and the selector follow from."""
    files = [*config.logs.files, *config.logs.test, *([config.logs.timings] if config.logs.timings else [])]
    return {
        **versions(),
        "logs_version": LOGS_VERSION,
        "files": {str(path): _digest(path) for path in files},
        "logs": config.logs.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "shares": [config.prompts.validation, config.prompts.test],
        "sampling": config.sampling[0].model_dump(mode="json"),
        "stepped": config.latency.stepped,
        "seed": config.seed,
    }


def _profile(config: Config, drafter: str) -> LatencyProfile | None:
    """The engine's times, if they are given."""
    path = config.logs.timings
    if path is None:
        return None
    rows = read_timings(path)
    for remark in remarks(rows):
        console.print(f"[bold]logs[/]: {path}: {remark}", soft_wrap=True)
    return profile_of(rows, str(path), config.latency.stepped, f"log:{drafter}", (VERIFIER,))


def _labelled(config: Config, splits: dict[str, list[LoggedText]], drafter: str, space: ActionSpace) -> Logged:
    """Features and labels of every split; statistics by token are those of the training texts."""
    labeller = Labeller(drafter, space, config.sampling[0].build(), TokenStatistics.empty())
    with progress() as bar:
        task = bar.add_task("features", total=len(SPLITS), note="")
        labeller, train = labeller.learn_from(splits["train"])
        bar.advance(task)
        data = {"train": train}
        for name in SPLITS[1:]:
            data[name] = labeller.label(splits[name])
            bar.advance(task)
    return Logged(drafter, space, splits, data, labeller.tokens)


def _trained(config: Config, logged: Logged, profile: LatencyProfile | None, mlflow: Any) -> SelectorModule:
    """The network at its best epoch by replay of the validation texts; by the loss where none can be replayed."""
    pl.seed_everything(config.seed, verbose=False)
    train = config.train
    module = SelectorModule(
        "regressor",
        LOG.levels[1],
        [],
        train.network,
        train.learning_rate,
        train.weight_decay,
        schema=LOG.name,
        space=logged.space.to_json(),
        squared_weight=SQUARED,
    )
    own = {name: logged.data[name] for name in ("train", "validation")}
    roots = RootsModule(own, VERIFIER, LOG.levels[1], 1, train.batch, config.seed, space=logged.space)
    module.begin_at(own["train"], own["train"].labels(VERIFIER, slice(None), logged.space), roots.rows["train"])
    if profile is not None and logged.is_dense:
        module.judged = monitored(logged.timed(profile)["validation"], profile)
    with atomically(config.folder / "training") as folder:
        return fit(config, module, roots, folder, mlflow.active_run().info.run_id)


def _evaluated(
    config: Config, module: SelectorModule, logged: Logged, profile: LatencyProfile | None, run_id: str
) -> dict[str, Any]:
    """What `evaluation.json` holds; writes the artefact on the way, where there are step times."""
    found: dict[str, Any] = {
        "drafter": logged.drafter,
        "texts": {name: len(own) for name, own in logged.texts.items()},
        "roots": {name: int(own.size_X.sum()) for name, own in logged.data.items()},
        "dense": logged.is_dense,
        "accepted": {name: accepted(module, own, logged.space) for name, own in logged.data.items()},
        "lengths": fixed_lengths(logged.data, logged.space) if logged.is_dense else [],
        "by_batch": [],
        "rivals": [],
        "exported": profile is not None,
    }
    if profile is None:
        return found
    assert profile.batches is not None
    if not logged.is_dense:
        tunings = [untuned(module, logged.data["train"], profile, batch) for batch in profile.batches.sizes]
        export(config, module, profile, tunings, logged.tokens, run_id)
        return found
    timed = logged.timed(profile)
    with progress() as bar:
        task = bar.add_task("replay, by batch size", total=len(profile.batches.sizes), note="")
        predicted = {name: predictions(module, logged.data[name]) for name in ("validation", "test")}
        tunings = []
        for batch in bar.track(profile.batches.sizes, task_id=task):
            tuning = tune(timed["train"], timed["validation"], predicted["validation"], profile, batch)
            tunings.append(tuning)
            found["by_batch"] += entries(timed["test"], predicted["test"], tuning, profile)
            train, test = (timed[name].on(profile.at_batch(batch)) for name in ("train", "test"))
            found["rivals"] += rival_rows(rivals(train, test), test, predicted["test"], tuning)
    selector = export(config, module, profile, tunings, logged.tokens, run_id, timed["test"])
    found["decision_seconds"] = decision_seconds(selector, logged.texts["test"], config.sampling[0].build())
    return found
