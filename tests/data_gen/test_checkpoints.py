"""What a pair is loaded from, what identifies it, and models that cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from data_gen.models.checkpoints import positions, revision, weights_of
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from data_gen.models.self_check import check_model
from data_gen.texts.generated import GeneratedText, generated_by_target, rows_along
from selector.actions import Action
from selector.schema import InputError
from tests.checks import one_line
from tests.data_gen.decodes import decode
from tests.data_gen.families import LONGEST, config_of
from tests.tiny import END

WEIGHTS = "model.safetensors"
CONTEXT = [5, 17, 203, 44, 91, 7]


@pytest.fixture
def folders(tmp_path: Path, pair_folders: tuple[str, str]) -> tuple[Path, Path]:
    """A pair that a test may change."""
    shutil.copytree(Path(pair_folders[0]).parent, tmp_path / "pair")
    return tmp_path / "pair" / "target", tmp_path / "pair" / "draft"


def load(folders: tuple[Path, Path], **options: Any) -> ModelPair:
    return ModelPair.load(str(folders[0]), str(folders[1]), "cpu", **options)


def fingerprint(folders: tuple[Path, Path], **options: object) -> str:
    return load(folders, **options).fingerprint


def next_number(weights: torch.Tensor, at: int) -> None:
    """A step of bfloat16."""
    flat = weights.view(-1)
    flat[at] = (flat[at : at + 1].bfloat16().view(torch.int16) + 1).view(torch.bfloat16)[0]


def change_json(file: Path, values: dict[str, object]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_fingerprint_follows_the_weights_and_not_what_they_are_loaded_as(
    folders: tuple[Path, Path], pair: ModelPair
) -> None:
    assert fingerprint(folders) == fingerprint(folders, dtype="bfloat16") == pair.fingerprint
    tensors = load_file(folders[1] / WEIGHTS)
    next_number(tensors["model.layers.0.mlp.up_proj.weight"], 700)
    save_file(tensors, folders[1] / WEIGHTS, {"format": "pt"})
    assert fingerprint(folders) != pair.fingerprint


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("generation_config.json", {"eos_token_id": [7, 9]}),
    ],
)
def test_the_fingerprint_follows_what_texts_begin_and_end_with_and_weights_in_parts(
    folders: tuple[Path, Path], name: str, values: dict[str, object], pair: ModelPair
) -> None:
    part = folders[0] / "model-1-of-1.safetensors"
    change_json(folders[0] / name, values)
    whole = fingerprint(folders)
    assert whole != pair.fingerprint
    (folders[0] / WEIGHTS).rename(part)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(part), part.name)}
    (folders[0] / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert fingerprint(folders) == whole


@pytest.mark.parametrize(
    ("config", "expected", "remark"),
    [
        ([7, 9], {0, 7, 9}, "by its generation config and with '<|end|>' by its tokenizer"),
        ([0, 9], {0, 9}, ""),
        (None, {0}, ""),
    ],
)
def test_a_text_ends_with_the_ends_of_the_generation_config_and_of_the_tokenizer(
    config: list[int] | None,
    expected: set[int],
    remark: str,
    folders: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    change_json(folders[0] / "generation_config.json", {"eos_token_id": config})
    change_json(folders[0] / "tokenizer_config.json", {"eos_token": END})
    assert load(folders).eos_ids == expected
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("espalier: ")]
    assert len(lines) == bool(remark) and remark in "".join(lines)


def test_the_attention_is_ours_whatever_the_config_asks_for(folders: tuple[Path, Path]) -> None:
    change_json(folders[0] / "config.json", {"attn_implementation": "flash_attention_2"})
    assert load(folders).target.config._attn_implementation == "sdpa"


def test_layers_that_keep_no_rows_are_refused_before_any_weight_is_read(
    folders: tuple[Path, Path],
) -> None:
    config_of("Mamba").save_pretrained(folders[1])
    with pytest.raises(InputError, match=f"^{folders[1]}: has layers of the kind linear_attention"):
        load(folders)


def test_a_config_that_does_not_say_how_long_contexts_may_be_is_refused() -> None:
    for family in ("GPT-2", "Gemma 3, nested"):
        assert positions(config_of(family), family) == LONGEST
    with pytest.raises(InputError, match=r"^Bloom: its config does not say how many positions"):
        positions(config_of("Bloom"), "Bloom")


def test_the_commit_of_a_hub_model_is_known(
    pair_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the place of its files in the library's own store."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = f"/hub/models--org--tiny/snapshots/{commit}/config.json"
    monkeypatch.setattr("data_gen.models.checkpoints.cached_file", lambda *_: path)
    assert revision("org/tiny") == commit
    assert revision(pair_folders[0]) is None


def test_the_hash_of_weights_follows_every_number_and_not_the_dtype(pair: ModelPair) -> None:
    """By a step of bfloat16 at the beginning, in the middle and at the end of each tensor; and
    their places."""
    hashes, model = weights_of(pair.target), deepcopy(pair.target).to(torch.bfloat16)
    assert len(hashes) == 16 and hashes == weights_of(model) != weights_of(pair.draft)
    for weights in model.parameters():
        for at in (0, weights.numel() // 2, weights.numel() - 1):
            before = weights.detach().clone()
            next_number(weights.data, at)
            assert weights_of(model) != hashes
            weights.data.copy_(before)
    table_VD = model.get_input_embeddings().weight.data
    table_VD[[100, 200]] = table_VD[[200, 100]]
    assert weights_of(model) != hashes


def test_weights_of_any_kind_have_a_hash() -> None:
    """Whole numbers, also in buffers, as quantisers store them; single ones; none that are read
    yet, as on "meta"."""
    model = torch.nn.Linear(3, 2)
    model.register_buffer("packed", torch.arange(6, dtype=torch.int32).view(2, 3))
    model.register_parameter("scalar", torch.nn.Parameter(torch.tensor(5), requires_grad=False))
    hashes = weights_of(model)  # type: ignore[arg-type]
    for weights in (model.packed, model.scalar.data):
        weights += 1
        assert weights_of(model) != hashes  # type: ignore[arg-type]
        weights -= 1
    assert weights_of(model) == hashes != weights_of(model.to("meta"))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_lacks_weights_is_refused(folders: tuple[Path, Path], role: str) -> None:
    file = folders[role == "draft"] / WEIGHTS
    tensors, lost = load_file(file), "model.layers.0.mlp.up_proj.weight"
    del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        InputError, match=rf"^pair\.{role}: {file.parent} lacks 1 of its weights, such as {lost}$"
    ):
        load(folders)


def test_a_missing_model_is_named_in_one_line(
    tmp_path: Path, pair_folders: tuple[str, str]
) -> None:
    for name in ("./nowhere", "/no/such/model", "runs/none/pair/draft"):
        with pytest.raises(InputError, match=f"^pair.draft: there is no folder {name}"):
            ModelPair.load(pair_folders[0], name)
    with one_line(f"pair.target: cannot load {tmp_path}"):
        ModelPair.load(str(tmp_path), pair_folders[1])


class WithoutFloat64(TorchFunctionMode):
    """A device such as Apple's, and what torch says there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (kwargs or {}).get("dtype") is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return func(*args, **(kwargs or {}))


