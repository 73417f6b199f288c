"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840) in the format of the `speculators` library (the extra `heads`).

A head's first pass at a root reads the root token together with the target's states at the token before, which the last
step has left behind. Each further pass reads a drafted token together with the head's own state before it. So the
draft's distribution depends on the root and on the depth below it, and not on the text alone.

Legend: W tokens of a pass, T tokens, B roots, D depths or hidden width, A widths of the target's states together, C
cached rows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from data_gen.models.checkpoints import CONFIG, fingerprint, load_model, load_tokenizer, require_weights, text_config
from data_gen.models.gguf import resolved
from data_gen.models.pair import DTYPES, STATES, CachedModel, ModelPair, Pass, eos_ids, resolve_device
from data_gen.models.sampling import Sampling
from data_gen.models.self_check import TOLERANCES
from data_gen.models.vocabulary import scored
from selector.files import first_line
from selector.schema import InputError

EAGLE3 = "eagle3"
CHECKED_TEXT, CHECKED_DEPTH = 24, 4  # tokens of the self-check
ROOTS = 256  # whose chains are passed at once, which bounds the memory of the mask


class CachedHead(CachedModel):
    """A head and its KV cache over one text.

    The cache holds a row for every committed token but the first, each computed from the states of `target`, the same
    text's. Rows of drafted tokens are always dropped, because an accepted token is passed again.
    """

    recomputes = True

    def __init__(self, head: Any, target: CachedModel) -> None:
        super().__init__(head)
        self.head, self.target = head, target
        self._state_WD = torch.zeros(0)  # after the last pass

    def extend(self, tokens: Sequence[int], last: int = 0) -> Pass:
        """One causal pass over consecutive tokens, which are committed at once; without a row for a text's first."""
        read = list(tokens[1:] if self.committed == 0 else tokens)
        before = max(0, self.committed - 1)
        self.committed += len(tokens)
        if not read:
            nothing = torch.zeros(0, self.head.verifier_vocab_size, device=self.head.device)
            return Pass(nothing, nothing[:, : self.head.hidden_size])
        states_WD = self.head.fc(self._normed(self.target.take_states(len(read)).to(self.head.dtype)))
        visible = torch.ones(len(read), before + len(read), dtype=torch.bool).tril_(before)
        return self._pass(torch.tensor(read), states_WD, torch.arange(before + 1, before + 1 + len(read)), visible)

    def forward(self, tokens_W: Tensor, offsets_W: Tensor, visible_WR: Tensor, last: int = 0) -> Pass:
        """A pass over drafted tokens, each behind the head's state of the last pass; as `CachedModel.forward`."""
        state_WD = self._state_WD if len(self._state_WD) == len(tokens_W) else self._state_WD[-1:]
        visible_WC = pad(visible_WR.cpu(), (max(0, self.committed - 1), 0), value=True)
        return self._pass(tokens_W, state_WD.expand(len(tokens_W), -1), offsets_W + self.committed, visible_WC)

    def keep(self, path: Sequence[int]) -> None:
        assert not path
        layers: list[Any] = self.cache.layers
        for layer in layers:
            for name in STATES:
                setattr(layer, name, getattr(layer, name)[:, :, : max(0, self.committed - 1)])

    @torch.inference_mode()
    def ahead(self, first: Pass, tokens_T: Tensor, root: int, depth: int, sampling: Sampling) -> Tensor:
        """The probabilities that chains give to the text's own tokens, [B, depth]: row r, column d is that of the token
        d + 1 after root r, behind the d tokens before it. Zeros where the text ends before the whole chain. `first` is
        what `extend` returned for the B roots from `root` on, just now."""
        result_BD = torch.zeros(len(first.logits_WV), depth, dtype=torch.float64, device=first.logits_WV.device)
        whole = max(0, min(len(result_BD), len(tokens_T) - depth - root))
        states_BD, committed = self._state_WD, self.committed
        for begin in range(0, whole, ROOTS):
            end = min(begin + ROOTS, whole)
            logits, self._state_WD = first.logits_WV[begin:end], states_BD[begin:end]
            root_B = torch.arange(root + begin, root + end)
            context = torch.arange(committed - 1) < root_B.unsqueeze(-1)
            for d in range(depth):
                next_B = tokens_T[root_B + d + 1].to(logits.device)
                result_BD[begin:end, d] = sampling.probabilities(logits).gather(-1, next_B.unsqueeze(-1))[:, 0].double()
                if d + 1 < depth:
                    visible = torch.cat([context, torch.eye(end - begin, dtype=torch.bool).repeat(1, d + 1)], dim=-1)
                    logits = self._pass(next_B, self._state_WD, root_B + d + 1, visible).logits_WV
            self.keep([])
        return result_BD

    def _normed(self, states_WA: Tensor) -> Tensor:
        if self.head.input_norm is not None:
            return self.head.input_norm(states_WA)
        if self.head.fc_norm is not None:
            parts = zip(self.head.fc_norm, states_WA.chunk(len(self.head.fc_norm), dim=-1), strict=True)
            return torch.cat([norm(part) for norm, part in parts], dim=-1)
        return states_WA

    @torch.inference_mode()
    def _pass(self, tokens_W: Tensor, states_WD: Tensor, position_W: Tensor, visible_WC: Tensor) -> Pass:
        head, device = self.head, self.head.device
        tokens_1W, position_1W = tokens_W.to(device).unsqueeze(0), position_W.to(device).unsqueeze(0)
        mask = torch.zeros(visible_WC.shape, dtype=head.dtype).masked_fill_(~visible_WC, float("-inf")).to(device)
        joined = torch.cat([head.embed_tokens(tokens_1W), states_WD.unsqueeze(0)], dim=-1)
        rotary = head.rotary_emb(joined, position_1W)
        for layer in head.layers:
            joined = layer(
                joined,
                attention_mask=mask[None, None],
                position_ids=position_1W,
                past_key_values=self.cache,
                use_cache=True,
                position_embeddings=rotary,
            )
        normed_1WD = head.norm(joined)
        self._state_WD = (normed_1WD if head.config.norm_output else joined)[0]
        logits_WV = head.lm_head(normed_1WD)[0]
        self._finite = self._finite & logits_WV.isfinite().all()
        return Pass(_over_the_targets_vocabulary(head, logits_WV), normed_1WD[0])


