from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.written import WrittenText, rows_along, written_by_target
from data_gen.verification import get_verifier
from selector.actions import Action
from selector.schema import InputError

CONTEXT = [5, 17, 203, 44, 91, 7]


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
        lambda: Decoder(broken, Sampling(), get_verifier("traversal"), FixedTree(Action(2, 1, 2))).decode(
            CONTEXT, 8, torch.Generator()
        ),
    ):
        with pytest.raises(InputError, match=rf"/{role}: the model gives numbers that are not finite"):
            use()
