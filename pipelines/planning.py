"""`--plan`: for every stage what is reused, else what it would do and how long that took last time."""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType

from pipelines.config import Config
from pipelines.run import Stage, read_record, seconds_in_words
from selector.schema import InputError

# by stage the ones whose output it reads
READS = {"train": {"latency", "data"}, "evaluate": {"train"}, "export": {"evaluate"}, "report": {"evaluate", "export"}}


def planned(config: Config, modules: dict[str, ModuleType]) -> list[str]:
    """The lines of the plan of some stages, by name in the order in which they run. Models are not loaded, so that
    those of the pair are taken to be as they were."""
    lines: list[str] = []
    anew: set[str] = set()
    known: dict[str, float] = {}
    unknown = []
    for name, module in modules.items():
        stage = None if anew & READS.get(name, set()) else _stage_of(module, config)
        if stage is not None and stage.is_reusable:
            lines.append(f"{name}: {stage.outputs[0]} is reused: nothing it depends on has changed")
            continue
        anew.add(name)
        lines += [f"{name}: {line}" for line in module.plan(config)]
        seconds = _last_seconds(name, config)
        if seconds is None:
            unknown.append(name)
            continue
        known[name] = seconds
        lines.append(f"{name}: about {seconds_in_words(seconds)}, as last time")
    if len(modules) > 1:
        total = f"about {seconds_in_words(sum(known.values()))}" if known else "not known"
        lines.append(f"total: {total}" + (f"; known once they have run: {', '.join(unknown)}" if unknown else ""))
    return lines


def _stage_of(module: ModuleType, config: Config) -> Stage | None:
    with suppress(InputError):  # an earlier one has not run
        return module.stage_of(config) if hasattr(module, "stage_of") else None
    return None


def _last_seconds(name: str, config: Config) -> float | None:
    with suppress(InputError):
        seconds: float | None = read_record(config, name).get("seconds")
        return seconds
    return None