def test_a_device_without_float64_is_refused(pair_folders: tuple[str, str]) -> None:
    with WithoutFloat64(), one_line("pair.device: cpu has no float64, in which verifiers sum"):
        ModelPair.load(*pair_folders, device="cpu")


def test_a_target_spread_by_a_device_map_gives_the_same(
    pair: ModelPair, pair_folders: tuple[str, str]
) -> None:
    spread = ModelPair.load(*pair_folders, device_map="auto")
    assert spread.fingerprint == pair.fingerprint
    logits, expected = (
        CachedModel(model).extend(CONTEXT).logits_WV.cpu() for model in (spread.target, pair.target)
    )
    assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_numbers_that_are_not_finite_are_refused(pair_folders: tuple[str, str], role: str) -> None:
    broken = ModelPair.load(*pair_folders, device="cpu")
    head = deepcopy(getattr(broken, role).lm_head)  # a copy is plain
    head.weight.data[5, 0] = float("nan")
    getattr(broken, role).lm_head = head
    text = GeneratedText([*CONTEXT, 3, 8], len(CONTEXT) - 1)
    uses: list[Callable[[], object]] = [
        lambda: list(rows_along(broken, text, Sampling())),
        lambda: decode(broken, Action(2, 1, 2), CONTEXT, 8, Sampling()),
        lambda: check_model(getattr(broken, role), role, 60),
    ]
    if role == "target":
        uses.append(lambda: generated_by_target(broken, [CONTEXT], 4, Sampling(0.5), seed=1))
    for use in uses:
        with pytest.raises(InputError, match=rf"/{role}: .* not finite"):
            use()
