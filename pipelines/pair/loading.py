"""The run's pair, as every stage loads it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer

from data_gen.models.checkpoints import hidden_width
from data_gen.models.pair import ROLES, ModelPair
from data_gen.models.self_check import check_model
from pipelines.config import Config
from pipelines.run import require
from selector.actions import ActionSpace
from selector.schema import InputError

DEEPEST_TREE = ActionSpace.default().max_L1 + ActionSpace.default().max_L2


def pair_names(config: Config) -> tuple[str, str]:
    """Directories or hub ids of target and draft."""
    if config.pair.target == "embedded":
        models = config.folder / "pair" / "models"
        return str(models / "target"), str(models / "draft")
    return config.pair.target, config.pair.draft


def depends(config: Config) -> dict[str, Any]:
    """What the pair follows from, the corpus apart."""
    if config.pair.target != "embedded":
        return {"pair": {"target": config.pair.target, "draft": config.pair.draft}}
    return {"pair": config.pair.model_dump(mode="json", include={"target", "draft", "embedded"}), "seed": config.seed}


def load_pair(config: Config, shapes: bool = False) -> ModelPair:
    """The run's pair on the configured device, with the configured number of threads.

    Args:
        shapes: whether configs without weights will do, where times alone are wanted.

    Raises:
        InputError: it is not there, was trained with another config, does not load, its context is too short, or a
            model gives wrong numbers when it is passed over token trees.
    """
    if config.pair.target == "embedded":
        require(config, "pair", depends(config))
    if config.pair.threads:
        torch.set_num_threads(config.pair.threads)
    embedded = config.pair.target == "embedded"  # small, and read whole by `require` in any case
    pair = ModelPair.load(
        *pair_names(config),
        config.pair.device,
        config.pair.dtype,
        config.pair.device_map,
        shapes,
        checksums=None if embedded else config.folder / "pair" / "checksums.json",
    )
    needed = config.prompts.tokens + max(config.data.tokens, config.evaluate.tokens) + DEEPEST_TREE
    if needed > pair.max_positions:
        raise InputError(
            f"prompts.tokens, data.tokens and evaluate.tokens ask for up to {needed} positions; "
            f"the pair has {pair.max_positions}"
        )
    for model, name in zip((pair.target, pair.draft), pair.names, strict=True):
        check_model(model, name, needed)
    return pair


def tokenizer_of(config: Config) -> Any:
    """The target's tokenizer, without its weights; InputError where it cannot be read."""
    name = pair_names(config)[0]
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever a damaged file makes the library raise
        raise InputError(f"pair.target: cannot load the tokenizer of {name}") from error


def hidden_widths(config: Config) -> list[int]:
    """Widths of the hidden-state features, from the models' configs alone."""
    if config.pair.target == "embedded":
        target, draft = config.pair.embedded.target.hidden, config.pair.embedded.draft.hidden
    else:
        target, draft = (hidden_width(name, role) for name, role in zip(pair_names(config), ROLES, strict=True))
    return [target, draft, draft]
