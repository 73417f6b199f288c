"""A target/draft pair, and the one place that knows a cache's layout and the positions in it.

Legend: B sequences, W tokens of one pass, R cached rows beyond the committed ones, V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from data_gen.models.checkpoints import RANDOM, fingerprint, is_shape, load_model, load_tokenizer, positions
from data_gen.models.masks import TreeMasks
from data_gen.models.vocabulary import check_same_vocabulary, scored, widen
from selector.schema import InputError

ROLES = ("target", "draft")
FILL = 1024  # tokens of a pass whose logits nobody asks for: so many, and memory does not grow with the prompt's square
STATES = ("keys", "values")  # of a cache layer, [B, heads, rows, head width] each
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Pass(NamedTuple):
    """What one forward pass yields."""

    logits_BWV: Tensor
    hidden_BWD: Tensor  # after the last layer's norm


class ModelRows(NamedTuple):
    """One model after some consecutive tokens; `probs_NV` are what is sampled from."""

    probs_NV: Tensor
    logits_NV: Tensor
    hidden_ND: Tensor


class ModelRow(NamedTuple):
    """One model after one token."""

    probs_V: Tensor
    logits_V: Tensor
    hidden_D: Tensor


class CachedModel:
    """A causal language model and its KV cache over one context.

    The cache holds `committed` rows, which every later token sees, and after them the rows of a token tree that is
    being drafted or verified. `keep` commits the accepted path and drops the rest of the tree. No layer drops rows of
    its own, those with a sliding window neither: a tree may still need them, and the mask hides them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: DynamicCache | None = None,
        committed: int = 0,
    ) -> None:
        self.model = model
        self.cache = cache if cache is not None else DynamicCache()
        self.committed = committed
        self._masks = TreeMasks(model.config)
        self._offsets: list[Tensor] = []  # of the tree's rows, [1 or B, W] of each pass
        self._finite = torch.ones((), dtype=torch.bool, device=model.device)

    @torch.inference_mode()
    def forward(self, tokens_BW: Tensor, offsets_W: Tensor, visible: Tensor, last: int = 0) -> Pass:
        """One pass over W tokens of a tree; their rows are appended to the cache.

        Args:
            tokens_BW: int64.
            offsets_W: int64 positions counted from the first token after the committed ones; [W] or [B, W].
            visible: bool [W, R + W] or [B, W, R + W]: which tree rows each token attends to (itself included).
                Committed rows are visible to all.
            last: of how many last tokens logits are wanted; 0 for all of them.
        """
        batch, width = tokens_BW.shape
        device = self.model.device
        self._offsets.append(offsets_W.to(device).view(-1, width))
        masks = self._masks.build(visible, self._offsets, self.committed, self.model.dtype)
        output, hidden_BWD = self._passed(
            tokens_BW,
            attention_mask=_expanded(masks, batch),
            position_ids=(self._offsets[-1] + self.committed).expand(batch, width),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=last,
        )
        logits_BWV = output.logits.to(device)  # a model that is spread over devices may end on another one
        self._finite = self._finite & logits_BWV.amax(-1).isfinite().all()
        return Pass(logits_BWV, hidden_BWD.to(device))

    def _passed(self, tokens_BW: Tensor, **kwargs: Any) -> tuple[Any, Tensor]:
        """The model's output, and what its output layer was given: no other hidden state is kept."""
        given: list[Tensor] = []
        head = self.model.get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0])):
            output = self.model(tokens_BW, **kwargs)
        return output, given[0]

    @property
    def rows(self) -> int:
        """Cached beyond the committed ones."""
        return sum(offsets.shape[1] for offsets in self._offsets)

    def extend(self, tokens: Sequence[int]) -> Pass:
        """One causal pass over a run of tokens, which are committed at once."""
        return self._extend(tokens, last=0)

    def fill(self, tokens: Sequence[int]) -> None:
        """Commit a run of tokens whose logits nobody asks for, such as a prompt, in passes of bounded width."""
        for begin in range(0, len(tokens), FILL):
            self._extend(tokens[begin : begin + FILL], last=1)

    def _extend(self, tokens: Sequence[int], last: int) -> Pass:
        count = len(tokens)
        device = self.model.device
        result = self.forward(
            torch.tensor([list(tokens)], device=device), torch.arange(count, device=device), _causal(count), last
        )
        self.keep(range(count))
        return result

    def check(self) -> None:
        """Look at what all passes have given; on a GPU this waits for them, so it is not done after each.

        Raises:
            InputError: something was NaN or plus infinity; names the model.
        """
        if not bool(self._finite):
            name = self.model.name_or_path
            raise InputError(f"{name}: the model gives numbers that are not finite (NaN or infinity)")

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """Commit the given tree rows (ascending, 0 is the first row of the tree) and drop all other tree rows."""
        kept = self.committed + len(path)
        in_place = list(path) == list(range(len(path)))
        if not in_place or len(path) < self.rows:
            source = torch.tensor(path, dtype=torch.int64) + self.committed
            layers = self._layers().values()
            sources = {device: source.to(device) for device in {layer.keys.device for layer in layers}}
            for layer in layers:
                for name in STATES:
                    rows = getattr(layer, name)
                    if not in_place:
                        rows[:, :, self.committed : kept] = rows[:, :, sources[rows.device]]
                    setattr(layer, name, rows[:, :, :kept])
        self.committed, self._offsets = kept, []

    def _layers(self) -> dict[int, Any]:
        """The cache's layers that hold rows, by number: some models' share those of others."""
        layers: list[Any] = self.cache.layers
        return {number: layer for number, layer in enumerate(layers) if layer.is_initialized}

    @torch.inference_mode()
    def prefix(self, length: int, batch: int = 1) -> CachedModel:
        """The same model on the first `length` committed tokens, for `batch` sequences at once.

        The prefix is copied from this cache, not passed again.
        """
        return CachedModel(self.model, self._view(length, batch), length)

    def _view(self, length: int, batch: int) -> DynamicCache:
        view = DynamicCache()
        for number, layer in self._layers().items():
            keys, values = (getattr(layer, name)[:, :, :length].expand(batch, -1, -1, -1) for name in STATES)
            view.update(keys, values, number)
        return view


