"""What a pair is loaded from, and what identifies it."""

from __future__ import annotations

import json
import os
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_gen.models.checkpoints import RANDOM, positions, revision, weights_of
from data_gen.models.pair import ModelPair
from selector.schema import InputError
from tests.data_gen.families import LONGEST, config_of
from tests.tiny import save_pair

WEIGHTS = "model.safetensors"


@pytest.fixture
def folders(tmp_path: Path, pair_folders: tuple[str, str]) -> tuple[Path, Path]:
    """A pair that a test may change."""
    shutil.copytree(Path(pair_folders[0]).parent, tmp_path / "pair")
    return tmp_path / "pair" / "target", tmp_path / "pair" / "draft"


def fingerprint(folders: tuple[Path, Path], **options: object) -> str:
    return ModelPair.load(str(folders[0]), str(folders[1]), "cpu", **options).fingerprint  # type: ignore[arg-type]


def change_a_weight(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def test_the_fingerprint_follows_the_weights_and_not_what_they_are_loaded_as(
    folders: tuple[Path, Path], tmp_path: Path, pair: ModelPair
) -> None:
    assert fingerprint(folders) == fingerprint(folders, dtype="bfloat16") == pair.fingerprint
    change_a_weight(folders[1])
    assert fingerprint(folders) != pair.fingerprint
    assert ModelPair.load(*save_pair(tmp_path / "other", seed=1)).fingerprint != pair.fingerprint


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
    file, part = folders[0] / name, folders[0] / "model-1-of-1.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    whole = fingerprint(folders)
    assert whole != pair.fingerprint
    (folders[0] / WEIGHTS).rename(part)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(part), part.name)}
    (folders[0] / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert fingerprint(folders) != whole and not fingerprint(folders).startswith(RANDOM)


def test_weights_are_read_again_only_after_a_change(folders: tuple[Path, Path], tmp_path: Path) -> None:
    kept, weights = tmp_path / "run" / "checksums.json", folders[0] / WEIGHTS
    first = fingerprint(folders, checksums=kept)
    stat = weights.stat()
    change_a_weight(folders[0])
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint(folders, checksums=kept) == first  # nothing says that it has changed
    os.utime(weights)
    assert fingerprint(folders, checksums=kept) == fingerprint(folders) != first
    kept.write_text("{")
    assert fingerprint(folders, checksums=kept) == fingerprint(folders)


def test_the_attention_is_ours_whatever_the_config_asks_for(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": "flash_attention_2"}))
    pair = ModelPair.load(str(folders[0]), str(folders[1]), "cpu")
    assert pair.target.config._attn_implementation == "sdpa"


def test_layers_that_keep_no_rows_are_refused_before_any_weight_is_read(folders: tuple[Path, Path]) -> None:
    config_of("Mamba").save_pretrained(folders[1])
    with pytest.raises(InputError, match=f"^{folders[1]}: has layers of the kind linear_attention"):
        ModelPair.load(str(folders[0]), str(folders[1]), "cpu")


def test_a_config_that_does_not_say_how_long_contexts_may_be_is_refused() -> None:
    for family in ("GPT-2", "Gemma 3, nested"):
        assert positions(config_of(family), family) == LONGEST
    with pytest.raises(InputError, match=r"^Bloom: its config does not say how many positions"):
        positions(config_of("Bloom"), "Bloom")


def test_configs_alone_are_a_pair_with_random_weights(folders: tuple[Path, Path], pair: ModelPair) -> None:
    for folder in folders:
        (folder / WEIGHTS).unlink()
    with pytest.raises(InputError, match=f"pair.target: {folders[0]} holds a config and no weights: only times"):
        fingerprint(folders)
    shape = ModelPair.load(str(folders[0]), str(folders[1]), "cpu", "bfloat16", shapes=True)
    assert shape.has_random_weights and shape.fingerprint.startswith(RANDOM) and not pair.has_random_weights
    assert shape.target.num_parameters() == pair.target.num_parameters() and shape.target.dtype == torch.bfloat16
    for folder in folders:
        for file in folder.iterdir():
            if file.name != "config.json":
                file.unlink()
    assert len(ModelPair.load(str(folders[0]), str(folders[1]), "cpu", shapes=True).tokenizer("sixty-four")[0]) == 10


def test_the_commit_of_a_hub_model_is_known(pair_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the place of its files in the library's own store."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = f"/hub/models--org--tiny/snapshots/{commit}/config.json"
    monkeypatch.setattr("data_gen.models.checkpoints.cached_file", lambda *_: place)
    assert revision("org/tiny") == commit
    assert revision(pair_folders[0]) is None


def test_the_hash_of_weights_follows_them_and_not_their_dtype(pair: ModelPair) -> None:
    """Loaded models have no files; names may be the same."""
    found = weights_of(pair.target)
    assert len(found) == 16 and found != weights_of(pair.draft)
    copied = deepcopy(pair.target)
    assert weights_of(copied.to(torch.bfloat16)) == found == weights_of(copied.float())
    with torch.no_grad():
        copied.model.layers[1].mlp.up_proj.weight[0, 3] += 1
    assert weights_of(copied) != found
