"""The distil stage: the sequences that the target writes, the loss, and a draft from nothing to
decoding."""

from __future__ import annotations

import json
import math
import random
import re
import signal
from collections import Counter
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.generated import generated_by_target, rows_along
from data_gen.texts.prompts import Turns
from pipelines.distil.stage import plan
from pipelines.distil.texts import (
    BEGUN,
    FEW,
    HELD_OUT,
    LONGEST_TURN,
    Sampled,
    Sequences,
    Start,
    save,
    starts,
    write,
)
from pipelines.distil.training import WEIGHT_DECAY, Muon, distances, loss_and_gradient
from pipelines.pair.stage import encode, form_of, kept_prompts, pair_names
from selector.schema import sha256
from tests.pipelines.runs import TARGET, UNTEMPLATED, at_call, demo_config, espalier, outcome, patch
from tests.tiny import END, TEMPLATE

SMALL = [
    f"pair.target={TARGET}",
    "pair.draft=distilled",
    "pair.device=cpu",
    "prompts.tokens=64",
    *UNTEMPLATED,
    "distil.layers=[0]",
    "distil.vocabulary=60",
    "distil.context=160",
    "distil.batch=10",
    "distil.tokens=3840",
    "distil.passes=2",
]
DISTIL = Path("runs/demo/distil")
WEIGHTS = DISTIL / "draft" / "model.safetensors"


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET).eval()


def test_the_target_writes_the_users_first_turn() -> None:
    """But a few of its tokens: no answer to a prompt is learned."""
    turns, prompts = Turns([1], [2, 3], [2, 4]), [[*range(10, 40)], [50, 51]]
    lengths: Counter[int] = Counter()
    for start in islice(starts(turns, prompts, random.Random(0)), 400):
        begun = start.tokens[1:]
        assert (
            start.tokens[0] == 1
            and not start.answers
            and any(begun == prompt[: len(begun)] for prompt in prompts)
        )
        lengths[len(begun)] += 1
    assert sorted(lengths) == [*range(FEW + 1)] and lengths[0] == pytest.approx(
        400 * (1 - BEGUN), abs=40
    )
    texts = starts(Turns([1], [], []), [[50, 51]], random.Random(0))
    assert next(texts) == Start([1, 50], True, 1.0)


PLAIN = Turns([], [], [])


def written(target: PreTrainedModel, turns: Turns, begun: list[Start], length: int = 60) -> Sampled:
    return write(target, turns, begun, starts(turns, [[7, 8]], random.Random(1)), length, seed=3)


def test_what_is_recorded_is_the_targets_distribution(target: PreTrainedModel) -> None:
    """By one pass without a cache over each finished sequence."""
    sampled = written(target, PLAIN, [Start([5, 9, 4], True, 1.0), Start([11], True, 0.3)])
    with torch.no_grad():
        logits_BTV = target(sampled.tokens_BT.long()).logits
        again_BTV = target.get_output_embeddings()(sampled.hidden_BTD.float())
    assert torch.allclose(sampled.log_total_BT, logits_BTV.logsumexp(-1), atol=1e-3)
    # hidden states are stored in bfloat16
    assert (logits_BTV.softmax(-1) - again_BTV.softmax(-1)).abs().amax() < 0.05
    assert sampled.tokens_BT[0, :3].tolist() == [5, 9, 4] and sampled.tokens_BT[1, 0] == 11
    assert not sampled.drawn_BT[0, :3].any() and sampled.drawn_BT[0, 3]


def often(target: PreTrainedModel) -> int:
    """The token that the target draws most often."""
    drawn = written(target, PLAIN, [Start([1, 2], True, 1.0)], 200).tokens_BT[0, 2:]
    return int(drawn.mode().values)


