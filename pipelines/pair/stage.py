"""Stage `pair`: train the embedded pair, or check that a given pair loads; write the prompts."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pipelines.config import Config, EmbeddedModel
from pipelines.pair import corpus, language_model, prompts, tasks
from pipelines.pair.loading import depends, load_pair, tokenizer_of
from pipelines.run import Stage, console, progress, write_json
from pipelines.tracking import describe, mlflow_run
from selector.files import atomically

SECTIONS = ("pair", "prompts", "data", "evaluate")


class Streams(NamedTuple):
    """Token ids of the training files and of held-out ones, [tokens] int64 each."""

    training: torch.Tensor
    held_out: torch.Tensor


def plan(config: Config) -> list[str]:
    return [*_plan_models(config), *prompts.plan(config)]


def _plan_models(config: Config) -> list[str]:
    if config.pair.target != "embedded":
        return [f"load {config.pair.target} and {config.pair.draft} and compare their vocabularies"]
    tokens = config.pair.embedded.context
    return [
        f"train the {role}: {shape.layers} layers x {shape.hidden}, "
        f"{shape.steps} steps of {shape.batch} x {tokens} tokens"
        for role, shape in (("target", config.pair.embedded.target), ("draft", config.pair.embedded.draft))
    ]


def run(config: Config) -> None:
    folder = config.folder / "pair"
    files = corpus.stdlib_files(config.pair.embedded.held_out)
    source = {"files": len(files), "python": sys.version.split()[0], "sha256": _digest(files)}
    if config.pair.target == "embedded":
        stage = Stage(
            "pair",
            config,
            {**depends(config), "corpus": source},
            (folder / "models", folder / "manifest.json"),
            costly=True,
        )
        if stage.begin():
            with mlflow_run(config, "pair", SECTIONS) as mlflow:
                train_embedded(config, files, folder, mlflow)
            stage.finish()
    else:
        stage = Stage("pair", config, depends(config), ())
        pair = load_pair(config, shapes=True)  # raises where it does not load
        random = "; without weights, which are random: only times can be measured" if pair.has_random_weights else ""
        stage.say(f"{config.pair.target} and {config.pair.draft} load and share their vocabulary{random}")
        stage.finish()
    prompts.write(config, tokenizer_of(config), files, source)


def _digest(files: list[corpus.SourceFile]) -> str:
    return hashlib.sha256("".join(file.path + file.sha256 for file in files).encode()).hexdigest()[:16]


def texts_of(
    files: list[corpus.SourceFile], number: int, tokenizer: PreTrainedTokenizerFast, context: int
) -> list[str]:
    """What a model is trained on: files and, where they are asked for, task documents of at most `context` tokens.

    Tests are two thirds of the library, and much alike: where there are documents of them, these are all that is taken.
    """
    count = tasks.counter(tokenizer)
    made = [document.text for file in files for document in tasks.documents(file, number, count, context // 2)]
    return [*(file.text for file in files if not (number and file.kind == "tests")), *made]


def encoded(config: Config, files: list[corpus.SourceFile], kept: Path) -> tuple[PreTrainedTokenizerFast, Streams]:
    """The tokenizer, and the training files and some held-out ones as streams of tokens: read where they are `kept`."""
    embedded = config.pair.embedded
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        return language_model.wrapped(Tokenizer.from_str(state["tokenizer"])), Streams(*state["streams"])
    training = [file for file in files if not file.held_out][: embedded.max_files]
    held_out = [file for file in files if file.held_out][:64]
    tokenizer = language_model.train_tokenizer([file.text for file in training], embedded.vocabulary)
    streams = Streams(
        *(
            language_model.encode_corpus(tokenizer, texts_of(part, embedded.documents, tokenizer, embedded.context))
            for part in (training, held_out)
        )
    )
    if embedded.induction:
        repeats = language_model.repeats(len(streams.training) // 8, len(tokenizer), embedded.context, config.seed)
        streams = streams._replace(training=torch.cat((streams.training, repeats)))
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomically(kept) as partial:
        torch.save({"tokenizer": tokenizer.backend_tokenizer.to_str(), "streams": tuple(streams)}, partial)
    return tokenizer, streams


def train_embedded(config: Config, files: list[corpus.SourceFile], folder: Path, mlflow: Any) -> None:
    """Tokenizer, target, then the draft distilled from it; a finished model is not trained again."""
    embedded = config.pair.embedded
    models = folder / "models"
    corpus_kept = models / "corpus.checkpoint"
    with console.status("encoding the corpus"):
        tokenizer, (stream, held_out) = encoded(config, files, corpus_kept)
    target = _trained(config, "target", embedded.target, language_model.next_token_loss, tokenizer, stream, models)
    loss = language_model.distillation_loss(target)
    start = target if embedded.draft.from_target else None
    draft = _trained(config, "draft", embedded.draft, loss, tokenizer, stream, models, start)
    overlap = language_model.mean_overlap(target, draft, held_out, embedded.context)
    found = f"mean overlap on held-out text {overlap:.3f}"
    console.print(f"[bold]pair[/]: {found}")
    manifest = {
        "overlap": overlap,
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "tokens": len(stream),
        "files": [{"path": f.path, "sha256": f.sha256, "kind": f.kind, "held_out": f.held_out} for f in files],
    }
    if embedded.documents:
        once, again = language_model.copy_losses(target, embedded.context // 2, config.seed)
        console.print(
            f"[bold]pair[/]: loss of the target on random tokens {once:.2f}, when they come again {again:.2f}"
        )
        manifest["copying"] = {"once": once, "again": again}
    write_json(folder / "manifest.json", manifest)
    corpus_kept.unlink()
    mlflow.log_metric("overlap", overlap)
    describe(mlflow, found)


def _trained(
    config: Config,
    role: str,
    shape: EmbeddedModel,
    loss_fn: language_model.Loss,
    tokenizer: PreTrainedTokenizerFast,
    stream: torch.Tensor,
    folder: Path,
    start: LlamaForCausalLM | None = None,
) -> LlamaForCausalLM:
    """The model as an earlier run has finished it, or trained now; from random weights, or those of `start`."""
    folder.mkdir(parents=True, exist_ok=True)
    context = config.pair.embedded.context
    if (folder / role / "config.json").exists():  # finished before an interruption; the stage refuses other inputs
        return LlamaForCausalLM.from_pretrained(folder / role, attn_implementation=language_model.attention(context))
    model = language_model.build_model(shape, len(tokenizer), tokenizer.eos_token_id, config.seed, config.pair.embedded)
    if start is not None:
        language_model.begin_with(model, start)
    checkpoint = folder / f"{role}.checkpoint"
    with progress() as bar:
        task = bar.add_task(f"training the {role}", total=shape.steps, note="")
        language_model.train(
            model,
            loss_fn,
            stream,
            shape,
            context,
            config.seed,
            checkpoint,
            lambda step, loss: bar.update(task, completed=step, note=f"loss {loss:.3f}"),
        )
    with atomically(folder / role) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    checkpoint.unlink(missing_ok=True)
    return model
