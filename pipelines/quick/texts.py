"""Texts that the target writes for the stage `quick`, and their labels.

Legend: T tokens of a text from its first root on, R roots, S survivals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import TextLabeller, blocks
from data_gen.texts.written import Text, rows_along, seed_of, written_by_target
from pipelines.config import Config
from pipelines.pair.loading import encode, prompts_of
from selector.actions import ActionSpace

SPLIT = "validation"
TOGETHER = 16  # texts that the target writes at once
SIBLINGS = 2  # draws for each root: more would lower the labels' variance, and take time
DEPTH = ActionSpace.default().depth


def texts_of(config: Config, pair: ModelPair, sampling: Sampling) -> Iterator[tuple[str, Text, torch.Generator]]:
    """The target's texts on the prompts: the source, the text, and a generator of the text's own.

    A root is the last prompt token or a later one, and at least `DEPTH` tokens follow it. Texts without a root are left
    out.
    """
    prompts = prompts_of(config, pair, SPLIT)
    for begin in range(0, len(prompts), TOGETHER):
        batch = prompts[begin : begin + TOGETHER]
        encoded = [encode(config, pair, prompt) for prompt in batch]
        seed = seed_of(config.seed, sampling, "quick", begin)
        texts = written_by_target(pair, encoded, config.data.tokens + DEPTH, sampling, seed)
        for prompt, text in zip(batch, texts, strict=True):
            if len(text.tokens) - text.start > DEPTH:
                yield prompt.source, text, torch.Generator(device=pair.device).manual_seed(seed_of(seed, prompt.id))


@torch.inference_mode()
def survivals(
    pair: ModelPair, text: Text, sampling: Sampling, verifiers: Sequence[str], generator: torch.Generator
) -> Tensor | None:
    """`P(tau >= t | text)` at every root, float64 [verifier, R, S], in the order of `ActionSpace.sums_SA`; or None.

    The text is cut before a token to which the target gives probability 0 here: it was written in a batch, which rounds
    differently, and at the edge of a nucleus that can decide. None stands for a text without a root.
    """
    rows = list(rows_along(pair, text, sampling))
    target_probs_TV, draft_probs_TV = (
        torch.cat(each) for each in zip(*((row.target.probs_NV, row.draft.probs_NV) for row in rows), strict=True)
    )
    tokens_T = torch.tensor(text.tokens[text.start :])
    next_T1 = tokens_T[1:, None].to(target_probs_TV.device)
    possible_T = target_probs_TV[:-1].gather(-1, next_T1)[:, 0] > 0
    length = 1 + int(possible_T.long().cumprod(0).sum())
    if length <= DEPTH:
        return None
    labeller = TextLabeller(tokens_T[:length], verifiers, SIBLINGS, generator)
    for block in blocks(target_probs_TV[:length], draft_probs_TV[:length]):
        labeller.add(*block)
    return labeller.survivals().cpu()
