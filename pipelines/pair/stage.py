"""Stage `pair`: train the embedded pair, or check that a given pair loads; write the prompts."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen.prompts import Prompt, write_prompts
from pipelines.common.console import console, progress
from pipelines.common.files import write_json
from pipelines.common.stage import Stage
from pipelines.common.tracking import describe, mlflow_run
from pipelines.config import Config, EmbeddedModel
from pipelines.pair import corpus, language_model
from pipelines.pair.loading import depends, load_pair
from selector.files import atomically

PROMPT_CHARACTERS = 1200  # more than `prompts.tokens` usually need


def plan(config: Config) -> list[str]:
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
            with mlflow_run(config, "pair") as mlflow:
                train_embedded(config, files, folder, mlflow)
            stage.finish()
    else:
        stage = Stage("pair", config, depends(config), ())
        load_pair(config)  # raises where it does not load
        stage.say(f"{config.pair.target} and {config.pair.draft} load and share their vocabulary")
        stage.finish()
    if config.prompts.file is None:
        write_held_out_prompts(config, files, folder / "prompts.jsonl", source)


def write_held_out_prompts(config: Config, files: list[corpus.SourceFile], path: Path, source: dict[str, Any]) -> None:
    """The prompts of all kinds that this Python's library has; cheap, so made anew whenever something changed."""
    inputs = {"corpus": source, "per_source": config.prompts.per_source, "held_out": config.pair.embedded.held_out}
    stage = Stage("prompts", config, inputs, (path,))
    if not stage.begin():
        return
    prompts = held_out_prompts(files, config.prompts.per_source)
    kinds = [kind for kind in corpus.KINDS if any(prompt.kind == kind for prompt in prompts)]
    for kind in sorted(set(corpus.KINDS) - set(kinds)):
        stage.say(f"this Python has no {kind} in its library: no prompts of that kind")
    stage.replace()
    with atomically(path) as partial:
        write_prompts(partial, prompts)
    stage.say(f"{len(prompts)} prompts of the kinds {', '.join(kinds)}")
    stage.finish()


def _digest(files: list[corpus.SourceFile]) -> str:
    return hashlib.sha256("".join(file.path + file.sha256 for file in files).encode()).hexdigest()[:16]


def held_out_prompts(files: list[corpus.SourceFile], per_source: int) -> list[Prompt]:
    """Prompts from held-out files: evenly spaced starts of lines, at most `per_source` of each file and kind."""
    prompts = []
    for file in files:
        if not file.held_out:
            continue
        texts = {file.kind: file.text}
        if file.kind == "code":
            texts["prose"] = corpus.prose_of(file.text)
        for kind, text in texts.items():
            starts = [0, *(i + 1 for i, char in enumerate(text) if char == "\n")]
            starts = [start for start in starts if start + PROMPT_CHARACTERS <= len(text)]
            chosen = starts[:: max(1, -(-len(starts) // per_source))]
            prompts += [
                Prompt(f"{kind}:{file.path}:{start}", text[start : start + PROMPT_CHARACTERS], kind, file.path)
                for start in chosen
            ]
    return prompts


def train_embedded(config: Config, files: list[corpus.SourceFile], folder: Path, mlflow: Any) -> None:
    """Tokenizer, target, then the draft distilled from it; a finished model is not trained again."""
    embedded = config.pair.embedded
    training = [file.text for file in files if not file.held_out][: embedded.max_files]
    tokenizer = language_model.train_tokenizer(training, embedded.vocabulary)
    with console.status("encoding the corpus"):
        stream = language_model.encode_corpus(tokenizer, training)
        held_out = language_model.encode_corpus(tokenizer, [f.text for f in files if f.held_out][:64])
    models = folder / "models"
    target = _trained(config, "target", embedded.target, language_model.next_token_loss, tokenizer, stream, models)
    loss = language_model.distillation_loss(target)
    draft = _trained(config, "draft", embedded.draft, loss, tokenizer, stream, models)
    overlap = language_model.mean_overlap(target, draft, held_out, embedded.context)
    found = f"mean overlap on held-out text {overlap:.3f}"
    console.print(f"[bold]pair[/]: {found}")
    manifest = {
        "overlap": overlap,
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "tokens": len(stream),
        "files": [{"path": f.path, "sha256": f.sha256, "kind": f.kind, "held_out": f.held_out} for f in files],
    }
    write_json(folder / "manifest.json", manifest)
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
) -> LlamaForCausalLM:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / role / "config.json").exists():  # finished before an interruption; the stage refuses other inputs
        return LlamaForCausalLM.from_pretrained(folder / role, attn_implementation="eager")
    model = language_model.build_model(shape, len(tokenizer), tokenizer.eos_token_id, config.seed)
    checkpoint = folder / f"{role}.checkpoint"
    with progress() as bar:
        task = bar.add_task(f"training the {role}", total=shape.steps, note="")
        language_model.train(
            model,
            loss_fn,
            stream,
            shape,
            config.pair.embedded.context,
            config.seed,
            checkpoint,
            lambda step, loss: bar.update(task, completed=step, note=f"loss {loss:.3f}"),
        )
    with atomically(folder / role) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    checkpoint.unlink(missing_ok=True)
    return model