def test_turns_follow_one_another(target: PreTrainedModel) -> None:
    """A turn ends where the target draws the token that ends it, or where a user's turn is too
    long."""
    drawn_ends, forced_ends = 0, 0
    for end in (often(target), 150):  # a byte that is no text, which is hardly ever drawn
        turns, begun = (
            Turns([1], [end, 3], [end, 4]),
            [Start([1], False, 0.5), Start([1, 5, end, 3], True, 1.0)],
        )
        sampled = written(target, turns, begun, 300)
        for start, tokens, drawn in zip(
            begun, sampled.tokens_BT.tolist(), sampled.drawn_BT.tolist(), strict=True
        ):
            answers, written_length, prefix = start.answers, 0, list(start.tokens)
            for token, is_drawn in zip(tokens, drawn, strict=True):
                if prefix:
                    assert (token, is_drawn) == (prefix.pop(0), False)
                    continue
                written_length += 1
                too_long = not answers and written_length > LONGEST_TURN
                assert is_drawn or (token == end and too_long)
                assert token == end or not too_long
                if token == end:
                    drawn_ends, forced_ends = drawn_ends + is_drawn, forced_ends + (not is_drawn)
                    answers, written_length, prefix = not answers, 0, [4 if answers else 3]
    assert drawn_ends > 2 and forced_ends


