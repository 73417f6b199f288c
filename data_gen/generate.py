"""Speculative decoding inside transformers' own `generate()`, which keeps its arguments, checks and
stopping rules.

Logits processors (temperature, nucleus, penalties, minimum lengths, ..) are applied at every node
of the tree with the text before it, for draft and target. So the text follows the distribution of
`generate` with the same settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers.generation.logits_process as processors
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Chooser, FixedTree, Step
from data_gen.models.checkpoints import known_weights_of
from data_gen.models.pair import ModelPair, scored, widen
from data_gen.models.processed import OF_LOGITS_ALONE, Processed
from data_gen.models.self_check import check_once
from data_gen.timing import device_name
from data_gen.verification import get_verifier
from selector.actions import Action, ActionSpace
from selector.runtime.selector import Policy, Selector, load_selector
from selector.schema import PAIR, InputError

PADDING = 1.01  # the largest ratio of table sizes with one vocabulary, which differ by padding
DEFAULT_VERIFIER = "lifted_uniform"  # of a fixed tree
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
# Keys of `GenerationConfig` that may have any value. Other keys, also those of later versions, must
# not be set.
FREE = frozenset(
    (
        # carried out by stopping criteria
        "max_length",
        "max_new_tokens",
        "max_time",
        "stop_strings",
        "eos_token_id",
        # carried out by logits processors, which are checked by their type
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "min_length",
        "min_new_tokens",
        "exponential_decay_length_penalty",
        "bad_words_ids",
        "sequence_bias",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "renormalize_logits",
        "guidance_scale",
        "watermarking_config",
        # carried out on the prompt or here
        "token_healing",
        "num_return_sequences",
        "bos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "do_sample",
        "return_dict_in_generate",
        # change no token and no output
        "use_cache",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "transformers_version",
        # settings of beams and of assistants, which `generate` ignores without these
        "early_stopping",
        "length_penalty",
        "num_beam_groups",
        "diversity_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",
    )
)
ALLOWED = {  # values of keys that may have some only
    "num_beams": (1,),
    "cache_implementation": ("dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked"),
}
INPUTS = (  # that `generate` passes on
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
)


@dataclass
class SpeculativeOutput(ModelOutput):
    """For `return_dict_in_generate`.

    Attributes:
        sequences: prompt and new tokens, int64 [1, T].
        accepted: the number of accepted drafted tokens of every decoding step.
        actions: what was drafted in every step.
    """

    sequences: Tensor | None = None
    accepted: tuple[int, ...] | None = None
    actions: tuple[Action, ...] | None = None


def speculative_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: PreTrainedModel | None = None,
    selector: Selector | str | Path | Action | tuple[str, Action] | None = None,
    text_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The decoding loop for `generate(custom_generate=speculative_generate, ..)`; int64 [1, T],
    prompt and new tokens, or with `return_dict_in_generate` a `SpeculativeOutput`. InputError,
    which names it, for what cannot be honoured.

    Args:
        draft_model: with the target's vocabulary, on its device.
        selector: a loaded selector or its folder; or one action for all steps, a tree
            `(K, L1, L2)`, a greedy tree `(K, L1, L2, "greedy")`, or a lookup
            `(1, length, 0, "copy")`; or a pair of a verifier's name and an action.
        text_streamer: a streamer of transformers. `generate` passes on neither its `streamer` nor
            its `tokenizer`; stop strings can be given as a `StopStringCriteria`.
    """
    with ExitStack() as stack:
        if text_streamer is not None:
            stack.callback(text_streamer.end)
        _check_settings(input_ids, logits_processor, generation_config, model_kwargs)
        draft = _checked_draft(model, draft_model, int(generation_config.max_length or 0))
        names = str(model.name_or_path), str(draft.name_or_path)
        pair = ModelPair(model, draft, cast(Any, None), names, "")
        sampling = Processed.of(generation_config, logits_processor)
        verifier, chooser = _choice(selector, sampling, pair)
        if isinstance(chooser, Policy):
            sampling = replace(
                sampling, draft_temperature=chooser.setting.sampling.draft_temperature
            )
        decoder = Decoder(pair, sampling, get_verifier(verifier), chooser)
        seed = int(torch.randint(2**63 - 1, ()))
        generator = torch.Generator(device=model.device).manual_seed(seed)
        for hook in widen(model, pair.vocabulary) + widen(draft, pair.vocabulary):
            stack.enter_context(hook)
        steps = stack.enter_context(closing(decoder.steps(input_ids[0].tolist(), generator)))
        sequences, taken = _until_stopped(steps, input_ids, stopping_criteria, text_streamer)
    if not generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences,
        accepted=tuple(step.accepted for step in taken),
        actions=tuple(step.action for step in taken),
    )


