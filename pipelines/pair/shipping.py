"""Puts a trained pair, or a head for it, in the place of the one that comes with Espalier: `make embedded-pair`.

    .venv/bin/python -m pipelines.pair.shipping configs/embedded_pair.yaml [section.key=value ...]
    .venv/bin/python -m pipelines.pair.shipping configs/embedded_head.yaml [section.key=value ...]

The weights are rounded to bfloat16. What was trained on what, and how well, stands beside them in `provenance.json`. A
head reads one target's states, so a new pair takes the old one's head away.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from data_gen.models.heads import load_head
from data_gen.models.pair import ROLES
from data_gen.texts.prompts import take_evenly
from pipelines.config import Config, load_config
from pipelines.config.sections import SHIPPED
from pipelines.pair import corpus, tasks
from pipelines.pair.language_model import encode_corpus, next_token_loss
from pipelines.pair.loops import inside_loops
from pipelines.pair.prompt_writing import held_out_prompts, task_prompts
from pipelines.run import console, provenance, read_json, write_json
from selector.files import atomically
from selector.schema import sha256

WINDOWS, WINDOW = 64, 513  # of held-out library code: their number and their tokens
PROMPTS, PROMPT, NEW = 36, 256, 128  # held-out prompts that are continued greedily, their tokens at most, and new ones
LICENCE = (
    "The models were trained on the standard library of CPython and on tasks made from it, which are under the Python "
    "Software Foundation License, version 2. The weights are under the project's own licence."
)


def ship(config: Config) -> dict[str, Any]:
    """Copy the models that a run has trained to `SHIPPED`, in bfloat16; what `provenance.json` says of them.

    Raises:
        InputError: the run has trained no models.
    """
    folder = config.folder / "pair"
    manifest = read_json(folder / "manifest.json", "pair")
    return _ship_head(config, folder, manifest) if config.pair.head else _ship_pair(config, folder, manifest)


def _ship_head(config: Config, folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The head alone, beside the target for which it was trained."""
    with atomically(SHIPPED / "head") as shipped:
        head = load_head(str(folder / "models" / "head"), config.pair.names[0], "cpu", torch.bfloat16)
        head.config.speculators_config.verifier.name_or_path = "embedded"  # not a path of the machine that trained it
        own = {name: value for name, value in head.state_dict().items() if name != "embed_tokens.weight"}
        head.save_pretrained(shipped, state_dict=own)  # its embeddings are the target's
        (shipped / "config.py").unlink()  # a copy of the library's code
        described = read_json(shipped / "config.json", "pair")
        write_json(shipped / "config.json", {key: value for key, value in described.items() if key != "auto_map"})
        about = {
            "licence": LICENCE,
            "target": sha256(SHIPPED / "target" / "model.safetensors"),
            "tokens": manifest["tokens"],
            "overlaps": manifest["overlaps"],
            **provenance(config),
        }
        write_json(shipped / "provenance.json", about)
    return about


def _ship_pair(config: Config, folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
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
            "greedy_tokens_inside_loops": loop_share(shipped / "target"),
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


@torch.no_grad()
def loop_share(target: Path) -> float:
    """Share of the tokens inside loops in greedy continuations of held-out prompts: code, prose and tasks."""
    model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    files = corpus.stdlib_files()
    prompts = [prompt for prompt in held_out_prompts(files, 1) if prompt.kind in ("code", "prose")]
    prompts += task_prompts(files, 1, tasks.counter(tokenizer), PROMPT)
    found: list[bool] = []
    for prompt in take_evenly(prompts, PROMPTS):
        ids_1T = tokenizer(prompt.text, return_tensors="pt").input_ids[:, :PROMPT]
        text_T = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=NEW)[0]
        found += inside_loops(text_T[ids_1T.shape[1] :].tolist())
    return sum(found) / len(found)


def main(path: str, *settings: str) -> None:
    about = ship(config := load_config(Path(path), [*settings]))
    if config.pair.head:
        console.print(f"{SHIPPED / 'head'}: overlaps by depth {about['overlaps']}")
        return
    loss, loops = about["loss_on_held_out_code"], about["greedy_tokens_inside_loops"]
    console.print(f"{SHIPPED}: {loss:.2f} nats a token on held-out library code; {loops:.0%} of greedy text in loops")


if __name__ == "__main__":
    main(*sys.argv[1:])
