"""Puts a trained pair in the place of the one that comes with Espalier: `make embedded-pair`.

    .venv/bin/python -m pipelines.pair.shipping configs/embedded_pair.yaml

The weights are rounded to bfloat16. What was trained on what, and how well, stands beside them in `provenance.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from data_gen.models.pair import ROLES
from pipelines.config import Config, load_config
from pipelines.config.sections import SHIPPED
from pipelines.pair import corpus
from pipelines.pair.language_model import encode_corpus, next_token_loss
from pipelines.run import console, provenance, read_json, write_json
from selector.files import atomically

WINDOWS, WINDOW = 64, 513  # of held-out library code: their number and their tokens
LICENCE = (
    "The models were trained on the standard library of CPython and on tasks made from it, which are under the Python "
    "Software Foundation License, version 2. The weights are under the project's own licence."
)


def ship(config: Config) -> dict[str, Any]:
    """Copy the models that a run has trained to `SHIPPED`, in bfloat16; what `provenance.json` says of them.

    Raises:
        InputError: the run has trained no pair.
    """
    folder = config.folder / "pair"
    manifest = read_json(folder / "manifest.json", "pair")
    with atomically(SHIPPED) as shipped:
        for role in ROLES:
            model = LlamaForCausalLM.from_pretrained(folder / "models" / role, dtype=torch.bfloat16)
            model.save_pretrained(shipped / role)
            AutoTokenizer.from_pretrained(folder / "models" / role).save_pretrained(shipped / role)
        about = {
            "licence": LICENCE,
            "corpus": corpus.described(corpus.stdlib_files()),
            "tokens": manifest["tokens"],
            "loss_on_held_out_code": code_loss(shipped / "target"),
            "overlap": manifest["overlap"],
            "copying": manifest["copying"],
            "held_out": [file["path"] for file in manifest["files"] if file["held_out"]],
            **provenance(config),
        }
        write_json(shipped / "provenance.json", about)
    return about


@torch.no_grad()
def code_loss(target: Path) -> float:
    """Mean loss in nats per token on evenly spaced windows of the library's held-out code."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    files = [file.text for file in corpus.stdlib_files() if file.held_out and file.kind == "code"]
    stream = encode_corpus(tokenizer, files)
    starts = torch.linspace(0, len(stream) - WINDOW, WINDOWS).long()
    batches = stream[starts[:, None] + torch.arange(WINDOW)].split(8)
    return sum(next_token_loss(model, batch).item() for batch in batches) / len(batches)


def main(path: str) -> None:
    about = ship(load_config(Path(path), []))
    console.print(f"{SHIPPED}: {about['loss_on_held_out_code']:.2f} nats a token on held-out library code")


if __name__ == "__main__":
    main(*sys.argv[1:])