def _expanded(masks: Tensor | dict[str, Tensor], batch: int) -> Any:
    if isinstance(masks, dict):
        return {kind: mask.expand(batch, -1, -1, -1) for kind, mask in masks.items()}
    return masks.expand(batch, -1, -1, -1)


def _causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril_()


@dataclass
class ModelPair:
    """A target and a draft model over one vocabulary, and their tokenizer.

    Attributes:
        fingerprint: of both; begins with `checkpoints.RANDOM` where a model has no weights of its own.
        decoder: the kind that `decoding.decoder_for` makes, of `decoding.KINDS`.
        spare: the memory of graph decoders that no text uses at the moment.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, str]
    fingerprint: str
    decoder: str = "eager"
    spare: dict[Hashable, list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        """Load from Hugging Face directories or hub ids.

        Args:
            device: "auto" takes a GPU where there is one; otherwise a torch device.
            dtype: a key of `DTYPES`.
            device_map: how transformers spreads the target over devices ("auto", "balanced", ..); the draft then
                stands where the target begins. None keeps it on `device`.
            shapes: whether a config without weights will do; they are then random.
            checksums: as `kept` of `checkpoints.fingerprint`.

        Raises:
            InputError: a model is missing or not readable, cannot be passed over token trees, or the vocabularies
                differ.
        """
        check_device(device)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        names = target, draft
        for name, role in zip(names, ROLES, strict=True):
            if not shapes and is_shape(name):
                raise InputError(f"pair.{role}: {name} holds a config and no weights: only times can be measured")
        tokenizers = [load_tokenizer(name, role) for name, role in zip(names, ROLES, strict=True)]
        check_same_vocabulary(tokenizers[0], tokenizers[1], names)
        target_model = load_model(target, "target", DTYPES[dtype], device, device_map)
        draft_model = load_model(draft, "draft", DTYPES[dtype], target_model.device)
        models = target_model, draft_model
        size = max(map(scored, models))
        for model in models:
            widen(model, size)
            model.config.get_text_config().vocab_size = size
        return cls(*models, tokenizers[0], names, fingerprint(names, tokenizers[0], checksums))

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def has_random_weights(self) -> bool:
        """Whether a model is a shape without weights: times are real, and nothing else is."""
        return self.fingerprint.startswith(RANDOM)

    @property
    def max_positions(self) -> int:
        """The longest context that both models take; InputError where a config does not say."""
        models = self.target, self.draft
        return min(positions(model.config, name) for model, name in zip(models, self.names, strict=True))

    @property
    def vocabulary(self) -> int:
        """How many tokens both models score."""
        return max(scored(self.target), scored(self.draft))

    @property
    def eos_ids(self) -> frozenset[int]:
        eos = self.target.generation_config.eos_token_id
        return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


@contextmanager
def without_own_settings(*models: PreTrainedModel) -> Iterator[None]:
    """Without the checkpoints' generation configs, from which `generate` fills in whatever its caller leaves open.

    They may hold penalties and the like, and then a text would follow another law than the models' own.
    """
    own = [model.generation_config for model in models]
    for model in models:
        model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for model, config in zip(models, own, strict=True):
            model.generation_config = config


def check_device(device: str) -> None:
    """InputError unless torch has the device here."""
    try:
        torch.empty(0, device="cpu" if device == "auto" else device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"pair.device: {device} is not available here") from error
