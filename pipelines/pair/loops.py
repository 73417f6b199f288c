"""Loops of greedy text, and training against them.

The loss is sequence-level unlikelihood (Welleck et al., "Neural Text Generation with Unlikelihood Training",
arXiv 1908.04319, section 5). A small model that copies well repeats a few tokens for ever when it decodes greedily.
The paper lets the model continue texts, and lowers the probability of the n-grams that it repeats. Here only tokens
inside loops count, because a model for speculative decoding must go on copying what is further away.

Legend: B texts, T tokens, P prompts, W tokens of a prompt and its continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from pipelines.pair.language_model import next_token_loss, repeats

PERIOD, LOOP = 16, 16  # tokens of a loop's longest period, and of the shortest loop
WINDOW = 256  # tokens of a prompt and its continuation, half of them each
REPEATS = 0.25  # weight of random tokens that come twice; without them the model unlearns copying with the loops


def inside_loops(tokens: Sequence[int]) -> list[bool]:
    """Which tokens equal the one a period before them, with a period of up to `PERIOD` tokens, all along a run of at
    least two periods and `LOOP` tokens."""
    inside = [False] * len(tokens)
    for period in range(1, PERIOD + 1):
        begin = period
        for at in range(period, len(tokens) + 1):
            if at == len(tokens) or tokens[at] != tokens[at - period]:
                if at - begin >= max(2 * period, LOOP):
                    inside[begin:at] = [True] * (at - begin)
                begin = at + 1
    return inside


def loss_without_loops(model: LlamaForCausalLM, batch_BT: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats per token, on texts [B, T] and on random runs that come twice, and the unlikelihood."""
    tokens, vocabulary = batch_BT.shape[1], model.config.vocab_size
    random_1T = repeats(tokens, vocabulary, tokens // 2, int(batch_BT.sum()))[None, :tokens].to(model.device)
    on_text = next_token_loss(model, batch_BT) + unlikelihood(model, batch_BT)
    return (1 - REPEATS) * on_text + REPEATS * next_token_loss(model, random_1T)


def unlikelihood(model: LlamaForCausalLM, batch_BT: torch.Tensor) -> torch.Tensor:
    """`-log(1 - p)` of the tokens inside loops of the model's own text, divided by the number of all its tokens.

    The texts [B, T] are cut into windows, and the model continues the first half of each greedily.
    """
    window = min(WINDOW, batch_BT.shape[1])
    prompts_PT = batch_BT[:, : batch_BT.shape[1] // window * window].reshape(-1, window)[:, : window // 2]
    texts_PW = _continued(model, prompts_PT, window)
    new = prompts_PT.shape[1]
    looped_PT = torch.tensor([inside_loops(text) for text in texts_PW[:, new:].tolist()], device=model.device)
    logits = model(texts_PW[:, :-1]).logits[:, new - 1 :].float()
    log_p_PT = -F.cross_entropy(logits.transpose(1, 2), texts_PW[:, new:], reduction="none")
    unlikely_PT = -torch.log1p(-log_p_PT.exp().clamp(max=1 - 1e-6))
    return (unlikely_PT * looped_PT).mean()


@torch.no_grad()
def _continued(model: LlamaForCausalLM, prompts_PT: torch.Tensor, length: int) -> torch.Tensor:
    """Prompts with their greedy continuations, [P, length]; the end of a text does not end them."""
    attends, generate = torch.ones_like(prompts_PT), cast(Any, model).generate
    with torch.autocast(model.device.type, enabled=False):
        texts_PW: torch.Tensor = generate(
            prompts_PT, attention_mask=attends, do_sample=False, min_length=length, max_length=length
        )
    return texts_PW
