"""Stage `distil`: train a draft for a target that has none, on texts sampled from the target."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from data_gen.models.checkpoints import eos_ids, fingerprint, load_target, load_tokenizer
from data_gen.models.distilled import WEIGHTS, new_draft, save_draft
from data_gen.models.pair import DTYPES, resolve_device, scored
from data_gen.models.prepack import computes_in_bfloat16, prepack
from data_gen.models.self_check import check_model
from pipelines.config import Config
from pipelines.distil.texts import BEGUN, FEW, Sequences, held_out, sequence_count, write_texts
from pipelines.distil.training import SEQUENCES, cost, measured, speed, train
from pipelines.pair.stage import form_of, prepared_prompts, prompts_depend, target_name
from pipelines.run import Parts, Stage, provenance, read_json, write_json
from pipelines.terminal import console, table
from pipelines.tracking import describe, mlflow_run
from selector.schema import InputError, sha256

COMPARED = ("layers", "vocabulary", "passes", "minutes", "overlap", "covered", "cost", "speed")
OF_TEXTS = {"tokens", "context", "batch"}  # the keys that determine the texts


def plan(config: Config) -> list[str]:
    settings = config.distil
    layers = ", ".join(map(str, settings.layers))
    vocabulary = f"{settings.vocabulary:,}" if settings.vocabulary else "all"
    tokens = sequence_count(config) * settings.context
    return [
        f"{tokens:,} tokens sampled from {config.pair.target}, {settings.batch} sequences of "
        f"{settings.context} at once; about {tokens / 1e3:.0f} MB for each 500 of its hidden width",
        f"a draft of the target's layers {layers} that scores {vocabulary} tokens: "
        f"{_steps(config)} steps of {SEQUENCES} sequences",
    ]


def _steps(config: Config) -> int:
    return max(1, config.distil.passes * sequence_count(config) // SEQUENCES)


def run(config: Config) -> None:
    name = target_name(config)
    tokenizer = load_tokenizer(name, "target")
    device = resolve_device(config.pair.device)
    prepared_prompts(config, tokenizer)
    target: Any = load_target(name, tokenizer, torch.float32, device, config.pair.device_map)
    dtype = _dtype_of(config, target)
    folder = config.folder / "distil"
    made_from = _texts_depend(config, target, tokenizer, dtype)
    settings = config.distil
    depends = {**made_from, "draft": settings.model_dump(mode="json", exclude=OF_TEXTS)}
    stage = Stage("distil", config, depends, (folder / "draft", folder / "manifest.json"))
    if stage.begin():
        check_model(target, name, settings.context)  # before it writes for hours
        texts = Parts(folder / "texts", made_from)  # stay for other drafts
        prepack(target.to(dtype))
        write_texts(config, texts, target, tokenizer)
        target = load_target(name, tokenizer, torch.float32, device, config.pair.device_map)
        with mlflow_run(config, "distil") as mlflow:
            metrics = _trained(stage, folder, texts.folder, target, tokenizer, dtype, mlflow)
            for key in ("overlap", "covered", "cost", "speed"):
                mlflow.log_metric(key, metrics[key])
            describe(
                mlflow,
                f"overlap {metrics['overlap']:.3f}; a draft pass is {metrics['cost']:.3f} of a "
                "target pass",
            )
        stage.finish()
    _print_drafts(folder)


def _dtype_of(config: Config, target: Any) -> torch.dtype:
    """The number format in which the target writes and the draft is trained."""
    if target.device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported()
    else:
        is_fast = computes_in_bfloat16()
    return torch.bfloat16 if is_fast else DTYPES[config.pair.dtype]


def _texts_depend(
    config: Config, target: Any, tokenizer: Any, dtype: torch.dtype
) -> dict[str, Any]:
    """Everything that the texts depend on."""
    return {
        "target": fingerprint([target], tokenizer, eos_ids(target)),
        "prompts": prompts_depend(config, "train", "validation"),
        "texts": {
            **config.distil.model_dump(mode="json", include=OF_TEXTS),
            "dtype": str(dtype),
            "begun": [BEGUN, FEW],
        },
        "seed": config.seed,
    }


def _print_drafts(folder: Path) -> None:
    manifest = read_json(folder / "manifest.json", "distil")
    rows = []
    for draft in manifest["tried"]:
        cells = {}
        for key in COMPARED:
            value = draft[key]
            cells[key] = f"{value:.3f}" if isinstance(value, float) else str(value)
        rows.append(cells)
    console.print(
        table(rows, "Drafts of this run: overlap and covered at temperature 1, on held-out prompts")
    )
    overlap_by_kind = manifest["draft"]["overlap_by_kind"]
    kinds = ", ".join(f"{kind} {value:.3f}" for kind, value in overlap_by_kind.items())
    console.print(f"Overlap of the last one by kind of prompt: {kinds}", soft_wrap=True)
    console.print(
        f"To decode with the last one: pair.draft=distilled, or pair.draft={folder / 'draft'}"
    )


def _trained(
    stage: Stage,
    folder: Path,
    texts: Path,
    target: PreTrainedModel,
    tokenizer: Any,
    dtype: torch.dtype,
    mlflow: Any,
) -> dict[str, Any]:
    config = stage.config
    settings = config.distil
    data = Sequences(sorted(texts.glob("0*.safetensors")))
    began = time.monotonic()
    turns = form_of(config).turns(tokenizer)
    always = eos_ids(target).union(turns.to_answer, turns.to_user)
    scored_tokens = data.most_frequent(settings.vocabulary, scored(target), sorted(always))
    draft = new_draft(target, settings.layers, scored_tokens)
    run_id = mlflow.active_run().info.run_id
    parts = stage.parts(of_any_code=True)  # hours of training
    train(draft, data, _steps(config), dtype, parts.folder, run_id)
    text_metrics = measured(draft, *held_out(config, texts, tokenizer, eos_ids(target)))
    for model in (draft, target):  # as they decode
        prepack(model)
    metrics: dict[str, Any] = {
        "layers": list(settings.layers),
        "vocabulary": settings.vocabulary,
        "passes": settings.passes,
        "tokens": int(data.drawn_BT.sum()),
        "minutes": (time.monotonic() - began) / 60,
        **text_metrics,
        "cost": cost(draft, target),
    }
    metrics["speed"] = speed(metrics["overlap"], metrics["cost"])
    tried = []
    with suppress(InputError):
        tried = read_json(folder / "manifest.json", "distil")["tried"]
    stage.replace()
    save_draft(draft, folder / "draft")
    weights = sha256(folder / "draft" / WEIGHTS)
    origin = {
        "weights": weights,
        "draft": metrics,
        **provenance(config),
        "config": settings.model_dump(mode="json"),
        "seed": config.seed,
    }
    write_json(folder / "draft" / "provenance.json", origin)
    write_json(folder / "manifest.json", {"draft": metrics, "tried": [*tried, metrics]})
    return metrics
