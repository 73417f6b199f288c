"""Texts that the target writes for a quick look or an audit, and their labels.

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
SIBLINGS = 2  # draws per root: they are much of a label's noise, but rules that sort need time for each
DEPTH = ActionSpace.default().depth


def texts_of(config: Config, pair: ModelPair, sampling: Sampling) -> Iterator[tuple[str, Text, torch.Generator]]:
    """The target's texts on the prompts: the source, the text and a generator of the text's own.

    A root is a token of the text's own, or the last prompt token, that at least `DEPTH` tokens follow. Texts without a
    root are left out.
    """
    prompts = prompts_of(config, pair, SPLIT)
    for begin in range(0, len(prompts), TOGETHER):
        batch = prompts[begin : begin + TOGETHER]
        encoded = [encode(config, pair, prompt) for prompt in batch]
        seed = seed_of(config.seed, sampling, "audit", begin)
        texts = written_by_target(pair, encoded, config.data.tokens + DEPTH, sampling, seed)
        for prompt, text in zip(batch, texts, strict=True):
            if len(text.tokens) - text.start > DEPTH:
                yield prompt.source, text, torch.Generator(device=pair.device).manual_seed(seed_of(seed, prompt.id))


def labels_of(config: Config, pair: ModelPair, sampling: Sampling, verifiers: Sequence[str]) -> Iterator[Tensor]:
    """`P(tau >= t | text)` at every root of each of the target's texts, float64 [verifier, R, S]."""
    for _, text, generator in texts_of(config, pair, sampling):
        labels = survivals(pair, text, sampling, verifiers, generator)
        if labels is not None:
            yield labels


@torch.inference_mode()
def survivals(
    pair: ModelPair, text: Text, sampling: Sampling, verifiers: Sequence[str], generator: torch.Generator
) -> Tensor | None:
    """The labels of one text, float64 [verifier, R, S], in the order of `ActionSpace.sums_SA`; None without a root.

    A token that the target here gives probability 0 ends the text. The text was written in a batch, which rounds
    differently, and at the edge of a nucleus that can decide.
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
