"""A pair of target and draft model, and a model with its KV cache.

The models share a vocabulary. The padding of their tables may differ within a family: Qwen2.5 has
151,936 rows in its small models and 152,064 in its large ones. The shorter table is filled up with
tokens of probability 0.

Legend: W tokens of one forward pass, R cached rows beyond the committed ones, V vocabulary, D
    hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from data_gen.models.checkpoints import (
    eos_ids,
    fingerprint,
    load_model,
    load_target,
    load_tokenizer,
    positions,
)
from data_gen.models.distilled import ReducedHead, is_distilled, load_draft
from data_gen.models.gguf import resolved
from data_gen.models.masks import TreeMasks
from data_gen.models.prepack import PrepackedLinear, prepack
from data_gen.models.processed import Processed
from data_gen.models.rows import ModelRows
from data_gen.models.sampling import Sampling, probabilities
from selector.schema import InputError

FILL = 1024  # tokens of a forward pass over a prompt, which bounds the memory of its mask
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pass(NamedTuple):
    """What a forward pass over W tokens returns."""

    logits_WV: Tensor
    hidden_WD: Tensor  # after the last layer's norm

    def rows(self, sampling: Sampling, texts: Callable[[], list[list[int]]]) -> ModelRows:
        """The pass with its distributions; `texts` returns the text up to each token."""
        if isinstance(sampling, Processed):
            return ModelRows(sampling.after(texts, self.logits_WV), *self)
        return ModelRows(probabilities(self.logits_WV, sampling), *self)


class CachedModel:
    """A causal language model and its KV cache over one context.

    The cache holds `committed` rows, which every later token sees, and after them the rows of a
    token tree. `keep` commits the accepted path and drops the other rows of the tree. Layers with a
    sliding window keep all rows, too, and the mask hides them, because a tree may still need them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.committed = 0
        self.cache = DynamicCache()
        self._masks = TreeMasks(model.config)
        self._offsets: list[Tensor] = []  # of the tree's rows, [W] of each forward pass
        self._finite = torch.ones((), dtype=torch.bool, device=model.device)

    @torch.inference_mode()
    def forward(
        self, tokens_W: Tensor, offsets_W: Tensor, visible_WR: Tensor, last: int = 0
    ) -> Pass:
        """A forward pass over W tokens of a tree; their rows are appended to the cache. Every token
        attends to all committed rows, and to the tree's rows that `visible_WR` says.

        Args:
            tokens_W: int64.
            offsets_W: their positions, counted from the end of the committed tokens; int64.
            visible_WR: which of the tree's R rows, these W tokens included, each attends to; bool.
            last: the number of last tokens whose logits are returned, 0 for all.
        """
        device = self.model.device
        self._offsets.append(offsets_W.to(device))
        hidden: list[Tensor] = []  # the input of the output layer: no other hidden state is stored
        head = self.model.get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0])):
            masks = self._masks.build(visible_WR, self._offsets, self.committed, self.model.dtype)
            positions_W = self._offsets[-1] + self.committed
            output = self.model(
                tokens_W.to(device).unsqueeze(0),
                attention_mask=masks,
                position_ids=positions_W.unsqueeze(0),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=last,
            )
        # a model that is spread over devices may end on another one
        logits_WV = output.logits[0].to(device)
        self._finite = self._finite & logits_WV.amax(-1).isfinite().all()
        return Pass(logits_WV, hidden[0][0].to(device))

    def extend(self, tokens: Sequence[int], last: int = 0) -> Pass:
        """One causal forward pass over consecutive tokens, which are committed at once; `last` as
        in `forward`."""
        count = len(tokens)
        causal = torch.ones(count, count, dtype=torch.bool).tril_()
        result = self.forward(torch.tensor(list(tokens)), torch.arange(count), causal, last)
        self.keep(range(count))
        return result

    def fill(self, tokens: Sequence[int]) -> None:
        """Commit consecutive tokens without returning logits, in forward passes over at most `FILL`
        tokens."""
        for begin in range(0, len(tokens), FILL):
            self.extend(tokens[begin : begin + FILL], last=1)

    def check(self) -> None:
        """InputError, which names the model, where a logit so far was NaN or plus infinity. It
        waits for a GPU."""
        if not bool(self._finite):
            name = self.model.name_or_path
            raise InputError(
                f"{name}: the model gives numbers that are not finite (NaN or infinity)"
            )

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Commit the given tree rows (ascending; 0 is the first row of the tree) and drop all other
        tree rows."""
        kept = self.committed + len(path)
        in_place = list(path) == list(range(len(path)))
        if not in_place or len(path) < sum(map(len, self._offsets)):
            kept_rows = torch.tensor(path, dtype=torch.int64) + self.committed
            cached: list[Any] = self.cache.layers
            layers = [layer for layer in cached if layer.is_initialized]
            devices = {layer.keys.device for layer in layers}
            kept_rows_on = {device: kept_rows.to(device) for device in devices}
            for layer in layers:
                for name in ("keys", "values"):  # [1, heads, rows, head width] each
                    rows = getattr(layer, name)
                    if not in_place:
                        rows[:, :, self.committed : kept] = rows[:, :, kept_rows_on[rows.device]]
                    setattr(layer, name, rows[:, :, :kept])
        self.committed = kept
        self._offsets = []


@dataclass
class ModelPair:
    """A target and a draft over the same vocabulary, and their tokenizer.

    Attributes:
        names: of target and draft: folders or hub ids.
        fingerprint: a hash of both models and the tokenizer, 16 hex digits.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, str]
    fingerprint: str

    @classmethod
    def load(
        cls,
        target: str,
        draft: str,
        device: str = "auto",
        dtype: str = "float32",
        device_map: str | None = None,
    ) -> ModelPair:
        """Load from Hugging Face directories, hub ids or GGUF files, or by the name `smollm2`
        (`gguf.resolved`). InputError where a model cannot be read or cannot process token trees, or
        where the vocabularies differ.

        Args:
            device: a torch device; "auto" takes a GPU if there is one.
            dtype: a key of `DTYPES`.
            device_map: how transformers spreads the target over devices; the draft is on the
                target's first one.
        """
        device = resolve_device(device)
        target = resolved(target, "target")
        draft = resolved(draft, "draft")
        tokenizer = shared_tokenizer(target, draft)
        target_model = load_target(target, tokenizer, DTYPES[dtype], device, device_map)
        if is_distilled(draft):
            draft_model = load_draft(draft, target_model)
        else:
            draft_model = load_model(draft, "draft", DTYPES[dtype], target_model.device)
        models = target_model, draft_model
        size = max(map(scored, models))
        for model in models:
            widen(model, size)
            model.config.get_text_config().vocab_size = size
        digest = fingerprint(models, tokenizer, eos_ids(target_model))
        pair = cls(target_model, draft_model, tokenizer, (target, draft), digest)
        for model in models:
            prepack(model)
        return pair

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def max_positions(self) -> int:
        """The longest context that both models take; InputError where a config does not say it."""
        return min(
            positions(self.target.config, self.names[0]),
            positions(self.draft.config, self.names[1]),
        )

    @property
    def vocabulary(self) -> int:
        """Tokens that either model scores."""
        return max(scored(self.target), scored(self.draft))

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text, by the target's generation config and tokenizer."""
        return eos_ids(self.target)


