"""Stage `distil`: train a draft for a target that has none, on texts that the target writes."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from data_gen.models.checkpoints import fingerprint, load_model, load_tokenizer
from data_gen.models.distilled import new_draft, save_draft
from data_gen.models.pair import DTYPES, eos_ids, resolve_device
from data_gen.models.vocabulary import scored
from pipelines.config import Config
from pipelines.distil import recording
from pipelines.distil.conversations import Template
from pipelines.distil.recording import HELD_OUT, batches, folder_of
from pipelines.distil.texts import Sequences
from pipelines.distil.training import cost, fit, measured, speed
from pipelines.pair import prompt_writing
from pipelines.pair.loading import target_name
from pipelines.run import Stage, console, read_json, table, write_json
from pipelines.tracking import describe, mlflow_run
from selector.schema import InputError

SECTIONS = ("pair", "prompts", "sampling", "distil")
COMPARED = ("layers", "vocabulary", "loss", "passes", "minutes", "overlap", "covered", "cost", "speed")


def plan(config: Config) -> list[str]:
    own, size = config.distil, batches(config)
    layers, said = ", ".join(map(str, own.layers)), f"{own.vocabulary:,}" if own.vocabulary else "all"
    disk = size * own.batch * own.context / 1e3
    return [
        f"{size * own.batch * own.context:,} tokens written by {config.pair.target}, {own.batch} sequences of "
        f"{own.context} at once; about {disk:.0f} MB for each 500 of its hidden width",
        f"a draft of the target's layers {layers} that says {said} tokens: {steps(config)} steps of "
        f"{own.sequences} sequences",
    ]


def steps(config: Config) -> int:
    """Of the optimiser."""
    return max(1, config.distil.passes * batches(config) * config.distil.batch // config.distil.sequences)


def run(config: Config) -> None:
    name, own = target_name(config), config.distil
    tokenizer, device = load_tokenizer(name, "target"), resolve_device(config.pair.device)
    prompt_writing.write(config, tokenizer)
    if config.pair.threads:
        torch.set_num_threads(config.pair.threads)
    target: Any = load_model(name, "target", torch.float32, device, config.pair.device_map)
    texts = _texts(config, fingerprint([name], tokenizer, eos_ids(target)))
    dtype = _dtype(own.dtype, target.device)
    if texts.begin():
        writer = target.to(dtype)
        recording.write_texts(config, writer, tokenizer)
        recording.write_held_out(config, writer, tokenizer)
        texts.finish()
        target = load_model(name, "target", torch.float32, device, config.pair.device_map)
    stage = _draft(config, texts)
    if stage.begin():
        with mlflow_run(config, "distil", SECTIONS) as mlflow:
            found = _trained(stage, target, tokenizer, dtype, mlflow)
            mlflow.log_metrics({key: found[key] for key in ("overlap", "covered", "cost", "speed")})
            describe(mlflow, f"overlap {found['overlap']:.3f}; a draft pass is {found['cost']:.3f} of a target pass")
        stage.finish()
    show(config)


def _trained(stage: Stage, target: PreTrainedModel, tokenizer: Any, dtype: torch.dtype, mlflow: Any) -> dict[str, Any]:
    config, own, folder = stage.config, stage.config.distil, folder_of(stage.config)
    data, began = Sequences(sorted((folder / "texts").glob("*.safetensors"))), time.monotonic()
    ends = [*(Template.of(tokenizer, config.prompts.system) or ((), (), ()))[1:], eos_ids(target)]
    always = sorted({token for part in ends for token in part})
    draft = new_draft(target, own.layers, data.most_frequent(own.vocabulary, scored(target), always))
    training = folder / "training"
    with suppress(InputError):
        if read_json(training / "depends.json", "distil") != stage.depends:  # those of another draft
            shutil.rmtree(training)
    write_json(training / "depends.json", stage.depends)
    fit(own, config.seed, draft, data, steps(config), dtype, training, mlflow.active_run().info.run_id)
    found = {
        **{key: value for key, value in own.model_dump(mode="json").items() if key in COMPARED},
        "tokens": int(data.drawn_BT.sum()),
        "minutes": (time.monotonic() - began) / 60,
        **measured(draft, *recording.held_out(config, tokenizer, eos_ids(target))),
        "cost": cost(draft, target),
    }
    found["speed"] = speed(found["overlap"], found["cost"])
    tried = []
    with suppress(InputError):
        tried = read_json(folder / "manifest.json", "distil")["tried"]
    stage.replace()
    save_draft(draft, folder / "draft")
    write_json(folder / "manifest.json", {"draft": found, "tried": [*tried, found]})
    shutil.rmtree(training)
    return found


def show(config: Config) -> None:
    """All drafts that were trained on the run's texts, and the last one by kind of prompt."""
    about = read_json(folder_of(config) / "manifest.json", "distil")
    rows = [
        {key: f"{each[key]:.3f}" if isinstance(each[key], float) else str(each[key]) for key in COMPARED}
        for each in about["tried"]
    ]
    console.print(table(rows, "Drafts on these texts: overlap and covered at temperature 1, on held-out prompts"))
    kinds = ", ".join(f"{kind} {value:.3f}" for kind, value in about["draft"]["overlap_by_kind"].items())
    console.print(f"Overlap of the last one by kind of prompt: {kinds}", soft_wrap=True)
    console.print(f"To decode with it: pair.draft=distilled, or pair.draft={folder_of(config) / 'draft'}")


def _texts(config: Config, target: str) -> Stage:
    prompts, folder = recording.prompts_by_split(config), folder_of(config)
    depends = {
        "target": target,
        "prompts": {split: [[each.id, each.text] for each in prompts[split]] for split in ("train", "validation")},
        "system": config.prompts.system,
        "texts": config.distil.model_dump(mode="json", include={"tokens", "context", "batch"}),
        "seed": config.seed,
    }
    return Stage("distil-texts", config, depends, (folder / "texts", folder / HELD_OUT), costly=True)


def _draft(config: Config, texts: Stage) -> Stage:
    own = config.distil.model_dump(mode="json", exclude={"tokens", "context", "batch"})
    folder = folder_of(config)
    return Stage("distil", config, {**texts.depends, "draft": own}, (folder / "draft", folder / "manifest.json"))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """In which the target writes and the draft is trained: bfloat16 where the machine computes in it."""
    if name != "auto":
        return DTYPES[name]
    on_gpu = device.type == "cuda"
    fast = torch.cuda.is_bf16_supported() if on_gpu else torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.bfloat16 if fast else torch.float32
