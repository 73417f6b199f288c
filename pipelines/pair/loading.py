"""The run's pair and prompts, as every stage loads them."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from data_gen.decoding import EAGER, GRAPH
from data_gen.models.checkpoints import load_tokenizer, text_config
from data_gen.models.gguf import resolved
from data_gen.models.heads import check_head, load_pair_with_head
from data_gen.models.pair import ModelPair
from data_gen.models.self_check import check_model
from data_gen.texts.labelled import BEYOND, DEPTH, Recipe
from data_gen.texts.prompts import Prompt, read_prompts, split_of, take_evenly
from data_gen.timing import device_name
from pipelines.config import Config
from pipelines.config.sections import DISTILLED, SHIPPED, SMOLLM2
from pipelines.run import read_json, read_record, verify, write_json
from selector.schema import FULL, InputError

PROMPTS = Path(__file__).with_name("prompts.jsonl")  # that come with Espalier


def target_name(config: Config) -> str:
    """The target's directory or hub id; a GGUF file is converted to a directory first, else InputError."""
    return resolved(config.pair.target, "target")


def pair_names(config: Config) -> tuple[str, str]:
    """Directories or hub ids of the target, and of its draft or head; else InputError."""
    target, own = target_name(config), config.pair
    if own.head is not None:
        return target, own.head
    if own.draft == SMOLLM2:
        return target, str(SHIPPED)
    if own.draft == DISTILLED:
        folder = config.folder / "distil" / "draft"
        if not folder.is_dir():
            raise InputError(f"{folder} does not exist: run the distil stage first")
        return target, str(folder)
    return target, resolved(own.draft, "draft")


def depends(config: Config) -> dict[str, Any]:
    return {"pair": {"target": config.pair.target, "head" if config.pair.head else "draft": config.pair.drafting}}


def load_pair(config: Config, shapes: bool = False) -> ModelPair:
    """The run's pair on the configured device, with the configured number of threads. InputError where it is missing,
    does not load, has too short a context, or computes token trees wrongly.

    Args:
        shapes: whether configs without weights are enough, because only times are measured.
    """
    own = config.pair
    checksums = config.folder / "pair" / "checksums.json"
    if own.threads:
        torch.set_num_threads(own.threads)
    load = load_pair_with_head if own.head else ModelPair.load
    pair = load(*pair_names(config), own.device, own.dtype, own.device_map, shapes, checksums=checksums)
    check_models(config, pair, _check_positions(config, pair.max_positions))
    on_gpu = pair.device.type == "cuda" and not pair.has_head
    pair.decoder = (GRAPH if on_gpu else EAGER) if own.decoder == "auto" else own.decoder
    return pair


def known_fingerprint(config: Config) -> str:
    """The pair's fingerprint as the latency or the pair stage recorded it; InputError where neither has been run."""
    for stage, key in (("latency", "pair"), ("pair", "fingerprint")):
        with suppress(InputError):
            if key in (recorded := read_record(config, stage)["depends"]) and isinstance(recorded[key], str):
                return str(recorded[key])
    raise InputError(f"{config.folder}: run the latency stage first")


def _check_positions(config: Config, have: int) -> int:
    needed = config.prompts.tokens + config.data.tokens + BEYOND + DEPTH
    if needed > have:
        most = have - needed + config.prompts.tokens
        raise InputError(
            f"prompts.tokens={config.prompts.tokens} and data.tokens={config.data.tokens} ask for up to {needed} "
            f"positions; the pair has {have}" + (f": set prompts.tokens={most}" if most >= 2 else "")
        )
    return needed


def check_models(config: Config, pair: ModelPair, longest: int) -> None:
    """InputError where a model of the pair computes token trees wrongly in a text of up to `longest` tokens. What a
    pair has passed on this machine is recorded, and not checked again."""
    path, own = config.folder / "pair" / "checked.json", config.pair
    packages = {name: version(name) for name in ("torch", "transformers")}
    passed = {"pair": pair.fingerprint, "device": device_name(own.device, own.dtype, own.threads), **packages}
    with suppress(InputError, AttributeError, KeyError, TypeError):  # there is no record, or it is damaged
        recorded = read_json(path, "pair")
        if recorded.items() >= passed.items() and recorded["longest"] >= longest:
            return
    check_model(pair.target, pair.names[0], longest)
    if pair.has_head:
        check_head(pair, pair.names[1])
    else:
        check_model(pair.draft, pair.names[1], longest)
    with suppress(InputError):  # an unwritable folder only costs time
        write_json(path, {**passed, "longest": longest})


def tokenizer_of(config: Config) -> Any:
    """The target's tokenizer; InputError where it cannot be read."""
    return load_tokenizer(target_name(config), "target")


def hidden_widths(config: Config) -> list[int]:
    """Widths of the hidden-state features, from the models' configs alone."""
    names = pair_names(config)
    target = int(text_config(names[0], "target").hidden_size)
    draft = target if config.pair.head else int(text_config(names[1], "draft").hidden_size)
    return [target, draft, draft]


def recipe(config: Config) -> Recipe:
    data, form = config.data, config.prompts.form
    hidden = data.features == FULL
    return Recipe(config.verifiers, form, data.tokens, data.siblings, data.stride, hidden, config.seed)


def prompts_path(config: Config) -> Path:
    written = config.folder / "pair" / "prompts.jsonl"
    return config.prompts.file or (written if config.prompts.sets else PROMPTS)


def all_prompts(config: Config) -> list[Prompt]:
    """The prompts of all splits; InputError if they are missing or have changed since the pair stage."""
    path = prompts_path(config)
    if config.prompts.sets:
        if not path.exists():
            raise InputError(f"{path} does not exist: run the pair stage first")
        verify(config, "prompts")
    return read_prompts(path)


def prompts_of(config: Config, pair: ModelPair, split: str, count: int | None = None) -> list[Prompt]:
    """`count` prompts of a split that are not left out, kinds in turn; all of them if None."""
    shares = config.prompts.validation, config.prompts.test
    kept, _ = config.prompts.form.fit(pair.tokenizer, all_prompts(config))
    prompts = [prompt for prompt in kept if split_of(prompt, *shares) == split]
    if not prompts:
        raise no_prompts(config, prompts_path(config), kept, split)
    if count is not None and count > len(prompts):
        raise InputError(f"{prompts_path(config)} holds {len(prompts)} prompts for {split}; {count} are asked for")
    return take_evenly(prompts, count)


def no_prompts(config: Config, path: Path, prompts: list[Prompt], split: str) -> InputError:
    shares = f"prompts.validation={config.prompts.validation:g}, prompts.test={config.prompts.test:g}"
    sources = len({prompt.source for prompt in prompts})
    return InputError(f"{path}: {shares}: none of the {sources} sources falls to {split}: add some, or change a share")


def encode(config: Config, pair: ModelPair, prompt: Prompt) -> list[int]:
    """The token ids of a prompt, at most `prompts.tokens`."""
    return config.prompts.form.encode(pair.tokenizer, prompt)


def prompts_depend(config: Config, *splits: str) -> dict[str, Any]:
    """What the prompts' tokens of some splits depend on, except the pair: their form, and a hash of all texts."""
    shares, ordered = (config.prompts.validation, config.prompts.test), sorted(all_prompts(config), key=lambda p: p.id)
    prompts = [prompt for split in splits for prompt in ordered if split_of(prompt, *shares) == split]
    lines = "\0".join(f"{p.id}\0{p.kind}\0{p.source}\0{p.text}" for p in prompts)
    return {**asdict(config.prompts.form), "texts": hashlib.sha256(lines.encode()).hexdigest()[:16]}
