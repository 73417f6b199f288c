"""Training of a head for the embedded target, with the loss of the `speculators` library on the target's own rows.

The library's trainer needs a GPU; its loss runs anywhere, and `language_model.train` runs it like a draft's.

Legend: B texts, T tokens, V vocabulary, A widths of several layers' states together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data_gen.models.pair import recorded
from pipelines.pair.language_model import Loss

DEPTHS = 4  # drafted tokens over which the loss is averaged
DECAY = 0.9  # of the loss from one depth to the next
TOGETHER = 512  # tokens of the texts of one pass; its attention covers all of them
LOSS = '{"kl_div": 1.0, "tv": 1.0}'  # as for the embedded draft


def new_head(target: str, seed: int) -> Any:
    """A head of one layer with random weights and the target's embeddings, last norm and output rows, for all of its
    vocabulary."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig

    torch.manual_seed(seed)
    own = AutoConfig.from_pretrained(target)
    layers = own.num_hidden_layers
    own.num_hidden_layers = 1
    head = Eagle3DraftModel.from_training_args(
        own,
        draft_vocab_size=own.vocab_size,
        norm_before_residual=True,
        ttt_steps=DEPTHS,
        verifier_name_or_path=target,
        target_layer_ids=[layers // 4, layers // 2, layers],
        draft_attn_impl="eager",
    )
    head.norm.load_state_dict(head.verifier_norm.state_dict())  # to which the output rows belong
    head.lm_head.weight.requires_grad_(True)
    return head


def head_loss(target: Any) -> Loss:
    """The library's loss, mean over depths: KL divergence from the target, and total variation."""

    def loss(head: Any, batch_BT: Tensor) -> Tensor:
        parts = batch_BT.split(max(1, TOGETHER // batch_BT.shape[1]))
        each = [_passed(head, target, part)[0] for part in parts]
        return torch.stack(each).mean()

    uncompiled: Loss = torch.compiler.disable(loss)  # its hooks and loops gain nothing from compiling
    return uncompiled


def overlaps(head: Any, target: Any, batch_BT: Tensor) -> list[float]:
    """Mean of `sum_x min(p(x), q(x))` at temperature 1 along texts, by the depth below the root."""
    seen: list[Tensor] = []
    with torch.no_grad(), head.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output[0])):
        parts = [_passed(head, target, part)[1] for part in batch_BT.split(max(1, TOGETHER // batch_BT.shape[1]))]
    found: list[list[float]] = [[] for _ in range(DEPTHS)]
    for number, p_BTV in enumerate(parts):
        for depth in range(DEPTHS):
            q_BTV = seen[number * DEPTHS + depth].view(*p_BTV[:, 1:].shape).softmax(-1)
            apart = torch.minimum(p_BTV[:, 1 + depth :], q_BTV[:, : q_BTV.shape[1] - depth]).sum(-1)
            found[depth].append(float(apart.mean()))
    return [sum(own) / len(own) for own in found]


def _passed(head: Any, target: Any, batch_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The library's loss on some texts, one behind the other, and the target's rows, [B, T, V]."""
    from speculators.losses import resolve_loss_config

    last = target.config.num_hidden_layers
    with torch.no_grad(), recorded(target, [*head.target_layer_ids, last]) as seen:
        logits_BTV = target(batch_BT).logits.float()
    states_BTA = torch.cat([seen[number] for number in head.target_layer_ids], dim=-1)
    tokens_BT, texts = batch_BT[:, 1:], torch.arange(len(batch_BT), device=batch_BT.device).unsqueeze(-1)
    counted_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    counted_BT[:, -DEPTHS:] = False  # their chains would run into the next text
    _, loss, _ = head(
        states_BTA[:, :-1].flatten(0, 1).unsqueeze(0),
        tokens_BT.reshape(1, -1),
        texts.expand_as(tokens_BT).reshape(1, -1),
        counted_BT.view(1, -1),
        torch.arange(1, batch_BT.shape[1], device=batch_BT.device).repeat(len(batch_BT)).unsqueeze(0),
        seen[last][:, 1:].flatten(0, 1).unsqueeze(0),
        ttt_steps=DEPTHS,
        ttt_step_loss_decay=DECAY,
        loss_config=resolve_loss_config(LOSS, "eager"),
    )
    return loss, logits_BTV.softmax(-1)
