"""Training of the embedded pair: a byte-level BPE tokenizer, a target model, and a draft distilled from it.

The target begins with an induction head, which models learn late in training (Olsson et al., "In-context Learning and
Induction Heads", arXiv 2209.11895). It is written into two layers, as in the paper, and training adapts it:

    layer 0   half of its heads attend to the token before and write it at every position as a note.
    layer 1   all of its heads attend to the positions whose note is the present token, and predict the token there.

After `a b .. a` the note at `b` is `a`, so layer 1 attends to `b` and predicts it.

Legend: B texts, T tokens, H hidden width, R half of it.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from pipelines.config import Embedded
from selector.files import atomically
from selector.schema import InputError

VOCABULARY, PER_WIDTH = 2048, 16  # tokens at most, and for each unit of the models' width
CHARACTERS = 6_000_000  # that the tokenizer is learned from
HEADS = 4
TOKENS_PER_STEP = 2048
COMPILED = 1000  # steps from which on compiling, which takes a minute, saves more: a fifth of a step
SHORTEST = 16  # tokens of the shortest random run that comes twice; shorter ones would teach loops
END = "<|end|>"  # the end-of-sequence token, also between files
CHECKPOINT_SECONDS = 30
NEXT_TO = 10.0  # approximate logit difference in layer 0 between the token before and its neighbours
MATCH = 12.0  # logit of a matching note in layer 1
COPIED = 0.25  # weight of the copied token in the residual stream; the present token has 1 / sqrt(hidden)
ROPE_THETA = 1e6  # rotates half of a head's axes by less than pi over 1,000 tokens, so that distant notes match
Loss = Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]


class Schedule(NamedTuple):
    """How a model is trained.

    Attributes:
        batch: sequences of a step.
        learning_rate: the peak. Both models begin with weights that work, which large rates would destroy.
        repeats: random tokens that come twice, for each token of the corpus.
    """

    steps: int
    batch: int
    learning_rate: float
    repeats: float = 1 / 8

    @classmethod
    def of(cls, embedded: Embedded, role: str) -> Schedule:
        """The schedule of the target, of the base that it begins as where loops are trained away, or of what drafts."""
        least, rate, steps, repeats = 8, 2e-3, embedded.draft_steps, 1 / 8
        if role == "base" or (role == "target" and not embedded.loop_steps):
            least, steps = 4, embedded.steps
        elif role == "target":
            least, rate, steps, repeats = 3, 1e-4, embedded.loop_steps, 0.0  # the loss has repeats of its own
        return cls(steps, max(least, TOKENS_PER_STEP // embedded.context), rate, repeats)


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocabulary` tokens, learned on about `CHARACTERS` characters of evenly spaced texts."""
    tokenizer, byte_level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    stride = max(1, -(-sum(map(len, texts)) // CHARACTERS))
    tokenizer.train_from_iterator(texts[::stride], trainer)
    return wrapped(tokenizer)


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer for transformers."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def encode_corpus(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """All texts as one stream of token ids, [tokens] int64, each followed by the end token."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts)
    return torch.tensor([token for encoding in encodings for token in (*encoding.ids, tokenizer.eos_token_id)])


def repeats(tokens: int, vocabulary: int, longest: int, seed: int, shortest: int = SHORTEST) -> torch.Tensor:
    """At least `tokens` token ids, int64: runs of random tokens, each of which comes twice. The logarithms of their
    lengths are uniform, from the shortest run's to the longest one's."""
    generator, runs, made = torch.Generator().manual_seed(seed), [torch.zeros(0, dtype=torch.int64)], 0
    while made < tokens:
        share = float(torch.rand((), generator=generator))
        run = torch.randint(vocabulary, (int(shortest * (longest / shortest) ** share),), generator=generator)
        runs += [run, run]
        made += 2 * len(run)
    return torch.cat(runs)


def attention(context: int) -> str:
    """The attention implementation that trains faster on a CPU, for windows of `context` tokens."""
    return "eager" if context <= 128 else "sdpa"


def vocabulary_of(embedded: Embedded) -> int:
    """Tokens of the byte-level BPE."""
    return min(VOCABULARY, PER_WIDTH * embedded.hidden)


def load(folder: Path, context: int, device: str) -> LlamaForCausalLM:
    """A trained model in float32."""
    kind = attention(context)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind)
    return cast(LlamaForCausalLM, model.to(device))


def build_model(embedded: Embedded, layers: int, vocabulary: int, eos: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights and tied embeddings; with an induction head if it has layers for one."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=embedded.hidden,
        intermediate_size=embedded.hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        attention_bias=True,
        initializer_range=embedded.hidden**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention(embedded.context))  # not saved
    if layers > 1:
        write_induction_head(model)
    return model


@torch.no_grad()
def write_induction_head(model: LlamaForCausalLM) -> None:
    """Write the head into a model of two or more layers; its random parts come from torch's generator.

    A random basis of the residual stream is halved: tokens are compared on the first half, `own_RH`, and notes are
    written to the second, `note_RH`. The output projections of other layers and heads are zero at first.

    Args:
        model: with biases in its attention, an even number of heads, and a head width divisible by 4.
    """
    hidden, heads = model.config.hidden_size, model.config.num_attention_heads
    axes = hidden // heads
    own_RH, note_RH = torch.linalg.qr(torch.randn(hidden, hidden))[0].split(hidden // 2)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=hidden**-0.5)

    # Rotary embedding rotates a query against a key by `angle` for each token between them. So a constant query matches
    # the key one token back best if all keys are that query, rotated by the angle of one token.
    angle = ROPE_THETA ** (-torch.arange(axes // 2) / (axes // 2))
    size = math.sqrt(NEXT_TO * math.sqrt(axes) / float((1 - angle.cos()).sum()))
    before = model.model.layers[0].self_attn
    noting = slice(0, hidden // 2)  # the first half of the heads
    for projection, rotated in ((before.q_proj, torch.zeros_like(angle)), (before.k_proj, angle)):
        projection.weight[noting] = 0
        projection.bias[noting] = size * torch.cat((rotated.cos(), rotated.sin())).repeat(heads // 2)
    before.v_proj.weight[noting] = own_RH
    before.o_proj.weight[:, noting] = note_RH.T * hidden**-0.5

    # Only the slower half of a head's axes is used; the other half would compare tokens at short distances alone.
    slow = torch.arange(hidden).view(heads, 2, 2, axes // 4)[:, :, 1].flatten()
    size = math.sqrt(MATCH * math.sqrt(axes) / (axes // 4))
    match = model.model.layers[1].self_attn
    for projection, read_RH in ((match.q_proj, own_RH), (match.k_proj, note_RH)):
        projection.weight.zero_()
        projection.weight[slow] = size * read_RH
    basis_HH = torch.linalg.qr(torch.randn(hidden, hidden))[0]  # spreads the tokens over the heads
    match.v_proj.weight.copy_(basis_HH)
    match.o_proj.weight.copy_(COPIED * basis_HH.T)


def begin_with(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Give a draft the target's embedding, first layers and last norm, which shortens its distillation."""
    own = draft.state_dict()
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in own})


def next_token_loss(model: LlamaForCausalLM, batch_BT: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats per token."""
    logits = model(batch_BT[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch_BT[:, 1:].flatten())


def distillation_loss(target: LlamaForCausalLM) -> Loss:
    """KL divergence from target to draft plus total variation, because acceptance is one minus total variation."""

    def loss(model: LlamaForCausalLM, batch_BT: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            log_p = target(batch_BT).logits.float().log_softmax(-1)
        log_q = model(batch_BT).logits.float().log_softmax(-1)
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        total_variation = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
        return (kl + total_variation).mean()

    return loss


def multiplies_faster_in_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16; without them it is much slower than in float32."""
    if device.type != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(256, 256, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(partial(torch.mm, matrix, matrix), number=1, repeat=10))
    return seconds[torch.bfloat16] < seconds[torch.float32]


def train(
    model: LlamaForCausalLM,
    loss_fn: Loss,
    stream: torch.Tensor,
    schedule: Schedule,
    context: int,
    seed: int,
    checkpoint: Path,
    on_step: Callable[[int, float], None],
) -> None:
    """AdamW with warm-up and cosine decay, on random windows of the stream.

    It runs on the model's device, and in bfloat16 where that is faster. After an interruption it continues from
    `checkpoint`, which the caller removes.

    Args:
        loss_fn: maps the model and a batch of token ids [B, T] to a scalar.
        stream: token ids, [tokens] int64.
        on_step: called with the number of steps done and the last loss.

    Raises:
        InputError: training diverges.
    """
    rate, betas, device = schedule.learning_rate, (0.9, 0.95), model.device
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=0.1, fused=True)
    done = _resumed(model, optimiser, checkpoint)
    model.train()
    bfloat16, saved = multiplies_faster_in_bfloat16(device), time.monotonic()
    if schedule.steps >= COMPILED:
        loss_fn = torch.compile(loss_fn)
    for step in range(done, schedule.steps):
        # each step has its own generator, so that a resumed run draws the windows of an uninterrupted one
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(stream) - context - 1, (schedule.batch, 1), generator=generator)
        batch_BT = stream[starts + torch.arange(context + 1)].to(device)
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step / schedule.steps)))
        for group in optimiser.param_groups:
            group["lr"] = schedule.learning_rate * min(1.0, (step + 1) / 50) * cosine
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
            loss = loss_fn(model, batch_BT)
        if not math.isfinite(loss.item()):
            raise InputError(f"pair.embedded: the loss is {loss.item()} at step {step + 1}: choose other sizes")
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        on_step(step + 1, loss.item())
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1}
            with atomically(checkpoint) as partial:
                torch.save(state, partial)
            saved = time.monotonic()
    model.eval()


def _resumed(model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, checkpoint: Path) -> int:
    """Load the weights and the optimiser's state of an interrupted run; returns the steps that it has done."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, map_location=model.device, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])


def windows(stream: torch.Tensor, context: int) -> torch.Tensor:
    """32 evenly spaced windows of a stream, [32, context]."""
    starts = torch.linspace(0, len(stream) - context - 1, 32).long()
    return stream[starts[:, None] + torch.arange(context)]


@torch.no_grad()
def mean_overlap(target: LlamaForCausalLM, draft: LlamaForCausalLM, stream: torch.Tensor, context: int) -> float:
    """Mean of `sum_x min(p(x), q(x))` at temperature 1 over 32 evenly spaced windows of held-out text."""
    batch_BT = windows(stream, context).to(target.device)
    p, q = (model(batch_BT).logits.float().softmax(-1) for model in (target, draft))
    return torch.minimum(p, q).sum(-1).mean().item()


@torch.no_grad()
def copy_losses(model: PreTrainedModel, tokens: int, seed: int) -> tuple[float, float]:
    """Mean loss in nats on `tokens` random tokens, and on the same tokens repeated: low where the model can copy."""
    generator = torch.Generator().manual_seed(seed)
    once_BT = torch.randint(model.config.vocab_size, (32, tokens), generator=generator).to(model.device)
    logits = model(once_BT.repeat(1, 2)).logits[:, :-1].float()
    loss_BT = F.cross_entropy(logits.transpose(1, 2), once_BT.repeat(1, 2)[:, 1:], reduction="none")
    return loss_BT[:, : tokens - 1].mean().item(), loss_BT[:, tokens:].mean().item()
