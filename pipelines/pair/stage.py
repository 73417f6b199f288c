"""Stage `pair`: train a pair or a head, or check that a given pair loads; write the prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen.models.heads import load_head, require_library
from data_gen.models.pair import resolve_device
from pipelines.config import Config, Embedded
from pipelines.pair import corpus, head, language_model, loops, prompt_writing, tasks
from pipelines.pair.loading import depends, load_pair, tokenizer_of
from pipelines.run import Stage, console, progress, write_json
from pipelines.tracking import describe, mlflow_run
from selector.files import atomically

SECTIONS = ("pair", "prompts", "sampling", "data")
TASK = 256  # tokens of the longest prompt of a task, and of its output, as in the demo
# the tokenizer, and the token ids of the training files and of some held-out ones, int64 [tokens] each
Corpus = tuple[PreTrainedTokenizerFast, torch.Tensor, torch.Tensor]


def plan(config: Config) -> list[str]:
    if (embedded := config.pair.trained) is None:
        models = [f"load {config.pair.target} and {config.pair.drafting} and compare their vocabularies"]
    elif config.pair.head:
        models = [f"train the head for {config.pair.names[0]}: {_steps(embedded, 'head')}"]
    else:
        models = [
            f"train the {role}: {layers} layers x {embedded.hidden}, {_steps(embedded, role)}"
            for role, layers in layers_of(embedded).items()
        ]
    return [*models, *prompt_writing.plan(config)]


def layers_of(embedded: Embedded) -> dict[str, int]:
    """By role; the target begins as a base where it is trained in two parts."""
    base = {"base": embedded.layers} if embedded.loop_steps else {}
    return {**base, "target": embedded.layers, "draft": 1}


def _steps(embedded: Embedded, role: str) -> str:
    schedule = language_model.Schedule.of(embedded, role)
    return f"{schedule.steps} steps of {schedule.batch} x {embedded.context} tokens"


def stage_of(config: Config) -> Stage | None:
    """The stage with what it depends on; None for a pair that is given, and checked at every call."""
    if config.pair.trained is None:
        return None
    return _embedded(config, corpus.described(corpus.stdlib_files()))


def _embedded(config: Config, source: dict[str, Any]) -> Stage:
    folder = config.folder / "pair"
    outputs = folder / "models", folder / "manifest.json"
    return Stage("pair", config, {**depends(config), "corpus": source}, outputs, costly=True)


def run(config: Config) -> None:
    make_ready(config)
    prompt_writing.check_splits(config, prompt_writing.write(config, tokenizer_of(config)))


def make_ready(config: Config) -> None:
    """Train a pair or a head of the run's own unless it is trained, or check that another pair loads."""
    folder = config.folder / "pair"
    if config.pair.head:
        require_library()
    if config.pair.trained is not None:
        files = corpus.stdlib_files()
        stage = _embedded(config, corpus.described(files))
        if stage.begin():
            with mlflow_run(config, "pair", SECTIONS) as mlflow:
                train = train_head if config.pair.head else train_embedded
                train(config, config.pair.trained, files, folder, mlflow)
            stage.finish()
    else:
        pair = load_pair(config, shapes=True)
        stage = Stage("pair", config, {**depends(config), "fingerprint": pair.fingerprint}, ())
        random = "; without weights, which are random: only times can be measured" if pair.has_random_weights else ""
        stage.say(f"{config.pair.target} and {config.pair.drafting} load and share their vocabulary{random}")
        stage.finish()


