"""`espalier export --engine NAME`: settings that the engine's user passes on, and what they are predicted to gain."""

from __future__ import annotations

from data_gen.traces import read_manifest
from pipelines.config import Config
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.export.engines import BLOCK, TEMPLATES, BestLength, Settings, engine_of
from pipelines.export.lengths import best_lengths
from pipelines.latency.timings import engine_path
from pipelines.pair.loading import pair_names
from pipelines.run import Stage
from pipelines.tracking import mlflow_run
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import InputError, sha256


def run(config: Config, name: str) -> None:
    """Write an engine's settings under `engines/<name>/`, for each sampling setting."""
    head, timed, folder = config.pair.head is not None, engine_path(config), config.folder / "engines" / name
    engine, pair = engine_of(name, head), pair_names(config)
    if not timed.exists():
        raise InputError(f"{timed}: no engine's times there: espalier latency --from timings.csv")
    profile = LatencyProfile.load(timed)
    depends = {
        "latency": sha256(timed),
        "traces": {file: shard["sha256"] for file, shard in read_manifest(traces_folder(config))["shards"].items()},
        "pair": list(pair),
        "read": engine.read,
    }
    stage = Stage(f"export-{name}", config, depends, (folder,))
    texts = load_traces(config, profile.pair)["validation"]
    verifiers = engine.verifiers(config.verifiers)
    if not stage.begin():
        return
    sections = []
    for sampling in (setting.build() for setting in config.sampling):
        refused, lengths = engine.refusal(sampling), list[BestLength]()
        if not refused:
            lengths = best_lengths(engine, texts.setting_of(sampling), verifiers, profile)
            if not any(each.length for each in lengths):
                refused = "drafting pays at no batch size"
        if refused:
            stage.say(f"{sampling}: nothing is written, {refused}")
        sections.append((Settings(*pair, head, verifiers[0] in BLOCK, sampling, lengths), refused))
    page = TEMPLATES.get_template("README.j2")
    found = page.render(engine=engine, head=head, device=profile.device, sections=sections, folder=folder)
    with mlflow_run(config, f"export-{name}", ("sampling", "verifiers")) as mlflow:
        stage.replace()
        with atomically(folder) as partial:
            partial.mkdir(parents=True)
            (partial / "README.md").write_text(found)
            for settings, _ in (section for section in sections if not section[1]):
                for file, content in engine.files(settings).items():
                    (partial / file).write_text(content)
        mlflow.log_artifacts(str(folder), f"engines/{name}")
    stage.say(f"{folder}: README.md says how to use it, and what it is predicted to gain")
    stage.finish()
