"""The pair that comes with Espalier: what it is, how it copies, and how a trained pair takes its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_gen.models.pair import ROLES, ModelPair
from pipelines.config import load_config
from pipelines.config.sections import SHIPPED
from pipelines.pair import language_model, shipping
from selector.schema import InputError
from tests.pipelines.runs import ROOT, SMALL_PAIR, espalier

MEGABYTES = 16


@pytest.fixture(scope="module")
def shipped() -> ModelPair:
    return ModelPair.load(*(str(SHIPPED / role) for role in ROLES))


def test_it_is_small_and_says_where_it_comes_from() -> None:
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MEGABYTES * 10**6
    about = json.loads((SHIPPED / "provenance.json").read_text())
    assert "Python Software Foundation License" in about["licence"]
    own = load_config(ROOT / "configs" / "embedded_pair.yaml", []).pair.embedded
    assert own is not None and about["config"]["pair"]["embedded"] == own.model_dump(mode="json")


@pytest.mark.parametrize("distance", [64, 128, 256, 512])
def test_the_target_copies(shipped: ModelPair, distance: int) -> None:
    once, again = language_model.copy_losses(shipped.target, distance, 1)
    assert once > 6 and again < 1.5


def test_its_loss_on_held_out_code_is_what_it_says() -> None:
    about = json.loads((SHIPPED / "provenance.json").read_text())
    # another version of Python has other files
    assert shipping.code_loss(SHIPPED / "target") == pytest.approx(about["loss_on_held_out_code"], abs=0.15)


def test_most_of_its_greedy_text_does_not_loop() -> None:
    about = json.loads((SHIPPED / "provenance.json").read_text())
    assert about["greedy_tokens_inside_loops"] < 0.25


def test_a_trained_pair_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ROOT / "configs" / "embedded_pair.yaml"
    small = load_config(config, SMALL_PAIR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipping, "SHIPPED", tmp_path / "shipped")
    with pytest.raises(InputError, match=r"manifest\.json"):
        shipping.ship(small)
    espalier(tmp_path, "pair", *SMALL_PAIR, config="embedded_pair.yaml")
    about = shipping.ship(small)
    trained = tmp_path / "runs" / "embedded_pair" / "pair" / "models"
    for role in ROLES:
        before, after = (
            AutoModelForCausalLM.from_pretrained(folder / role) for folder in (trained, tmp_path / "shipped")
        )
        assert after.dtype == torch.bfloat16
        for name, value in before.state_dict().items():
            assert torch.equal(value.bfloat16(), after.state_dict()[name])
    assert about["loss_on_held_out_code"] > 0 and about["held_out"]
