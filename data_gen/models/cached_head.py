"""An EAGLE-3 head with its KV cache (Li et al. 2025, arXiv 2503.01840).

A head's first pass at a root reads the root token together with the target's states at the token before, which the last
step has left behind. Each further pass reads a drafted token together with the head's own state before it. So the
draft's distribution depends on the root and on the depth below it, and not on the text alone.

Legend: W tokens of a pass, T tokens, B roots, D depths or hidden width, A widths of the target's states together, C
cached rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from data_gen.models.pair import FILL, STATES, CachedModel, ModelPair, Pass
from data_gen.models.sampling import Sampling
from selector.schema import InputError

ROOTS = 256  # whose chains are passed at once, which bounds the memory of the mask


class CachedHead:
    """A head and its KV cache over one text, with the methods of `CachedModel`.

    The cache holds a row for every committed token but the first, each computed from the target's own states. Rows of
    drafted tokens are always dropped, because an accepted token is passed again with the target's states.

    Args:
        target: the same text's; its committed tokens' states are taken as the head passes the tokens after them.
    """

    recomputes = True

    def __init__(self, model: Any, target: CachedModel) -> None:
        self.model, self.target, self.committed, self.cache = model, target, 0, DynamicCache()
        self._state_1WD = torch.zeros(0)  # after the last pass
        self._finite = torch.ones((), dtype=torch.bool, device=model.device)

    def extend(self, tokens: Sequence[int]) -> Pass:
        """One causal pass over consecutive tokens, which are committed at once; without a row for a text's first."""
        read = list(tokens[1:] if self.committed == 0 else tokens)
        before = max(0, self.committed - 1)
        if not read:
            self.committed += len(tokens)
            nothing = torch.zeros(1, 0, self.model.verifier_vocab_size, device=self.model.device)
            return Pass(nothing, nothing[..., : self.model.hidden_size])
        visible = torch.ones(len(read), before + len(read), dtype=torch.bool).tril_(before)
        position_W = torch.arange(before + 1, before + 1 + len(read), device=self.model.device)
        states_1WD = self.model.fc(self._normed(self.target.take_states(len(read)).unsqueeze(0)))
        self.committed += len(tokens)
        return self._pass(torch.tensor([read], device=self.model.device), states_1WD, position_W, visible)

    def fill(self, tokens: Sequence[int]) -> None:
        """Commit consecutive tokens, in passes of at most `FILL` tokens."""
        for begin in range(0, len(tokens), FILL):
            self.extend(tokens[begin : begin + FILL])

    def forward(self, tokens_1W: Tensor, offsets_W: Tensor, visible: Tensor) -> Pass:
        """A pass over drafted tokens, each behind the head's state of the last pass; as `CachedModel.forward`."""
        state_1WD = self._state_1WD if self._state_1WD.shape[1] == tokens_1W.shape[1] else self._state_1WD[:, -1:]
        context = torch.ones(tokens_1W.shape[1], max(0, self.committed - 1), dtype=torch.bool)
        position_W = offsets_W.to(self.model.device) + self.committed
        expanded_1WD = state_1WD.expand(-1, tokens_1W.shape[1], -1)
        return self._pass(tokens_1W, expanded_1WD, position_W, torch.cat([context, visible.cpu()], dim=-1))

    def keep(self, path: Sequence[int]) -> None:
        """Drop the rows of drafted tokens; none of them can be kept."""
        assert not path
        for layer in self.cache.layers:
            for name in STATES:
                setattr(layer, name, getattr(layer, name)[:, :, : max(0, self.committed - 1)])

    def check(self) -> None:
        """As `CachedModel.check`."""
        if not bool(self._finite):
            raise InputError(f"{self.model.name_or_path}: the head gives numbers that are not finite (NaN or infinity)")

    @torch.inference_mode()
    def ahead(self, first: Pass, tokens_T: Tensor, root: int, depth: int, sampling: Sampling) -> Tensor:
        """The probabilities that chains give to the text's own tokens, [B, depth]: row r, column d is that of the token
        d + 1 after root r, behind the d tokens before it. Zeros where the text ends before the whole chain.

        Args:
            first: what `extend` returned for the B roots from `root` on, just now.
            tokens_T: the whole text.
        """
        logits_BV = first.logits_BWV[0]
        result_BD = torch.zeros(len(logits_BV), depth, dtype=torch.float64, device=logits_BV.device)
        whole = max(0, min(len(logits_BV), len(tokens_T) - depth - root))
        states_1BD, committed = self._state_1WD, self.committed
        for begin in range(0, whole, ROOTS):
            end = min(begin + ROOTS, whole)
            logits, self._state_1WD = logits_BV[begin:end], states_1BD[:, begin:end]
            root_B = torch.arange(root + begin, root + end)
            context = torch.arange(committed - 1) < root_B.unsqueeze(-1)
            for d in range(depth):
                next_B1 = tokens_T[root_B + d + 1].to(logits.device).unsqueeze(-1)
                result_BD[begin:end, d] = sampling.probabilities(logits).gather(-1, next_B1)[:, 0].double()
                if d + 1 < depth:
                    visible = torch.cat([context, torch.eye(end - begin, dtype=torch.bool).repeat(1, d + 1)], dim=-1)
                    position_B = (root_B + d + 1).to(logits.device)
                    logits = self._pass(next_B1.T, self._state_1WD, position_B, visible).logits_BWV[0]
            self.keep([])
        return result_BD

    def _normed(self, states_1WA: Tensor) -> Tensor:
        states_1WA = states_1WA.to(self.model.dtype)
        if self.model.input_norm is not None:
            return self.model.input_norm(states_1WA)
        if self.model.fc_norm is not None:
            parts = zip(self.model.fc_norm, states_1WA.chunk(len(self.model.fc_norm), dim=-1), strict=True)
            return torch.cat([norm(part) for norm, part in parts], dim=-1)
        return states_1WA

    @torch.inference_mode()
    def _pass(self, tokens_1W: Tensor, states_1WD: Tensor, position_W: Tensor, visible_WC: Tensor) -> Pass:
        head, device = self.model, self.model.device
        mask = torch.zeros(visible_WC.shape, dtype=head.dtype).masked_fill_(~visible_WC, float("-inf")).to(device)
        joined = torch.cat([head.embed_tokens(tokens_1W), states_1WD], dim=-1)
        rotary = head.rotary_emb(joined, position_W.unsqueeze(0))
        for layer in head.layers:
            joined = layer(
                joined,
                attention_mask=mask[None, None],
                position_ids=position_W.unsqueeze(0),
                past_key_values=self.cache,
                use_cache=True,
                position_embeddings=rotary,
            )
        normed_1WD = head.norm(joined)
        self._state_1WD = normed_1WD if head.config.norm_output else joined
        logits = head.lm_head(normed_1WD)
        self._finite = self._finite & logits.isfinite().all()
        return Pass(_over_the_targets_vocabulary(head, logits), normed_1WD)


def _over_the_targets_vocabulary(head: Any, logits: Tensor) -> Tensor:
    if head.d2t is None:
        return logits
    ids = head.d2t + torch.arange(len(head.d2t), device=logits.device)
    return logits.new_full((*logits.shape[:-1], head.verifier_vocab_size), float("-inf")).index_copy_(-1, ids, logits)


def check_prompt(pair: ModelPair, tokens: int) -> None:
    """InputError where a prompt of so many tokens is too short for the pair's head."""
    if pair.has_head and tokens < 2:
        raise InputError("the prompt has one token: a head drafts from the target's states before the last one")


def caches(pair: ModelPair) -> tuple[CachedModel, Any]:
    """The target's and the draft's caches of a new text."""
    if not pair.has_head:
        return CachedModel(pair.target), CachedModel(pair.draft)
    head: Any = pair.draft
    target = CachedModel(pair.target, head.target_layer_ids)
    return target, CachedHead(head, target)
