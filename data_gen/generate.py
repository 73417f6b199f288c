"""Speculative decoding inside transformers' own `generate()`, which keeps its arguments, checks and stopping rules:

    target.generate(**inputs, custom_generate=speculative_generate, draft_model=draft, selector="runs/demo/selector")

Logits processors (temperature, nucleus, penalties, minimum lengths, ..) are applied at every node of the tree with the
text before it, for draft and target. So the text follows the distribution of `generate` with the same settings.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers.generation.logits_process as processors
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import ModelOutput

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Chooser, FixedTree
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.models.self_check import check_model
from data_gen.models.vocabulary import scored, widened
from data_gen.verification import get_verifier
from selector.actions import Action, ActionSpace, Choice, choice_of
from selector.runtime.selector import Selector, load_selector
from selector.schema import PAIR, InputError

PADDING = 1.01  # the largest ratio of table sizes with one vocabulary, which differ by padding
DEFAULT_VERIFIER = "lifted_uniform"  # of a fixed tree
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
OF_THE_TEXT = (  # processors whose result follows from the logits and the text before
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.SuppressTokensAtBeginLogitsProcessor,
)
_checked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # checked text length by model


@dataclass
class SpeculativeOutput(ModelOutput):
    """What `generate(return_dict_in_generate=True)` returns: prompt and new tokens, int64 [1, T]; tau and the action of
    every decoding step."""

    sequences: Tensor | None = None
    accepted: tuple[int, ...] | None = None
    actions: tuple[Choice, ...] | None = None


@dataclass(frozen=True)
class Processed(Sampling):
    """The distribution that `generate` samples from, by its logits processors."""

    processors: Any = None  # a `LogitsProcessorList`

    def after(self, texts: Callable[[], list[list[int]]], logits_NV: Tensor) -> Tensor:
        """As `Sampling.after`; calls `texts` only if a processor needs the text."""
        scores_NV = logits_NV.float()
        if all(isinstance(each, OF_LOGITS_ALONE) for each in self.processors):
            none_N1 = torch.zeros(len(scores_NV), 1, dtype=torch.int64, device=scores_NV.device)
            scores_NV = self.processors(none_N1, scores_NV)
        else:
            rows = zip(texts(), scores_NV.clone().unbind(0), strict=True)
            scores_NV = torch.cat(
                [self.processors(torch.tensor([text], device=row.device), row.unsqueeze(0)) for text, row in rows]
            )
        if self.temperature == 0:
            return torch.zeros_like(scores_NV).scatter_(-1, scores_NV.argmax(-1, keepdim=True), 1.0)
        return scores_NV.softmax(-1)


def speculative_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: PreTrainedModel | None = None,
    selector: Selector | str | Path | Action | tuple[str, Action] | None = None,
    text_streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The decoding loop for `generate(custom_generate=speculative_generate, ..)`.

    Args:
        draft_model: with the target's vocabulary, on its device.
        selector: a loaded selector or its folder; or one action for all steps, a tree `(K, L1, L2)` or a lookup
            `(length,)`; or a pair of a verifier's name and such an action, whose default is `lifted_uniform`.
        text_streamer: a streamer of transformers; `generate` does not pass on its own argument `streamer`.

    Returns:
        prompt and new tokens, int64 [1, T]; with `return_dict_in_generate` a `SpeculativeOutput`.

    Raises:
        InputError: several texts, padding, beams, a filled cache, an unknown logits processor, no draft model, another
            vocabulary, no selector, or a model that cannot pass token trees; says which.
    """
    draft = _check(model, input_ids, logits_processor, generation_config, draft_model, model_kwargs)
    sampling = Processed(
        temperature=float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0,
        top_p=float(generation_config.top_p or 1.0) if generation_config.do_sample else 1.0,
        processors=logits_processor,
    )
    verifier, chooser = _choice(selector, sampling)
    pair = ModelPair(model, draft, cast(Any, None), (str(model.name_or_path), str(draft.name_or_path)), "")
    decoder = Decoder(pair, sampling, get_verifier(verifier), chooser)
    generator = torch.Generator(device=model.device).manual_seed(int(torch.randint(2**63 - 1, ())))
    tokens: list[int] = input_ids[0].tolist()
    accepted, actions = [], []
    if text_streamer is not None:
        text_streamer.put(input_ids.cpu())
    done = False
    with widened(model, draft), closing(decoder.steps(tokens, generator)) as steps:
        while not done:
            step, new = next(steps)
            accepted.append(step.accepted)
            actions.append(step.action)
            text = torch.tensor([tokens + new], device=input_ids.device)
            for token in new:
                tokens.append(token)
                if text_streamer is not None:
                    text_streamer.put(torch.tensor([token]))
                if done := bool(stopping_criteria(text[:, : len(tokens)], cast(Any, None)).all()):
                    break
    if text_streamer is not None:
        text_streamer.end()
    sequences = torch.tensor([tokens], device=input_ids.device)
    if generation_config.return_dict_in_generate:
        return SpeculativeOutput(sequences, tuple(accepted), tuple(actions))
    return sequences


def _check(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    generation_config: GenerationConfig,
    draft: PreTrainedModel | None,
    model_kwargs: dict[str, Any],
) -> PreTrainedModel:
    """The draft model; InputError where an argument is not supported."""
    if draft is None:
        raise InputError("draft_model: none was given")
    if generation_config.num_beams not in (None, 1):
        raise InputError("num_beams: speculative_generate samples, or takes the best token; it has no beams")
    if len(input_ids) != 1:
        raise InputError(f"{len(input_ids)} texts at once: speculative_generate continues one at a time")
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
    if mask is not None and not bool((mask == 1).all()):
        raise InputError("attention_mask: padded texts are not supported")
    if cache is not None and cache.get_seq_length() > 0:
        raise InputError("past_key_values: a text cannot be continued from a cache")
    for each in logits_processor:
        if not isinstance(each, OF_LOGITS_ALONE + OF_THE_TEXT):
            raise InputError(f"{type(each).__name__}: not known to follow from the text and the logits alone")
    sizes = [scored(each) for each in (model, draft)]
    if max(sizes) > PADDING * min(sizes):
        raise InputError(f"vocabularies differ: the target scores {sizes[0]} tokens, the draft {sizes[1]}")
    longest = int(generation_config.max_length or 0) + ActionSpace.default().depth
    for each in (model, draft):
        if _checked.get(each, 0) < longest:
            check_model(each, each.name_or_path or type(each).__name__, longest)
            _checked[each] = longest
    return draft


def _choice(selector: Any, sampling: Sampling) -> tuple[str, Chooser]:
    """The verifier's name, and the chooser of actions."""
    if isinstance(selector, str | Path):
        selector = load_selector(selector)
    if isinstance(selector, Selector):
        if selector.schema != PAIR:
            raise InputError("selector: trained on an engine's log; generate() needs one that was trained on a pair")
        return selector.verifier, selector.at(sampling.temperature, sampling.top_p)
    verifier = DEFAULT_VERIFIER
    if isinstance(selector, tuple) and len(selector) == 2:
        verifier, selector = selector
    try:
        space, action = ActionSpace.with_lookups(), choice_of(selector)
        return verifier, FixedTree(space.actions[space.index(action)])
    except (TypeError, ValueError) as error:
        raise InputError(
            "selector: neither a selector, nor its folder, nor a tree (K, L1, L2), nor a lookup (length,)"
        ) from error