def test_without_a_template_texts_follow_one_another(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target draws a token that ends a text, the next one begins as a prompt does."""
    end = often(target)
    monkeypatch.setattr(target.generation_config, "eos_token_id", end)
    sampled = written(target, PLAIN, [Start([1, 2], True, 1.0)], 200)
    tokens, drawn = sampled.tokens_BT[0].tolist(), sampled.drawn_BT[0].tolist()
    ends = [t for t in range(2, 198) if drawn[t] and tokens[t] == end]
    assert ends and all(tokens[t + 1] == 7 and not drawn[t + 1] for t in ends)
    assert drawn.count(False) <= 2 + len(ends) + 2


@pytest.mark.parametrize("spread", [0.0, 2.0], ids=["no bias", "bias"])
def test_the_loss_has_the_gradient_of_its_formula(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.distil.training.ELEMENTS", 7 * 30)  # in parts of seven places
    generator = torch.Generator().manual_seed(0)
    states_ND, hidden_ND = torch.randn(2, 50, 8, generator=generator)
    states_ND.requires_grad_()
    rows_VD = torch.randn(40, 8, generator=generator)
    rows_RD = rows_VD[:30]  # the draft scores a part of the tokens
    bias_V = spread * torch.randn(40, generator=generator)
    bias_R = bias_V[:30]
    log_total_N = (hidden_ND @ rows_VD.T + bias_V).logsumexp(-1)
    with torch.no_grad():
        means, gradient_ND = loss_and_gradient(
            states_ND, rows_RD, bias_R if spread else None, hidden_ND, log_total_N
        )
    p_NR = (hidden_ND @ rows_RD.T + bias_R - log_total_N[:, None]).exp()
    log_q_NR = (states_ND @ rows_RD.T + bias_R).log_softmax(-1)
    cross_entropy = -(p_NR * log_q_NR).sum(-1).mean()
    overlap = torch.minimum(p_NR, log_q_NR.exp()).sum(-1).mean()
    expected = torch.stack([cross_entropy, overlap, p_NR.sum(-1).mean()])
    assert torch.allclose(means, expected, rtol=1e-5)
    (slope_ND,) = torch.autograd.grad(cross_entropy - overlap, states_ND)
    assert torch.allclose(gradient_ND, slope_ND, atol=1e-6)


def test_the_loss_passes_its_gradient_to_the_draft(target: PreTrainedModel) -> None:
    """Along a weight's gradient the loss falls by its square."""
    batch = written(target, PLAIN, [Start([5, 9, 4], True, 1.0)])
    _, overlap, covered = distances(target, batch)  # its own draft
    assert 0.98 < float(overlap) <= float(covered)
    draft = deepcopy(target)
    weight = draft.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight *= -1
    loss, *_ = distances(draft, batch)
    (slope,) = torch.autograd.grad(loss, weight)
    step = 1e-2 / slope.norm()
    with torch.no_grad():
        weight -= step * slope
    fall = ((loss - distances(draft, batch)[0]) / step).item()
    assert fall == pytest.approx(slope.square().sum().item(), rel=0.05)


def test_muon_moves_matrices_as_that_of_torch_does() -> None:
    """Torch's rounds to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 24), (24, 40), (30, 30))
    ours = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours]
    optimizers = (
        Muon(ours, 0.01),
        torch.optim.Muon(theirs, 0.01, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(5):
        for matrix, other in zip(ours, theirs, strict=True):
            matrix.grad = other.grad = torch.randn(matrix.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step(lambda: None)
    for matrix, other in zip(ours, theirs, strict=True):
        assert torch.allclose(matrix, other, rtol=0, atol=4e-4)


def test_the_most_frequent_tokens_are_counted_where_they_were_drawn(tmp_path: Path) -> None:
    tokens_BT = torch.tensor([[9, 9, 9, 4, 4, 2]], dtype=torch.int32)
    drawn_BT = torch.tensor([[False] * 3 + [True] * 3])
    save(Sampled(tokens_BT, drawn_BT, torch.zeros(1, 6, 4), torch.zeros(1, 6)), tmp_path / "texts")
    data = Sequences([tmp_path / "texts"])
    assert data.most_frequent(2, 12, []).tolist() == [2, 4]
    assert data.most_frequent(3, 12, [7]).tolist() == [2, 4, 7]
    assert data.most_frequent(4, 12, []).tolist() == [0, 1, 2, 4]
    assert data.most_frequent(0, 12, []).tolist() == list(range(12))
    assert data[0].counted_BT.tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, "384"), (20_000, "19,968"), (1_000_000, "999,936")]
)
def test_as_many_tokens_are_written_as_are_asked_for(tokens: int, expected: str) -> None:
    """But for the last sequence, which is whole or left out."""
    config = demo_config(f"distil.tokens={tokens}", "distil.context=384", "distil.batch=128")
    assert plan(config)[0].startswith(f"{expected} tokens sampled from ")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a draft, and the checksum of its weights."""
    folder = tmp_path_factory.mktemp("whole")
    espalier(folder, "distil", *SMALL)
    return folder, sha256(folder / WEIGHTS)


def test_a_draft_from_nothing_to_decoding(whole: tuple[Path, str]) -> None:
    folder, _ = whole
    manifest = folder / DISTIL / "manifest.json"
    about = json.loads(manifest.read_text())["draft"]
    assert about["vocabulary"] == 60 and 0.1 < about["overlap"] < about["covered"] < 1
    assert "distil: reusing" in espalier(folder, "distil", *SMALL)
    written_paths = sorted((folder / DISTIL / "texts").glob("0*"))
    assert [len(Sequences([path])) for path in written_paths] == [10, 10, 4]  # 3,840 tokens
    texts = {path: path.stat().st_mtime_ns for path in (folder / DISTIL / "texts").iterdir()}
    output = espalier(folder, "distil", *SMALL, "distil.layers=[1]", "distil.passes=1")
    assert re.search(r"training .* 3/3 .* loss \d+\.\d+, overlap 0\.\d+", output), output
    assert texts == {path: path.stat().st_mtime_ns for path in texts}  # another draft on them
    tried = json.loads(manifest.read_text())["tried"]
    assert [draft["layers"] for draft in tried] == [[0], [1]]
    draft = ModelPair.load(TARGET, str(folder / DISTIL / "draft"), device="cpu").draft
    assert draft.config.num_hidden_layers == 1
    assert "their vocabulary" in espalier(folder, "pair", *SMALL, "data.tokens=24")
    made = json.loads((folder / DISTIL / "draft" / "provenance.json").read_text())
    assert made["weights"] == sha256(folder / WEIGHTS) and made["config"]["layers"] == [1]


def target_of(kind: str, folder: Path) -> str:
    """A target with a bias in its output layer, with a first token that every text has, or with a
    template that opens a thought."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = None
    model = AutoModelForCausalLM.from_pretrained(TARGET)
    if kind == "bias":
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": None}
        model = PhiForCausalLM(
            PhiConfig(**sizes, **tokens, num_attention_heads=4, initializer_range=0.3)
        )
        model.lm_head.bias.data.normal_(std=2)
    elif kind == "first token":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, 0)]
        )
    else:
        tokenizer.chat_template = TEMPLATE.replace("<assistant>", "<assistant><think>\n")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["bias", "first token", "thought"])
def test_the_overlap_is_that_of_the_targets_own_decoding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many tokens as the stage's answers have, behind the same prompts. Sequences begin as
    the run's texts do."""
    monkeypatch.chdir(tmp_path)
    overrides = [
        *SMALL,
        f"pair.target={target_of(kind, tmp_path / 'target')}",
        "distil.vocabulary=0",
        "prompts.tokens=100",
    ]
    if kind == "thought":
        overrides += ["prompts.chat=true", "prompts.longer=drop"]
    espalier(tmp_path, "distil", *overrides)
    config = demo_config(*overrides)
    pair = ModelPair.load(*pair_names(config), device="cpu")
    opening = form_of(config).turns(pair.tokenizer).opening
    for path in (DISTIL / "texts").glob("0*"):
        first_BT = Sequences([path]).tokens_BT[:, : len(opening)]
        assert first_BT.tolist() == [opening] * len(first_BT)
    sums = []
    held_out = Sequences([DISTIL / "texts" / HELD_OUT]).tokens_BT.tolist()
    prompts = kept_prompts(config, pair.tokenizer, "validation")
    for prompt, tokens in zip(prompts, held_out, strict=True):
        ids = encode(config, pair, prompt)
        assert tokens[: len(ids)] == ids
        (text,) = generated_by_target(pair, [ids], 160 - len(ids), Sampling(), seed=len(sums))
        overlaps_N = torch.cat(
            [
                torch.minimum(block.target.probs_NV, block.draft.probs_NV).sum(-1)
                for block in rows_along(pair, text, Sampling())
            ]
        )
        sums.append((float(overlaps_N[:-1].sum()), len(overlaps_N) - 1))
    overlaps, counts = torch.tensor(sums, dtype=torch.float64).T
    mean = overlaps.sum() / counts.sum()
    error = (overlaps - mean * counts).norm() / counts.sum()
    said = json.loads((DISTIL / "manifest.json").read_text())["draft"]["overlap"]
    assert abs(said - mean) < 3 * math.sqrt(2) * error  # both are means of as many texts


KILLED = partial(signal.raise_signal, signal.SIGKILL)


def kill_at_step(number: int) -> None:
    """There is a checkpoint at every second step."""
    patch("pipelines.distil.training.EVERY", lambda _: 2)
    at_call("pipelines.distil.training.DistilModule.training_step", number, KILLED)


def test_a_killed_stage_ends_at_the_same_weights(whole: tuple[Path, str], tmp_path: Path) -> None:
    """Killed between two batches of texts, which stay; at the fourth step of the training, of which
    two were kept; and at the fifth of six, in the middle of the second pass, of which four were
    kept, so that the next call makes two: at a third one it would be killed."""
    prepare = partial(at_call, "pipelines.distil.texts.save", 2, KILLED)
    code, _ = outcome(tmp_path, "distil", *SMALL, prepare=prepare)
    assert code == -signal.SIGKILL
    (first,) = (tmp_path / DISTIL).rglob("0*.safetensors")
    before = first.stat().st_mtime_ns
    for number, expected in ((4, -signal.SIGKILL), (3, -signal.SIGKILL), (3, 0)):
        prepare = partial(kill_at_step, number)
        code, output = outcome(tmp_path, "distil", *SMALL, prepare=prepare)
        assert code == expected, output
    assert first.stat().st_mtime_ns == before
    assert sha256(tmp_path / WEIGHTS) == whole[1]
    assert not list((tmp_path / "runs/demo").rglob("*.ckpt"))