def _over_the_targets_vocabulary(head: Any, logits_WV: Tensor) -> Tensor:
    if head.d2t is None:
        return logits_WV
    ids = head.d2t + torch.arange(len(head.d2t), device=logits_WV.device)
    whole_WV = logits_WV.new_full((len(logits_WV), head.verifier_vocab_size), float("-inf"))
    return whole_WV.index_copy_(-1, ids, logits_WV)


def check_prompt(pair: ModelPair, tokens: int) -> None:
    """InputError where a prompt of so many tokens is too short for the pair's head."""
    if pair.has_head and tokens < 2:
        raise InputError("the prompt has one token: a head drafts from the target's states before the last one")


def caches(pair: ModelPair) -> tuple[CachedModel, CachedModel]:
    if not pair.has_head:
        return CachedModel(pair.target), CachedModel(pair.draft)
    head: Any = pair.draft
    target = CachedModel(pair.target, head.target_layer_ids)
    return target, CachedHead(head, target)


def load_pair_with_head(
    target: str,
    head: str,
    device: str = "auto",
    dtype: str = "float32",
    device_map: str | None = None,
    shapes: bool = False,
    checksums: Path | None = None,
) -> ModelPair:
    """A target and an EAGLE-3 head for it; as `ModelPair.load`. InputError also where the library is missing, or where
    the head is of another kind or does not fit the target."""
    device, target = resolve_device(device), resolved(target, "target")
    check_head_config(head, target)
    require_weights(head, "head")
    if not shapes:
        require_weights(target, "target")
    tokenizer = load_tokenizer(target, "target")
    model = load_model(target, "target", DTYPES[dtype], device, device_map)
    loaded = load_head(head, target, model.device, DTYPES[dtype])
    check_fits(loaded, model, f"pair.head: {head}")
    found = fingerprint((target, head), tokenizer, eos_ids(model), checksums)
    return ModelPair(model, loaded, tokenizer, (target, head), found)


def require_library() -> None:
    """InputError unless the library of heads is installed; it names every file that it reads, which is turned off."""
    if find_spec("speculators") is None:
        raise InputError("pair.head: speculators is not installed: pip install '.[heads]' in Espalier's repository")
    from loguru import logger

    logger.disable("speculators")


def head_config(name: str) -> Any:
    """A head's config; InputError where it is not that of an EAGLE-3 head."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    try:
        path = Path(name) / CONFIG if Path(name).is_dir() else Path(str(cached_file(name, CONFIG)))
        kind = json.loads(path.read_text()).get("speculators_model_type")
        config = Eagle3SpeculatorConfig.from_pretrained(name) if kind == EAGLE3 else None
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"pair.head: cannot read {name}: {first_line(error)}") from error
    if config is None:
        raise InputError(f"pair.head: {name} is no {EAGLE3} head in the format of the speculators library: {kind}")
    return config


def check_head_config(name: str, target: str) -> None:
    """Check a head as far as that needs no weights: the library, its kind, its layers, and its sizes against the
    target's config; InputError where one is wrong."""
    require_library()
    config, own = head_config(name), text_config(target, "target")
    layer, read = config.transformer_layer_config, config.eagle_aux_hidden_state_layer_ids
    for key in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(layer, key), getattr(own, key)
        if ours != theirs:
            raise InputError(f"pair.head: {name} is for a target with {key}={ours}; {target} has {theirs}")
    if read and max(read) >= own.num_hidden_layers:
        most = own.num_hidden_layers - 1
        raise InputError(f"pair.head: {name} reads layer {max(read)}; of {target} heads can read up to {most} here")
    if "sliding_attention" in (getattr(layer, "layer_types", None) or ()):
        raise InputError(f"pair.head: {name} has a sliding window, for which there is no mask here")