def _encoded(
    embedded: Embedded,
    seed: int,
    files: list[corpus.SourceFile],
    kept: Path,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Corpus:
    """The corpus, from the file `kept` if an interrupted run has written it; a tokenizer is trained unless it is given.

    Tests are left out, because they are two thirds of the library and similar to each other; tasks are made from them.
    """
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        return language_model.wrapped(Tokenizer.from_str(state["tokenizer"])), *state["streams"]
    training = [file for file in files if not file.held_out][: embedded.max_files]
    held_out = [file for file in files if file.held_out][:64]
    if tokenizer is None:
        size = language_model.vocabulary_of(embedded)
        tokenizer = language_model.train_tokenizer([file.text for file in training], size)
    count, number, streams = tasks.counter(tokenizer), embedded.documents, []
    longest = min(embedded.context // 2, TASK)
    for part in (training, held_out):
        made = [each.text for file in part for each in tasks.documents(file, number, count, longest)]
        texts = [file.text for file in part if file.kind != "tests"]
        streams.append(language_model.encode_corpus(tokenizer, [*texts, *made]))
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomically(kept) as path:
        torch.save({"tokenizer": tokenizer.backend_tokenizer.to_str(), "streams": tuple(streams)}, path)
    return tokenizer, streams[0], streams[1]


def train_embedded(
    config: Config, embedded: Embedded, files: list[corpus.SourceFile], folder: Path, mlflow: Any
) -> None:
    """Train the tokenizer, the target, and the draft distilled from it, unless they are finished."""
    models = folder / "models"
    kept = models / "corpus.checkpoint"
    device = resolve_device(config.pair.device)
    with console.status("encoding the corpus"):
        encoded = _encoded(embedded, config.seed, files, kept)
    trained = partial(_trained, embedded, config.seed, encoded, models, device)
    if embedded.loop_steps:
        base = trained("base", language_model.next_token_loss)
        target = trained("target", loops.loss_without_loops, base)
    else:
        target = trained("target", language_model.next_token_loss)
    draft = trained("draft", language_model.distillation_loss(target), target)
    _, training, held_out = encoded
    overlap = language_model.mean_overlap(target, draft, held_out, embedded.context)
    found = f"mean overlap on held-out text {overlap:.3f}"
    console.print(f"[bold]pair[/]: {found}")
    manifest = {
        "overlap": overlap,
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "tokens": len(training),
        "files": [{"path": f.path, "sha256": f.sha256, "kind": f.kind, "held_out": f.held_out} for f in files],
    }
    once, again = language_model.copy_losses(target, embedded.context // 2, config.seed)
    console.print(f"[bold]pair[/]: loss of the target on random tokens {once:.2f}, when they come again {again:.2f}")
    manifest["copying"] = {"once": once, "again": again}
    write_json(folder / "manifest.json", manifest)
    kept.unlink()
    mlflow.log_metric("overlap", overlap)
    describe(mlflow, found)


def train_head(config: Config, embedded: Embedded, files: list[corpus.SourceFile], folder: Path, mlflow: Any) -> None:
    """Train a head for the embedded target, on what its draft was trained on, unless it is finished."""
    name, models = config.pair.names[0], folder / "models"
    kept = models / "corpus.checkpoint"
    device = resolve_device(config.pair.device)
    with console.status("encoding the corpus"):
        encoded = _encoded(embedded, config.seed, files, kept, PreTrainedTokenizerFast.from_pretrained(name))
    target = language_model.load(Path(name), embedded.context, device)
    if not (models / "head" / "config.json").exists():
        fresh = head.new_head(name, config.seed).to(device)
        _train(embedded, config.seed, encoded, models / "head", fresh, head.head_loss(target))
    trained = load_head(str(models / "head"), name, device, torch.float32)
    overlaps = head.overlaps(trained, target, language_model.windows(encoded[2], embedded.context).to(device))
    found = f"mean overlap on held-out text by depth: {', '.join(f'{each:.3f}' for each in overlaps)}"
    console.print(f"[bold]pair[/]: {found}")
    parameters = {"target": target.num_parameters(), "head": trained.num_parameters()}
    about = {"overlap": overlaps[0], "overlaps": overlaps, "parameters": parameters, "tokens": len(encoded[1])}
    write_json(folder / "manifest.json", about)
    kept.unlink()
    mlflow.log_metric("overlap", overlaps[0])
    describe(mlflow, found)


def _trained(
    embedded: Embedded,
    seed: int,
    encoded: Corpus,
    folder: Path,
    device: str,
    role: str,
    loss_fn: language_model.Loss,
    start: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """The model that an interrupted run finished, or one trained now from random weights or those of `start`."""
    if not (folder / role / "config.json").exists():  # the stage has checked that the inputs are the same
        tokenizer, layers = encoded[0], layers_of(embedded)[role]
        model: Any = language_model.build_model(embedded, layers, len(tokenizer), tokenizer.eos_token_id, seed)
        if start is not None:
            language_model.begin_with(model, start)
        _train(embedded, seed, encoded, folder / role, model.to(device), loss_fn)
    return language_model.load(folder / role, embedded.context, device)


def _train(
    embedded: Embedded, seed: int, encoded: Corpus, folder: Path, model: Any, loss_fn: language_model.Loss
) -> None:
    """Train a model, go on where a run was interrupted, and write it with its tokenizer to a folder of its role."""
    (tokenizer, stream, _), role = encoded, folder.name
    schedule, checkpoint = language_model.Schedule.of(embedded, role), folder.with_suffix(".checkpoint")
    repeated, longest = int(schedule.repeats * len(stream)), embedded.context // 2
    shortest = longest if role == "base" else language_model.SHORTEST  # its further steps add the other distances
    stream = torch.cat((stream, language_model.repeats(repeated, len(tokenizer), longest, seed, shortest)))
    with progress() as bar:
        task = bar.add_task(f"training the {role}", total=schedule.steps, note="")

        def on_step(step: int, loss: float) -> None:
            bar.update(task, completed=step, note=f"loss {loss:.3f}")

        language_model.train(model, loss_fn, stream, schedule, embedded.context, seed, checkpoint, on_step)
    with atomically(folder) as path:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    checkpoint.unlink(missing_ok=True)
