"""A pair of target and draft model, and a model with its KV cache.

Legend: W tokens of one pass, R cached rows beyond the committed ones, V vocabulary, D hidden width, A widths of several
layers' states together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from data_gen.models.checkpoints import RANDOM, fingerprint, load_model, positions, require_weights
from data_gen.models.distilled import is_distilled, load_draft
from data_gen.models.gguf import resolved
from data_gen.models.masks import TreeMasks
from data_gen.models.sampling import Sampling
from data_gen.models.vocabulary import scored, shared_tokenizer, widen
from selector.actions import ActionSpace
from selector.schema import InputError

ROLES = ("target", "draft")
FILL = 1024  # tokens of a pass over a prompt, which bounds the memory of its mask
STATES = ("keys", "values")  # of a cache layer, [1, heads, rows, head width] each
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelRow(NamedTuple):
    probs_V: Tensor
    logits_V: Tensor
    hidden_D: Tensor


class ModelRows(NamedTuple):
    """One model after N consecutive tokens; `probs_NV` are the sampled distributions."""

    probs_NV: Tensor
    logits_NV: Tensor
    hidden_ND: Tensor

    def each(self) -> Iterator[ModelRow]:
        return map(ModelRow, *self)


class Pass(NamedTuple):
    logits_WV: Tensor
    hidden_WD: Tensor  # after the last layer's norm

    def rows(self, sampling: Sampling, texts: Callable[[], list[list[int]]]) -> ModelRows:
        return ModelRows(sampling.after(texts, self.logits_WV), *self)


class CachedModel:
    """A causal language model and its KV cache over one context.

    The cache holds `committed` rows, which every later token sees, and after them the rows of a token tree. `keep`
    commits the accepted path and drops the other rows of the tree. Layers with a sliding window keep all rows, too, and
    the mask hides them, because a tree may still need them. For a head, the inputs of the given `layers` are recorded.
    """

    recomputes = False  # whether drafted tokens are passed again once they are accepted

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()) -> None:
        self.model, self.committed, self.cache = model, 0, DynamicCache()
        self._layers_read, self._passed_WA = list(layers), torch.zeros(0)
        self._states: list[Tensor] = []  # of committed tokens that no head has taken yet, [tokens, A] each
        self._masks = TreeMasks(model.config)
        self._offsets: list[Tensor] = []  # of the tree's rows, [W] of each pass
        self._finite = torch.ones((), dtype=torch.bool, device=model.device)

    @torch.inference_mode()
    def forward(self, tokens_W: Tensor, offsets_W: Tensor, visible_WR: Tensor, last: int = 0) -> Pass:
        """One pass over W tokens of a tree, int64; their rows are appended to the cache. `last` is the number of last
        tokens whose logits are returned, 0 for all.

        Positions are int64 offsets from the end of the committed tokens. Every token attends to all committed rows, and
        to the tree's rows, itself included, that are true in `visible_WR`.
        """
        device = self.model.device
        self._offsets.append(offsets_W.to(device))
        given: list[Tensor] = []  # the input of the output layer: no other hidden state is stored
        head = self.model.get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0])):
            output = self.model(
                tokens_W.to(device).unsqueeze(0),
                attention_mask=self._masks.build(visible_WR, self._offsets, self.committed, self.model.dtype),
                position_ids=(self._offsets[-1] + self.committed).unsqueeze(0),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=last,
                output_hidden_states=bool(self._layers_read),
            )
        if self._layers_read:
            seen = [output.hidden_states[number][0].to(device) for number in self._layers_read]
            self._passed_WA = torch.cat(seen, dim=-1)
        logits_WV = output.logits[0].to(device)  # a model that is spread over devices may end on another one
        self._finite = self._finite & logits_WV.amax(-1).isfinite().all()
        return Pass(logits_WV, given[0][0].to(device))

    def take_states(self, count: int) -> Tensor:
        """The recorded states of the next committed tokens, [count, A]; each token's are given once."""
        states_TA = torch.cat(self._states)
        assert len(states_TA) >= count
        self._states = [states_TA[count:]]
        return states_TA[:count]

    def extend(self, tokens: Sequence[int], last: int = 0) -> Pass:
        """One causal pass over consecutive tokens, which are committed at once; `last` as in `forward`."""
        count = len(tokens)
        causal = torch.ones(count, count, dtype=torch.bool).tril_()
        result = self.forward(torch.tensor(list(tokens)), torch.arange(count), causal, last)
        self.keep(range(count))
        return result

    def fill(self, tokens: Sequence[int]) -> None:
        """Commit consecutive tokens without returning logits, in passes of at most `FILL` tokens."""
        for begin in range(0, len(tokens), FILL):
            self.extend(tokens[begin : begin + FILL], last=1)

    def check(self) -> None:
        """InputError, which names the model, where a logit so far was NaN or plus infinity; on a GPU this is a host
        synchronisation."""
        if not bool(self._finite):
            raise InputError(
                f"{self.model.name_or_path}: the model gives numbers that are not finite (NaN or infinity)"
            )

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Commit the given tree rows (ascending; 0 is the first row of the tree) and drop all other tree rows."""
        kept = self.committed + len(path)
        if self._layers_read and path:
            self._states.append(self._passed_WA[list(path)])
        in_place = list(path) == list(range(len(path)))
        if not in_place or len(path) < sum(map(len, self._offsets)):
            source = torch.tensor(path, dtype=torch.int64) + self.committed
            cached: list[Any] = self.cache.layers
            layers = [layer for layer in cached if layer.is_initialized]
            sources = {device: source.to(device) for device in {layer.keys.device for layer in layers}}
            for layer in layers:
                for name in STATES:
                    rows = getattr(layer, name)
                    if not in_place:
                        rows[:, :, self.committed : kept] = rows[:, :, sources[rows.device]]
                    setattr(layer, name, rows[:, :, :kept])
        self.committed, self._offsets = kept, []


@dataclass
class ModelPair:
    """A target, a draft or a head (`data_gen.models.heads`) over the same vocabulary, and their tokenizer."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, str]
    fingerprint: str  # of both models; begins with `checkpoints.RANDOM` if one is a shape
    decoder: str = "eager"  # the kind of `decoding.decoder_for`
    spare: dict[Hashable, list[Any]] = field(default_factory=dict, init=False)  # graph decoders' memory without a text

    @classmethod
    def load(
        cls,
        target: str,
        draft: str,
        device: str = "auto",
        dtype: str = "float32",
        device_map: str | None = None,
        shapes: bool = False,
        checksums: Path | None = None,
    ) -> ModelPair:
        """Load from Hugging Face directories, hub ids or GGUF files, or by the name `smollm2` (`gguf.resolved`).
        InputError where a model cannot be read or cannot pass token trees, or where the vocabularies differ.

        Args:
            device: a torch device; "auto" takes a GPU if there is one.
            dtype: a key of `DTYPES`.
            device_map: how transformers spreads the target over devices; the draft is on the target's first one.
            shapes: whether a config without weights is accepted, with random weights.
            checksums: `kept` of `checkpoints.fingerprint`.
        """
        device = resolve_device(device)
        names = target, draft = resolved(target, "target"), resolved(draft, "draft")
        for name, role in zip(names, ROLES, strict=True):
            if not shapes:
                require_weights(name, role)
        tokenizer = shared_tokenizer(target, draft)
        target_model = load_model(target, "target", DTYPES[dtype], device, device_map)
        if is_distilled(draft):
            draft_model = load_draft(draft, target_model)
        else:
            draft_model = load_model(draft, "draft", DTYPES[dtype], target_model.device)
        models = target_model, draft_model
        size = max(map(scored, models))
        for model in models:
            widen(model, size)
            model.config.get_text_config().vocab_size = size
        found = fingerprint(names, tokenizer, eos_ids(target_model), checksums)
        return cls(*models, tokenizer, names, found)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def has_random_weights(self) -> bool:
        """Whether a model is a shape: its times are real, its text is meaningless."""
        return self.fingerprint.startswith(RANDOM)

    @property
    def has_head(self) -> bool:
        return is_head(self.draft)

    @property
    def trees(self) -> ActionSpace:
        """Those that the draft can draft: a head drafts chains alone."""
        return replace(ActionSpace.default(), max_K=1) if self.has_head else ActionSpace.recorded()

    @property
    def max_positions(self) -> int:
        """The longest context that both models take; InputError where a config does not say it."""
        models = (self.target,) if self.has_head else (self.target, self.draft)
        return min(positions(model.config, name) for model, name in zip(models, self.names, strict=False))

    @property
    def vocabulary(self) -> int:
        return max(scored(self.target), scored(self.draft))

    @property
    def eos_ids(self) -> frozenset[int]:
        return eos_ids(self.target)


def is_head(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "speculators_model_type")


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


@contextmanager
def without_own_settings(*models: PreTrainedModel) -> Iterator[None]:
    """Inside the context, the models have empty generation configs: `generate` would take settings from a checkpoint's
    config, such as penalties, which change the law of the text."""
    own = [model.generation_config for model in models]
    for model in models:
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for model, config in zip(models, own, strict=True):
            model.generation_config = config


def resolve_device(device: str) -> str:
    """The torch device that is meant: "auto" takes a GPU where there is one. InputError unless torch has it here."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"pair.device: {device} is not available here") from error
    return device