@contextmanager
def without_own_settings(*models: PreTrainedModel) -> Iterator[None]:
    """Inside the context, the models have empty generation configs: `generate` would take settings
    from a checkpoint's config, such as penalties, which change the law of the text."""
    configs = [model.generation_config for model in models]
    for model in models:
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for model, config in zip(models, configs, strict=True):
            model.generation_config = config


def resolve_device(device: str) -> str:
    """The torch device that is meant: "auto" takes a GPU where there is one. InputError unless
    torch has it here, with float64, in which verifiers sum."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"pair.device: {device} is not available here") from error
    except TypeError as error:
        raise InputError(
            f"pair.device: {device} has no float64, in which verifiers sum: take cpu"
        ) from error
    return device


def scored(model: Any) -> int:
    """The number of tokens that a model scores: the rows of its output table, unless it can say
    some tokens alone."""
    table = model.get_output_embeddings()
    if isinstance(table, ReducedHead | PrepackedLinear):
        return table.out_features
    return int(table.weight.shape[0])


def shared_tokenizer(target: str, draft: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a pair, by its names; a distilled draft has none of its own. InputError
    where one cannot be read, or maps other strings to the same ids: it names the first id that
    differs."""
    tokenizer = load_tokenizer(target, "target")
    vocabulary = tokenizer.get_vocab()
    if is_distilled(draft):
        return tokenizer
    draft_vocabulary = load_tokenizer(draft, "draft").get_vocab()
    if draft_vocabulary != vocabulary:
        first = min(number for _, number in vocabulary.items() ^ draft_vocabulary.items())
        raise InputError(
            f"vocabularies differ: {target} has {len(vocabulary)} tokens, {draft} "
            f"{len(draft_vocabulary)}; the first that differs is token {first}: "
            f"{_token(vocabulary, first)} and {_token(draft_vocabulary, first)}"
        )
    return tokenizer


def _token(vocabulary: dict[str, int], number: int) -> str:
    """The last token with this id, quoted; "none" where there is none."""
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    return repr(tokens[number]) if number in tokens else "none"


def widen(model: Any, size: int) -> list[RemovableHandle]:
    """Let a model score `size` tokens, minus infinity for those beyond its table. As an input, such
    a token is read as the table's last one. The returned hooks, which are context managers, undo
    it."""
    if size <= scored(model):
        return []
    rows = int(model.get_input_embeddings().weight.shape[0])

    def within(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].clamp(max=rows - 1), *inputs[1:])

    def fill_up(_: Any, inputs: Any, output: Any) -> Any:
        missing = size - output.logits.shape[-1]  # 0 where another hook has filled it up
        output.logits = pad(output.logits, (0, missing), value=float("-inf"))
        return output

    return [
        model.get_input_embeddings().register_forward_pre_hook(within),
        model.register_forward_hook(fill_up),
    ]
