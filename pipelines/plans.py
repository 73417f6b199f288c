"""What stages would do (`--plan`), and what a stage by itself leaves outdated."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from pipelines.config import Config
from pipelines.run import Stage, read_record
from selector.schema import InputError

# for each stage, those whose output it reads
READS = {
    "train": {"latency", "data"},
    "evaluate": {"train"},
    "export": {"evaluate"},
    "report": {"evaluate", "export"},
}
KEPT = "data"  # its output takes longest, and is never replaced


def planned(config: Config, modules: dict[str, ModuleType]) -> list[str]:
    """The lines of `--plan`: for each stage, in the order in which they run, that its output is
    reused, or what it would do and how long that took last time. Models are not loaded: the pair is
    assumed to be unchanged."""
    lines: list[str] = []
    rerun: set[str] = set()
    for name, module in modules.items():
        stage: Stage | None = None
        with suppress(InputError):  # an earlier stage has not run
            if hasattr(module, "stage_of"):
                stage = module.stage_of(config)
        reads_new_output = bool(rerun & READS.get(name, set()))
        if stage is not None and not reads_new_output and stage.is_reusable:
            lines.append(f"{name}: {stage.outputs[0]} is reused: nothing it depends on has changed")
            continue
        rerun.add(name)
        earlier = finished_files(config, name)
        if earlier:
            files = ", ".join(earlier)
            words = f"replaces {files}: made from the output of an earlier stage"
            if stage is not None and stage.changes:
                words = f"replaces {files}: {stage.changes}"
                if name == KEPT:
                    words = f"ends, because {files} is of other inputs ({stage.changes}): choose "
                    words += "another name= or remove it"
            lines.append(f"{name}: {words}")
        lines += [f"{name}: {line}" for line in module.plan(config)]
        with suppress(InputError, KeyError):
            last_seconds = read_record(config, name)["seconds"]
            lines.append(f"{name}: about {_in_words(last_seconds)}, as last time")
    return lines


def finished_files(config: Config, name: str) -> list[str]:
    """The files and folders that a finished stage has written."""
    with suppress(InputError):
        record = read_record(config, name)
        tops = dict.fromkeys(Path(file).parts[0] for file in record.get("files", {}))
        return [str(config.folder / top) for top in tops]
    return []


def outdated(config: Config, anew: Collection[str], ran: Collection[str]) -> str:
    """What later stages, which did not run, have made from the output of stages that was made
    `anew`; empty where there is nothing."""
    changed = set(anew)
    files = []
    stages = []
    for name, earlier in READS.items():  # in the order in which they run
        if changed & earlier:
            changed.add(name)
            if name not in ran and finished_files(config, name):
                stages.append(name)
                files += finished_files(config, name)
    if not files:
        return ""
    return (
        f"{', '.join(files)}: made before that, and no longer of this run's output; to make them "
        f"again: espalier {', then '.join(stages)}"
    )


def _in_words(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
