"""Stage `logs`: from an engine's logs to a selector, without a model: training, exact replay, artefact, report.

It measures the gain of a selector over the best fixed length and over the lookup rule at each batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen.texts.logs import NO_DRAFTER, LoggedText, distinct, drafter_of, foreign, read_logs, read_trace_log
from pipelines.config import Config
from pipelines.latency.timings import profile_of, read_timings, remarks
from pipelines.logs import summary
from pipelines.logs.exporting import decision_seconds, export
from pipelines.logs.gains import Figures, HeldOut, accepted, entries, fixed_lengths, rival_rows
from pipelines.logs.labelling import VERIFIER, Labeller, space_of, split
from pipelines.logs.tuned import monitored, tune, untuned
from pipelines.run import Stage, console, progress, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.fitting import fit, module_of
from selector.actions import ActionSpace
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.runtime.tokens import TokenStatistics
from selector.schema import LOG, InputError, sha256
from selector.train.data import SPLITS, Texts, Timed
from selector.train.module import RootsModule, SelectorModule

SECTIONS = ("prompts", "sampling", "latency", "train", "logs")

LOGS_VERSION = 2  # to be raised when the same logs give other figures
LONGEST_LOOKUP = 20  # tokens
SQUARED = 0.03  # weight of the squared error; with 1, lookups of 20 tokens would outweigh the drafter's chains
OUTPUTS = ("evaluation.json", "report.html", "report.txt", "training")


def plan(config: Config) -> list[str]:
    log = _read(config)
    roots = sum(text.roots for text in log.texts)
    return [
        f"{len(log.texts)} texts, {roots:,} positions; {log.drafter} of up to {log.space.depth} tokens, lookups of "
        f"up to {max(log.space.lookups)}",
        f"train {config.train.epochs} epochs, replay, write {config.folder / 'selector'}",
    ]


def run(config: Config) -> None:
    log = _read(config)
    splits = split(log.train, log.tested, config.prompts.validation, config.prompts.test)
    profile = _profile(config, log.drafter)
    outputs = tuple(config.folder / name for name in (*OUTPUTS, *(["selector"] if profile else [])))
    stage = Stage("logs", config, _depends(config), outputs)
    for file in foreign(log.texts):
        stage.say(f"{file}: hardly any of its tokens occur in the other files: did another tokenizer write it?")
    if not stage.begin():
        console.print((config.folder / "report.txt").read_text(), soft_wrap=True)
        return
    with mlflow_run(config, "logs", SECTIONS) as mlflow:
        stage.replace()
        run_id = mlflow.active_run().info.run_id
        labelled = _label(config, splits, log)
        module = _train(config, labelled, profile, run_id)
        found = _evaluate(config, module, labelled, profile, run_id)
        write_json(config.folder / "evaluation.json", {"logs": found})
        words = summary.write(config, found)
        for path in outputs:
            mlflow.log_artifact(str(path))
        describe(mlflow, words, summary.metrics(found))
    console.print(words, soft_wrap=True)
    stage.finish()


@dataclass(frozen=True)
class Log:
    """The texts of the files, those of held-out files, and the drafter."""

    train: list[LoggedText]
    tested: list[LoggedText]
    drafter: str
    space: ActionSpace

    @property
    def texts(self) -> list[LoggedText]:
        return [*self.train, *self.tested]


def _read(config: Config) -> Log:
    if not config.logs.files:
        raise InputError("logs.files: name at least one log: espalier logs FILES.. --timings FILE")
    texts, tested = (_texts(paths, config) for paths in (config.logs.files, config.logs.test))
    kept = distinct([*texts, *tested])
    if twice := len(texts) + len(tested) - len(kept):
        console.print(f"[bold]logs[/]: {twice} texts are duplicates and are left out", soft_wrap=True)
    before, after = (len({text.source for text in each}) for each in ([*texts, *tested], kept))
    if shared := before - after:
        said = f"sources that are joined to others, because they have prompts in common: {shared}"
        console.print(f"[bold]logs[/]: {said}", soft_wrap=True)
    held_out = {text.place for text in tested}
    texts, tested = ([text for text in kept if (text.place in held_out) == of] for of in (False, True))
    drafter = drafter_of(kept, config.logs.drafter)
    return Log(texts, tested, drafter, space_of(kept, drafter, LONGEST_LOOKUP))


def _texts(paths: Sequence[Path], config: Config) -> list[LoggedText]:
    """The texts of log files, and of folders with the traces of other runs."""
    stores = [path for path in paths if (path / "manifest.json").exists()]
    own = [text for folder in stores for text in read_trace_log(folder, config.sampling[0].build())]
    return [*read_logs([path for path in paths if path not in stores]), *own]


def _depends(config: Config) -> dict[str, Any]:
    """Everything that determines the figures and the selector."""
    files = filter(None, [*config.logs.files, *config.logs.test, config.latency.timings])
    manifests = {path: path / "manifest.json" for path in files}
    return {
        "scalars": LOG.fingerprint,
        "logs_version": LOGS_VERSION,
        "files": {str(path): sha256(own if own.exists() else path) for path, own in manifests.items()},
        "logs": config.logs.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "shares": [config.prompts.validation, config.prompts.test],
        "sampling": config.sampling[0].model_dump(mode="json"),
        "stepped": config.latency.stepped,
        "seed": config.seed,
    }


def _profile(config: Config, drafter: str) -> LatencyProfile | None:
    """The engine's times, if there are any."""
    if (path := config.latency.timings) is None:
        return None
    rows = read_timings(path)
    for remark in remarks(rows):
        console.print(f"[bold]logs[/]: {path}: {remark}", soft_wrap=True)
    return profile_of(rows, str(path), config.latency.stepped, f"log:{drafter}", (VERIFIER,), drafter != NO_DRAFTER)


