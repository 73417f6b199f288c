"""A Llama that copies without any training: an induction head is written into its first two layers.

    layer 0   half of its heads attend to the token before and write it at every position as a note.
    layer 1   all of its heads attend to the positions whose note is the present token, and predict the token there.

After `a b .. a` the note at `b` is `a`, so layer 1 attends to `b` and predicts it (Olsson et al., "In-context Learning
and Induction Heads", arXiv 2209.11895).

Legend: H hidden width, R half of it.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS = 4
NEXT_TO = 10.0  # approximate logit difference in layer 0 between the token before and its neighbours
MATCH = 12.0  # logit of a matching note in layer 1
COPIED = 0.25  # weight of the copied token in the residual stream; the present token has 1 / sqrt(hidden)
ROPE_THETA = 1e6  # rotates half of a head's axes by less than pi over 1,000 tokens, so that distant notes match


def copying_model(hidden: int, layers: int, vocabulary: int, eos: int, seed: int) -> LlamaForCausalLM:
    """Random weights and tied embeddings; the head is there with two or more layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        attention_bias=True,
        initializer_range=hidden**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    model = LlamaForCausalLM(config)
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
