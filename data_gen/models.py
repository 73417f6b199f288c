"""A target/draft pair: loading, checks, and the one place that knows masks, positions and the cache's layout.

Legend: B sequences, W tokens of one pass, R cached rows beyond the committed ones, V vocabulary, D hidden width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from selector.schema import InputError

STATES = ("keys", "values")  # of a cache layer, [B, heads, rows, head width] each
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Pass(NamedTuple):
    """What one forward pass yields."""

    logits_BWV: Tensor
    hidden_BWD: Tensor  # after the last layer's norm


class CachedModel:
    """A causal language model and its KV cache over one context.

    The cache holds `committed` rows, which every later token sees, and after them the rows of a token tree that is
    being drafted or verified. `keep` commits the accepted path and drops the rest of the tree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: DynamicCache | None = None,
        committed: int = 0,
    ) -> None:
        self.model = model
        self.cache = cache if cache is not None else DynamicCache(config=model.config)
        self.committed = committed
        self.rows = 0  # cached beyond the committed ones
        self._finite = torch.ones((), dtype=torch.bool, device=model.device)

    @torch.inference_mode()
    def forward(self, tokens_BW: Tensor, offsets_W: Tensor, visible: Tensor) -> Pass:
        """One pass over W tokens of a tree; their rows are appended to the cache.

        Args:
            tokens_BW: int64.
            offsets_W: int64 positions counted from the first token after the committed ones; [W] or [B, W].
            visible: bool [W, R + W] or [B, W, R + W]: which tree rows each token attends to (itself included).
                Committed rows are visible to all.
        """
        batch, width = tokens_BW.shape
        mask = self._mask(visible, width)
        positions = (offsets_W + self.committed).expand(batch, width)
        output = self.model(
            tokens_BW,
            attention_mask=mask.expand(batch, -1, -1, -1),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=True,
        )
        self.rows += width
        device = self.model.device  # a model that is spread over devices may end on another one
        logits_BWV = output.logits.to(device)
        self._finite = self._finite & logits_BWV.amax(-1).isfinite().all()
        return Pass(logits_BWV, output.hidden_states[-1].to(device))

    def _mask(self, visible: Tensor, width: int) -> Tensor:
        """Additive float mask, [1 or B, 1, W, committed + R + W]."""
        if visible.dim() == 2:
            visible = visible.unsqueeze(0)
        dtype = self.model.dtype
        mask = torch.zeros(visible.shape[0], 1, width, self.committed + visible.shape[-1], dtype=dtype)
        mask[:, 0, :, self.committed :].masked_fill_(~visible, torch.finfo(dtype).min)
        return mask.to(self.model.device)

    def extend(self, tokens: Sequence[int]) -> Pass:
        """One causal pass over a run of tokens, which are committed at once."""
        count = len(tokens)
        device = self.model.device
        result = self.forward(
            torch.tensor([list(tokens)], device=device), torch.arange(count, device=device), _causal(count)
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
        if list(path) != list(range(len(path))):
            source = torch.tensor(path) + self.committed
        else:
            source = None  # already in place
        if source is not None or len(path) < self.rows:
            for layer in self.cache.layers:
                for name in STATES:
                    rows = getattr(layer, name)
                    if source is not None:
                        rows[:, :, self.committed : kept] = rows[:, :, source.to(rows.device)]
                    setattr(layer, name, rows[:, :, :kept])
        self.committed, self.rows = kept, 0

    @torch.inference_mode()
    def prefix(self, length: int, batch: int = 1) -> CachedModel:
        """The same model on the first `length` committed tokens, for `batch` sequences at once.

        The prefix is copied from this cache, not passed again.
        """
        return CachedModel(self.model, self._view(length, batch), length)

    def _view(self, length: int, batch: int) -> DynamicCache:
        view = DynamicCache(config=self.model.config)
        for index, layer in enumerate(self.cache.layers):
            keys, values = (getattr(layer, name)[:, :, :length].expand(batch, -1, -1, -1) for name in STATES)
            view.update(keys, values, index)
        return view


def _causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril_()


@dataclass
class ModelPair:
    """A target and a draft model over one vocabulary, and their tokenizer."""

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
        """Load from Hugging Face directories or hub ids.

        Args:
            device: "auto" takes a GPU where there is one; otherwise a torch device.
            dtype: a key of `DTYPES`.
            device_map: how transformers spreads the target over devices ("auto", "balanced", ..); the draft then
                stands where the target begins. None keeps it on `device`.

        Raises:
            InputError: a model is missing or not readable, or the vocabularies differ.
        """
        check_device(device)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        roles = {"target": target, "draft": draft}
        tokenizers = [_load(AutoTokenizer, name, role) for role, name in roles.items()]
        check_same_vocabulary(tokenizers[0], tokenizers[1], (target, draft))
        target_model = _spread(target, DTYPES[dtype], device_map) if device_map else None
        if target_model is None:
            target_model = _load(AutoModelForCausalLM, target, "target", dtype=DTYPES[dtype]).to(device)
        draft_model = _load(AutoModelForCausalLM, draft, "draft", dtype=DTYPES[dtype]).to(target_model.device)
        for model in (target_model, draft_model):
            model.eval()
        sizes = [model.get_output_embeddings().weight.shape[0] for model in (target_model, draft_model)]
        if sizes[0] != sizes[1]:
            raise InputError(f"vocabularies differ: {target} scores {sizes[0]} tokens, {draft} {sizes[1]}")
        for model, name in ((target_model, target), (draft_model, draft)):
            if any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=model.config).layers):
                raise InputError(f"{name}: sliding-window attention is not supported yet")
        identity = fingerprint(target_model, draft_model, tokenizers[0])
        return cls(target_model, draft_model, tokenizers[0], (target, draft), identity)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def max_positions(self) -> int:
        """The longest context that both models take."""
        return min(getattr(model.config, "max_position_embeddings", 2**31) for model in (self.target, self.draft))

    @property
    def vocabulary(self) -> int:
        """How many tokens both models score."""
        return int(self.target.get_output_embeddings().weight.shape[0])

    @property
    def eos_ids(self) -> frozenset[int]:
        eos = self.target.generation_config.eos_token_id
        return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


