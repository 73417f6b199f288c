"""The distributions that transformers' `generate` samples from, by its logits processors.

Legend: N nodes, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
import transformers.generation.logits_process as processors
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from selector.sampling import Sampling

OF_LOGITS_ALONE = (  # processors whose result follows from the logits
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
)


@dataclass(frozen=True)
class Processed(Sampling):
    """The distribution that `generate` samples from, by its logits processors."""

    processors: LogitsProcessorList = field(
        default_factory=LogitsProcessorList, compare=False, repr=False
    )

    @classmethod
    def of(cls, config: GenerationConfig, logits_processor: LogitsProcessorList) -> Processed:
        if not config.do_sample:
            return cls(0.0, processors=logits_processor)
        return cls(
            temperature=float(config.temperature or 1.0),
            top_p=float(config.top_p or 1.0),
            top_k=int(config.top_k or 0),
            min_p=float(config.min_p or 0.0),
            processors=logits_processor,
        )

    @property
    def draft(self) -> Processed:
        if self.draft_temperature is None:
            return self
        kept = [
            processor
            for processor in self.processors
            if type(processor) is not processors.TemperatureLogitsWarper
        ]
        if self.draft_temperature > 0:
            kept.insert(0, processors.TemperatureLogitsWarper(float(self.draft_temperature)))
        draft_processors = LogitsProcessorList(kept)
        return replace(
            self,
            temperature=self.draft_temperature,
            draft_temperature=None,
            processors=draft_processors,
        )

    def after(self, texts: Callable[[], list[list[int]]], logits_NV: Tensor) -> Tensor:
        """Distributions [N, V] at N nodes, from the logits there; `texts` returns the text up to
        each."""
        scores_NV = logits_NV.float()
        if all(type(processor) in OF_LOGITS_ALONE for processor in self.processors):
            none_N1 = torch.zeros(len(scores_NV), 1, dtype=torch.int64, device=scores_NV.device)
            scores_NV = self.processors(cast(torch.LongTensor, none_N1), scores_NV)
        else:
            row_scores = []
            for text, scores_V in zip(texts(), scores_NV.clone().unbind(0), strict=True):
                text_1T = torch.tensor([text], device=scores_V.device)
                row_scores.append(self.processors(cast(torch.LongTensor, text_1T), scores_V[None]))
            scores_NV = torch.cat(row_scores)
        if self.temperature == 0:
            likeliest_N1 = scores_NV.argmax(-1, keepdim=True)
            return torch.zeros_like(scores_NV).scatter_(-1, likeliest_N1, 1.0)
        return scores_NV.softmax(-1)