def load_head(name: str, target: str, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A head for a target; embeddings and output rows that its checkpoint lacks are the target's. InputError where it
    does not load."""
    require_library()
    from speculators.models.eagle3 import Eagle3DraftModel

    try:
        config = head_config(name)
        config.transformer_layer_config._attn_implementation = "eager"  # takes a mask for each row of a pass
        config.speculators_config.verifier.name_or_path = target
        model = Eagle3DraftModel.from_pretrained(name, config=config, dtype=dtype)
        _complete(model, name)
    except InputError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"pair.head: cannot load {name}: {first_line(error)}") from error
    model.name_or_path = name
    return model.to(device).eval()


def _complete(head: Any, name: str) -> None:
    """The library takes weights that are NaN from the target, but transformers 5 gives those that a checkpoint lacks
    random numbers, or what the memory held before."""
    index = cached_file(name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        held = set(json.loads(Path(index).read_text())["weight_map"])
    else:
        with safe_open(str(cached_file(name, "model.safetensors")), "pt") as file:
            held = set(file.keys())
    for table in ("embed_tokens", "lm_head"):
        if f"{table}.weight" not in held:
            getattr(head, table).weight.data.fill_(torch.nan)
    head.load_verifier_weights()


def check_fits(head: Any, target: PreTrainedModel, name: str) -> None:
    """InputError where a loaded head's vocabulary maps contradict each other, or are not of the target's vocabulary."""
    if head.verifier_vocab_size != scored(target):
        raise InputError(
            f"{name} is for a vocabulary of {head.verifier_vocab_size} tokens; the target scores {scored(target)}"
        )
    if head.d2t is not None:
        ids = head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)
        if not torch.equal(ids, head.t2d.nonzero()[:, 0]):
            raise InputError(f"{name}: its maps d2t and t2d of the vocabulary contradict each other")


@torch.inference_mode()
def check_head(pair: ModelPair, name: str) -> float:
    """The largest difference, as a share of the logits' standard deviation, between the library's pass over a text,
    which drafts from all roots at once, and chains that are drafted step by step; InputError where it is too large."""
    head, generator = pair.draft, torch.Generator().manual_seed(0)
    if head.config.transformer_layer_config._attn_implementation != "eager":
        raise InputError(f"{name}: load it with data_gen.models.heads.load_head, which asks for eager attention")
    tokens = torch.randint(pair.vocabulary, (CHECKED_TEXT,), generator=generator).tolist()
    expected_DTV, worst = _one_call(pair, tokens), 0.0
    target, cached = caches(pair)
    target.fill(tokens)
    cached.fill(tokens[:1])
    for root in range(1, CHECKED_TEXT - CHECKED_DEPTH):
        found = cached.extend(tokens[root : root + 1])
        for d in range(CHECKED_DEPTH):
            found_V, expected_V = found.logits_WV[-1], expected_DTV[d][root - 1].float()
            apart = (found_V[found_V.isfinite()].float() - expected_V).abs().amax() / expected_V.std()
            worst = max(worst, float(apart))
            drafted = torch.tensor([tokens[root + d + 1]])
            found = cached.forward(drafted, torch.tensor([d]), torch.ones(1, d + 1, dtype=torch.bool))
        cached.keep([])
    if not worst <= TOLERANCES.get(head.dtype, TOLERANCES[torch.float32]):
        raise InputError(f"{name}: drafting step by step is not what the library's own pass gives: {worst:.2g} apart")
    return worst


def _one_call(pair: ModelPair, tokens: list[int]) -> list[Tensor]:
    head: Any = pair.draft
    target, seen = CachedModel(pair.target, head.target_layer_ids), list[Tensor]()
    target.fill(tokens)
    tokens_1T = torch.tensor([tokens[1:]], device=pair.device)
    states_1TA = target.take_states(len(tokens) - 1).unsqueeze(0).to(head.dtype)
    hook = head.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output[0]))
    with hook, torch.compiler.set_stance("force_eager"):
        head(states_1TA, tokens_1T, torch.zeros_like(tokens_1T), ttt_steps=CHECKED_DEPTH)
    return seen
