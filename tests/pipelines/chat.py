"""The whole pipeline on tiny pairs of three families, prompts in their chat templates.

    python -m tests.pipelines.chat FOLDER math500=/data/math500.jsonl spec_bench=/data/question.jsonl ..

makes a pair of each family in FOLDER, with a tokenizer trained on these prompts and random weights (the draft's are the
target's with noise), runs every stage on it, and prints what was parsed, kept and left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from data_gen.texts.prompt_sets import read_set
from tests.pipelines.runs import SMALL, UNTEMPLATED, espalier

V, CONTEXT, WINDOW = 1024, 640, 64
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,  # or a tiny model repeats what it reads
}
TURN = "{% for message in messages %}BEGIN{{ message['role'] }}MIDDLE{{ message['content'] }}END{% endfor %}"
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, str, str, str, str]]] = {
    # class, what is its own, and of its chat template: what begins a text, a turn, what is said, and what ends a turn;
    # the model's role
    "Qwen3": ("Qwen3", {}, ("", "<|im_start|>", "\n", "<|im_end|>\n", "assistant")),
    "Gemma 3": (
        "Gemma3Text",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        ("<bos>", "<start_of_turn>", "\n", "<end_of_turn>\n", "model"),
    ),
    "Llama": (
        "Llama",
        {},
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "assistant"),
    ),
}


def tokenizer_for(family: str, texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level pairs, with the family's marks and template."""
    start, begin, middle, end, role = FAMILIES[family][2]
    marks = [mark for mark in (start, begin, middle.strip(), end.strip()) if mark]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=V,
        special_tokens=marks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end.strip())
    turn = start + TURN + "{% if add_generation_prompt %}BEGIN" + role + "MIDDLE{% endif %}"
    for name, mark in (("BEGIN", begin), ("MIDDLE", middle), ("END", end)):
        turn = turn.replace(name, mark)
    tokenizer.chat_template = turn
    return tokenizer


def made(family: str, folder: Path, texts: list[str]) -> dict[str, str]:
    """A pair; its folders as the config's section names them."""
    kind, own, _ = FAMILIES[family]
    tokenizer = tokenizer_for(family, texts)
    generator = torch.Generator().manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SHAPE, **own, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.2, generator=generator)
    folders = {}
    for role, noise in (("target", 0.0), ("draft", 0.02)):
        with torch.no_grad():
            for weights in model.parameters():
                weights += noise * torch.randn(weights.shape, generator=generator)
        folders[role] = str(folder / role)
        model.save_pretrained(folders[role])
        tokenizer.save_pretrained(folders[role])
    return folders


def run(family: str, folder: Path, files: dict[str, Path], *overrides: str) -> str:
    """Every stage, as a user runs them; what they said."""
    texts = [prompt.text for name, file in files.items() for prompt in read_set(name, file)[0]]
    config = {
        "name": "chat",
        "pair": {**made(family, folder, texts), "threads": 1},
        "prompts": {
            "sets": [{"name": name, "file": str(file)} for name, file in files.items()],
            "chat": True,
            "system": "Answer briefly.",
            "longer": "drop",
        },
        "sampling": [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}],
    }
    (folder / "chat.yaml").write_text(yaml.safe_dump(config))
    small = [each for each in SMALL if each not in UNTEMPLATED and not each.startswith(("pair.", "sampling="))]
    return espalier(folder, "demo", *small, *overrides, config=str(folder / "chat.yaml"))


def main() -> None:
    root, files = Path(sys.argv[1]), dict(pair.split("=", 1) for pair in sys.argv[2:])
    for family in FAMILIES:
        folder = root / family.replace(" ", "-").lower()
        folder.mkdir(parents=True)
        said = run(
            family,
            folder,
            {name: Path(file) for name, file in files.items()},
            "prompts.tokens=512",
        )
        print(f"== {family}")
        print(said)


if __name__ == "__main__":
    main()
