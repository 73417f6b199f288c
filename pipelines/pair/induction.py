"""An induction head, written into a Llama before training: it finds where the text stood before, says what followed.

Models learn such heads by themselves, but suddenly and late, after billions of tokens (Olsson et al., "In-context
Learning and Induction Heads", arXiv 2209.11895). A pair that is trained in half an hour sees a few million. So that it
can copy as real models do, its target begins with one, and training makes of it what the text asks for.

Two layers make the head, as in the paper:

    layer 0   half of its heads attend to the token before. They note it at every position.
    layer 1   all of its heads attend to the positions whose note is the present token, and predict the token there.

After `a b .. a` the note at `b` says `a`, so layer 1 attends to `b` and predicts it.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM

NEXT_TO = 10.0  # logits by which the attention of layer 0 prefers the token before to the ones beside it, about
MATCH = 12.0  # logit of a matching note in layer 1
COPIED = 0.25  # weight of the copied token in the residual stream; the text's own token has 1 / sqrt(hidden)
ROPE_THETA = 1e6  # turns half of a head's axes by less than half a circle over 1,000 tokens, so notes match far away


@torch.no_grad()
def write_induction_head(model: LlamaForCausalLM) -> None:
    """Set the weights of a model of two or more layers; what is random in them follows torch's generator.

    A random basis of the residual stream is halved: tokens are compared on the first half, `own_RH`, and notes are
    written to the second, `note_RH`, both [hidden / 2, hidden]. A token's embedding has parts on both, and what is on
    the wrong one acts as noise. Other layers and heads write nothing at first: their output projections are zero.

    Args:
        model: with biases in its attention, an even number of heads, and axes of a head divisible by 4.
    """
    hidden, heads = model.config.hidden_size, model.config.num_attention_heads
    axes = hidden // heads
    own_RH, note_RH = torch.linalg.qr(torch.randn(hidden, hidden))[0].split(hidden // 2)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=hidden**-0.5)

    # Rotary embedding turns a query and a key apart by `angle` for each token between them. So a constant query agrees
    # best with the key one token back if all keys are that query, turned on by the angle of one token.
    angle = ROPE_THETA ** (-torch.arange(axes // 2) / (axes // 2))
    size = math.sqrt(NEXT_TO * math.sqrt(axes) / float((1 - angle.cos()).sum()))
    before = model.model.layers[0].self_attn
    noting = slice(0, hidden // 2)  # the first half of the heads
    for projection, turned in ((before.q_proj, torch.zeros_like(angle)), (before.k_proj, angle)):
        projection.weight[noting] = 0
        projection.bias[noting] = size * torch.cat((turned.cos(), turned.sin())).repeat(heads // 2)
    before.v_proj.weight[noting] = own_RH
    before.o_proj.weight[:, noting] = note_RH.T * hidden**-0.5

    # The slower half of a head's axes takes part; the other half would compare tokens at short distances alone.
    slow = torch.arange(hidden).view(heads, 2, 2, axes // 4)[:, :, 1].flatten()
    size = math.sqrt(MATCH * math.sqrt(axes) / (axes // 4))
    match = model.model.layers[1].self_attn
    for projection, read_RH in ((match.q_proj, own_RH), (match.k_proj, note_RH)):
        projection.weight.zero_()
        projection.weight[slow] = size * read_RH
    basis_HH = torch.linalg.qr(torch.randn(hidden, hidden))[0]  # shares the tokens out among the heads
    match.v_proj.weight.copy_(basis_HH)
    match.o_proj.weight.copy_(COPIED * basis_HH.T)