@dataclass(frozen=True)
class Labelled:
    """The texts of a run by split, as logged and as labelled."""

    labeller: Labeller
    texts: dict[str, list[LoggedText]]
    data: dict[str, Texts]

    @property
    def is_dense(self) -> bool:
        """Whether every label is known, so that any policy can be replayed."""
        return not any(bool(texts.survivals[VERIFIER].isnan().any()) for texts in self.data.values())

    def timed(self, profile: LatencyProfile) -> dict[str, Timed]:
        return {name: Timed(texts, VERIFIER, profile, self.labeller.space) for name, texts in self.data.items()}


def _label(config: Config, splits: dict[str, list[LoggedText]], log: Log) -> Labelled:
    labeller = Labeller(log.drafter, log.space, config.sampling[0].build(), TokenStatistics.empty())
    data = {}
    with progress() as bar:
        for name in bar.track(SPLITS, task_id=bar.add_task("features", total=len(SPLITS), note="")):
            if name == "train":
                labeller, data[name] = labeller.learn_from(splits[name])
            else:
                data[name] = labeller.label(splits[name])
    return Labelled(labeller, splits, data)


def _train(config: Config, labelled: Labelled, profile: LatencyProfile | None, run_id: str) -> SelectorModule:
    """The network of the best epoch, by replay of the validation texts or, where none is possible, by the loss."""
    space = labelled.labeller.space
    module = module_of(
        config, "regressor", LOG.levels[1], [], schema=LOG.name, space=space.to_json(), squared_weight=SQUARED
    )
    own = {name: labelled.data[name] for name in ("train", "validation")}
    roots = RootsModule(module, own, VERIFIER, config.train.batch, config.seed)
    module.begin_at(own["train"], VERIFIER, roots.rows["train"])
    if profile is not None and labelled.is_dense:
        module.judged = monitored(labelled.timed(profile)["validation"], profile)
    with atomically(config.folder / "training") as folder:
        return fit(config, module, roots, folder, run_id)


def _evaluate(
    config: Config, module: SelectorModule, labelled: Labelled, profile: LatencyProfile | None, run_id: str
) -> Figures:
    """What `evaluation.json` holds. Where step times are given, the artefact is written, too."""
    data, space = labelled.data, labelled.labeller.space
    found: Figures = {
        "drafter": labelled.labeller.drafter,
        "texts": {name: len(own) for name, own in labelled.texts.items()},
        "roots": {name: int(own.size_X.sum()) for name, own in data.items()},
        "dense": labelled.is_dense,
        "accepted": {name: accepted(module, own, space) for name, own in data.items()},
        "lengths": fixed_lengths(data, space) if labelled.is_dense else [],
        "by_batch": [],
        "rivals": [],
        "exported": profile is not None,
    }
    if profile is None:
        return found
    assert profile.batches is not None
    sizes = profile.batches.sizes
    if not labelled.is_dense:
        tunings = [untuned(module, data["train"], profile, batch) for batch in sizes]
        export(config, module, profile, tunings, labelled.labeller.tokens, run_id)
        return found
    timed, tunings = labelled.timed(profile), []
    with progress() as bar:
        predicted = {
            name: {level: module.scores(data[name], level) for level in LOG.levels} for name in ("validation", "test")
        }
        for batch in bar.track(sizes, task_id=bar.add_task("replay, by batch size", total=len(sizes), note="")):
            tunings.append(tune(timed["train"], timed["validation"], predicted["validation"], profile, batch))
            held_out = HeldOut(timed["test"].on(profile.at_batch(batch)), predicted["test"], tunings[-1], profile)
            found["by_batch"] += entries(held_out)
            found["rivals"] += rival_rows(timed["train"], held_out)
    selector = export(config, module, profile, tunings, labelled.labeller.tokens, run_id, timed["test"])
    found["decision_seconds"] = decision_seconds(selector, labelled.texts["test"], config.sampling[0].build())
    return found