def _spread(target: str, dtype: torch.dtype, device_map: str) -> PreTrainedModel:
    """The target over several devices; InputError where accelerate is missing."""
    if find_spec("accelerate") is None:
        raise InputError("pair.device_map: accelerate is not installed: pip install 'espalier[large]'")
    model = _load(AutoModelForCausalLM, target, "target", dtype=dtype, device_map=device_map)
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if torch.cuda.is_available() and places & {"cpu", "disk"}:
        raise InputError(
            f"pair.device_map: {target} does not fit these devices: {device_map} leaves part of it off them"
        )
    return model


def _load(loader: Any, name: str, role: str, **kwargs: object) -> Any:
    path = Path(name)
    if not path.is_dir() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise InputError(f"pair.{role}: {name} is neither a directory nor a hub id")
    try:
        return loader.from_pretrained(name, **kwargs)
    except Exception as error:  # whatever a damaged file makes the libraries raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"pair.{role}: cannot load {name}: {reason}") from error


def hidden_width(name: str, role: str) -> int:
    """A model's hidden width, without its weights; InputError where its config cannot be read."""
    return int(_load(AutoConfig, name, role).get_text_config().hidden_size)


def check_device(device: str) -> None:
    """InputError unless torch has the device here."""
    try:
        torch.empty(0, device="cpu" if device == "auto" else device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"pair.device: {device} is not available here") from error


def check_same_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, names: tuple[str, str]
) -> None:
    """InputError unless both tokenizers map the same strings to the same ids."""
    target_vocabulary, draft_vocabulary = target.get_vocab(), draft.get_vocab()
    if target_vocabulary != draft_vocabulary:
        differing = target_vocabulary.items() ^ draft_vocabulary.items()
        example = min(token for token, _ in differing)
        raise InputError(
            f"vocabularies differ: {names[0]} has {len(target_vocabulary)} tokens, {names[1]} "
            f"{len(draft_vocabulary)}; {example!r}, for one, is not the same in both"
        )


def fingerprint(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of both models' configs and weights and of the tokenizer; 16 hex digits."""
    digest = hashlib.sha256()
    for model in (target, draft):
        config = {key: value for key, value in model.config.to_diff_dict().items() if key != "transformers_version"}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))).encode())
    return digest.hexdigest()[:16]
