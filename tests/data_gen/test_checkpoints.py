"""What a pair is loaded from, what identifies it, and models that cannot be used."""

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
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.written import WrittenText, rows_along, written_by_target
from selector.actions import Action
from selector.schema import InputError
from tests.data_gen.decodes import decode
from tests.data_gen.families import LONGEST, config_of
from tests.tiny import save_pair

WEIGHTS = "model.safetensors"
CONTEXT = [5, 17, 203, 44, 91, 7]


@pytest.fixture
def folders(tmp_path: Path, pair_folders: tuple[str, str]) -> tuple[Path, Path]:
    """A pair that a test may change."""
    shutil.copytree(Path(pair_folders[0]).parent, tmp_path / "pair")
    return tmp_path / "pair" / "target", tmp_path / "pair" / "draft"


def load(folders: tuple[Path, Path], **options: object) -> ModelPair:
    return ModelPair.load(str(folders[0]), str(folders[1]), "cpu", **options)  # type: ignore[arg-type]


def fingerprint(folders: tuple[Path, Path], **options: object) -> str:
    return load(folders, **options).fingerprint


def change_json(file: Path, values: dict[str, object]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


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
    part = folders[0] / "model-1-of-1.safetensors"
    change_json(folders[0] / name, values)
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
    change_json(folders[0] / "config.json", {"attn_implementation": "flash_attention_2"})
    assert load(folders).target.config._attn_implementation == "sdpa"


def test_layers_that_keep_no_rows_are_refused_before_any_weight_is_read(folders: tuple[Path, Path]) -> None:
    config_of("Mamba").save_pretrained(folders[1])
    with pytest.raises(InputError, match=f"^{folders[1]}: has layers of the kind linear_attention"):
        load(folders)


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
    shape = load(folders, dtype="bfloat16", shapes=True)
    assert shape.has_random_weights and shape.fingerprint.startswith(RANDOM) and not pair.has_random_weights
    assert shape.target.num_parameters() == pair.target.num_parameters() and shape.target.dtype == torch.bfloat16
    for folder in folders:
        for file in folder.iterdir():
            if file.name != "config.json":
                file.unlink()
    assert len(load(folders, shapes=True).tokenizer("sixty-four")[0]) == 10


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


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "runs/none/pair/draft"])
def test_a_missing_model_is_named(name: str, pair_folders: tuple[str, str]) -> None:
    with pytest.raises(InputError, match=f"^pair.draft: there is no folder {name}"):
        ModelPair.load(pair_folders[0], name)


def test_a_directory_without_a_model_is_one_line(tmp_path: Path, pair_folders: tuple[str, str]) -> None:
    with pytest.raises(InputError, match=f"pair.target: cannot load {tmp_path}") as error:
        ModelPair.load(str(tmp_path), pair_folders[1])
    assert "\n" not in str(error.value)


def test_a_target_spread_by_a_device_map_gives_the_same(pair: ModelPair, pair_folders: tuple[str, str]) -> None:
    pytest.importorskip("accelerate", reason="the extra `large` is not installed")
    spread = ModelPair.load(*pair_folders, device_map="auto")
    assert spread.fingerprint == pair.fingerprint
    results = []
    for each in (spread, pair):
        cached = CachedModel(each.target)
        cached.extend(CONTEXT)
        results.append(cached.forward(torch.tensor([7]), torch.tensor([0]), torch.ones(1, 1, dtype=torch.bool)))
    assert torch.allclose(results[0].logits_WV.cpu(), results[1].logits_WV, atol=1e-4)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_numbers_that_are_not_finite_are_refused(pair_folders: tuple[str, str], role: str) -> None:
    broken = ModelPair.load(*pair_folders, device="cpu")
    getattr(broken, role).lm_head.weight.data[5, 0] = float("nan")
    for use in (
        *((lambda: written_by_target(broken, [CONTEXT], 4, Sampling(0.5), seed=1),) if role == "target" else ()),
        lambda: list(rows_along(broken, WrittenText([*CONTEXT, 3, 8], len(CONTEXT) - 1), Sampling())),
        lambda: decode(broken, Action(2, 1, 2), CONTEXT, 8, Sampling()),
    ):
        with pytest.raises(InputError, match=rf"/{role}: the model gives numbers that are not finite"):
            use()
