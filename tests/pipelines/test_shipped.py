"""The pair and the head that come with Espalier: what they are, how they copy, and how trained ones replace them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_gen.models.pair import ROLES, ModelPair
from pipelines.config import load_config
from pipelines.config.sections import SHIPPED
from pipelines.pair import language_model, shipping
from selector.schema import InputError, sha256
from tests.pipelines.runs import ROOT, SMALL_PAIR, espalier

MEGABYTES = {"target": 12, "draft": 4, "head": 4}
needs_heads = pytest.mark.skipif(find_spec("speculators") is None, reason="the extra `heads` is not installed")


@pytest.fixture(scope="module")
def shipped() -> ModelPair:
    return ModelPair.load(*(str(SHIPPED / role) for role in ROLES))


@pytest.mark.parametrize("role", MEGABYTES)
def test_its_files_are_small(role: str) -> None:
    files = [path for path in (SHIPPED / role).rglob("*") if path.is_file()]
    assert 10**6 < sum(path.stat().st_size for path in files) < MEGABYTES[role] * 10**6


@pytest.mark.parametrize(
    ("place", "config"), [(SHIPPED, "embedded_pair.yaml"), (SHIPPED / "head", "embedded_head.yaml")]
)
def test_it_says_where_it_comes_from(place: Path, config: str) -> None:
    about = json.loads((place / "provenance.json").read_text())
    assert "Python Software Foundation License" in about["licence"]
    own = load_config(ROOT / "configs" / config, []).pair.embedded
    assert own is not None and about["config"]["pair"]["embedded"] == own.model_dump(mode="json")


def test_the_head_is_for_this_target() -> None:
    about = json.loads((SHIPPED / "head" / "provenance.json").read_text())
    assert about["target"] == sha256(SHIPPED / "target" / "model.safetensors")
    assert str(ROOT) not in (SHIPPED / "head" / "config.json").read_text()


@needs_heads
def test_the_head_drafts_as_well_as_it_says() -> None:
    """On held-out code of the library, in shorter windows than those of its training."""
    from data_gen.models.heads import load_pair_with_head
    from pipelines.pair import corpus, head

    pair = load_pair_with_head(str(SHIPPED / "target"), str(SHIPPED / "head"), device="cpu")
    files = [file.text for file in corpus.stdlib_files() if file.held_out and file.kind == "code"]
    windows = language_model.windows(language_model.encode_corpus(pair.tokenizer, files), 128)
    about = json.loads((SHIPPED / "head" / "provenance.json").read_text())
    found = head.overlaps(pair.draft, pair.target, windows)
    assert found == pytest.approx(about["overlaps"], abs=0.1)  # another version of Python has other files


@pytest.mark.parametrize("distance", [64, 128, 256, 512])
def test_the_target_copies(shipped: ModelPair, distance: int) -> None:
    once, again = language_model.copy_losses(shipped.target, distance, 1)
    assert once > 6 and again < 0.5


def test_its_loss_on_held_out_code_is_what_it_says() -> None:
    about = json.loads((SHIPPED / "provenance.json").read_text())
    assert about["loss_on_held_out_code"] < 2.3
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