def _until_stopped(
    steps: Iterator[tuple[Step, list[int]]],
    prompt_1T: Tensor,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> tuple[Tensor, list[Step]]:
    if streamer is not None:
        streamer.put(prompt_1T.cpu())
    text_1T = prompt_1T
    taken: list[Step] = []
    while True:
        step, new = next(steps)
        taken.append(step)
        begin = text_1T.shape[1]
        text_1T = torch.cat([text_1T, prompt_1T.new_tensor([new])], dim=-1)
        for end, token in enumerate(new, begin + 1):
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            try:
                done = bool(criteria(text_1T[:, :end], cast(Any, None)).all())
            except (TypeError, AttributeError) as error:
                raise InputError(
                    f"stopping_criteria: one fails; there are no scores for it ({error})"
                ) from error
            if done:
                return text_1T[:, :end], taken


def _check_settings(
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    for key in vars(GenerationConfig()):
        if key in FREE or key.startswith("_"):
            continue
        value = getattr(config, key, None)
        if value and value not in ALLOWED.get(key, ()):
            raise InputError(f"{key}={value}: speculative_generate does not support it")
    _check_inputs(input_ids, model_kwargs)
    for processor in logits_processor:
        if type(processor) not in OF_LOGITS_ALONE + OF_THE_TEXT:
            raise InputError(
                f"{type(processor).__name__}: not known to follow from the text and the logits "
                "alone"
            )


def _check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    for key, value in model_kwargs.items():
        if key not in INPUTS and value is not None and value is not False:
            raise InputError(
                f"{key}: speculative_generate passes nothing but token ids to the models"
            )
    if len(input_ids) != 1:
        raise InputError(
            f"{len(input_ids)} texts at once: speculative_generate continues one at a time"
        )
    text = input_ids[0].tolist()
    if not text:
        raise InputError("input_ids: the prompt holds no tokens")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise InputError("attention_mask: padded texts are not supported")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        from_0 = list(range(len(text)))
        if any(row != from_0 for row in positions.view(-1, positions.shape[-1]).tolist()):
            raise InputError("position_ids: positions must count from 0")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (
        type(cache) not in (DynamicCache, StaticCache) or cache.get_seq_length() > 0
    ):
        raise InputError(
            "past_key_values: the decoder has caches of its own; this one is filled, or of "
            "another kind"
        )


def _checked_draft(model: PreTrainedModel, draft: Any, max_length: int) -> PreTrainedModel:
    if draft is None:
        raise InputError("draft_model: none was given")
    if not isinstance(draft, torch.nn.Module):
        raise InputError(
            f"draft_model: {draft!r:.80} is not a model; AutoModelForCausalLM.from_pretrained "
            "loads one"
        )
    if draft.device != model.device:
        raise InputError(f"draft_model: it is on {draft.device}, and the target on {model.device}")
    models: tuple[Any, ...] = model, draft
    sizes = [scored(pair_model) for pair_model in models]
    if max(sizes) > PADDING * min(sizes):
        raise InputError(
            f"vocabularies differ: the target scores {sizes[0]} tokens, the draft {sizes[1]}"
        )
    longest = max_length - 1 + ActionSpace.of_pairs().deepest  # the last new token roots no tree
    for pair_model in models:
        check_once(pair_model, pair_model.name_or_path or type(pair_model).__name__, longest)
    return cast(PreTrainedModel, draft)


def _choice(selector: Any, sampling: Processed, pair: ModelPair) -> tuple[str, Chooser]:
    if isinstance(selector, str | Path):
        selector = load_selector(selector)
    if isinstance(selector, Selector):
        if selector.schema != PAIR:
            raise InputError(
                "selector: trained on an engine's log; generate() needs one that was trained on "
                "a pair"
            )
        device = device_name(str(pair.device), str(pair.target.dtype).removeprefix("torch."))
        weights = [known_weights_of(model) for model in (pair.target, pair.draft)]
        selector.check_pair(*pair.names, device, weights)
        policy = selector.at(
            sampling.temperature, sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
        )
        return selector.verifier, policy
    verifier = DEFAULT_VERIFIER
    if isinstance(selector, tuple) and len(selector) == 2:
        verifier, selector = selector
    try:
        space = ActionSpace.of_pairs()
        action = Action.of(selector)
        if not action.ranks:
            action = space.actions[space.index(action)]
    except (TypeError, ValueError) as error:
        raise InputError(
            "selector: neither a selector, its folder nor an action (K, L1, L2[, style])"
        ) from error
    return verifier, FixedTree(action)
