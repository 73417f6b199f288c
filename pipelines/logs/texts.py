"""Logged texts as labelled texts: features of every root, and what each choice would have yielded there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from data_gen.features import DrafterKnowledge, foretold
from data_gen.logs import LoggedText
from data_gen.prompts import Prompt, split_of
from data_gen.sampling import Sampling
from selector.actions import ActionSpace
from selector.data import SPLITS, Texts
from selector.schema import LOG, LONGEST_COUNTED, TEXT_SCALARS, TOKEN_SCALARS, InputError
from selector.tokens import TokenStatistics

VERIFIER = "naive"  # on a chain at temperature 0 all verifiers are one


def space_of(texts: Sequence[LoggedText], drafter: str, longest_lookup: int) -> ActionSpace:
    """Chains of the drafter to the log's depth, lookups, and nothing."""
    return ActionSpace.chains(max(text.survivals[drafter].shape[1] for text in texts), longest_lookup)


def split(
    texts: Sequence[LoggedText], tested: Sequence[LoggedText], validation: float, test: float
) -> dict[str, list[LoggedText]]:
    """Texts by split; those of one source stay together.

    Args:
        tested: texts of other files, which then are the test split.

    Raises:
        InputError: there are too few texts for a split.
    """
    found: dict[str, list[LoggedText]] = {name: [] for name in SPLITS}
    for text in texts:
        prompt = Prompt(text.name, "", text.kind, text.source)
        found[split_of(prompt, validation, 0.0 if tested else test)].append(text)
    found["test"] += tested
    empty = next((name for name, own in found.items() if not own), None)
    if empty is not None:
        raise InputError(f"{texts[0].place}: {len(texts)} texts are too few: none falls into the {empty} split")
    return found


def labelled(
    texts: Iterable[LoggedText], drafter: str, space: ActionSpace, sampling: Sampling, tokens: TokenStatistics
) -> Texts:
    """Texts of one split with the features of both levels, and labels of chains and lookups."""
    texts = list(texts)
    parts = [_features(text, drafter, sampling, tokens) for text in texts]
    return Texts(
        settings=[(sampling.temperature, sampling.top_p)],
        size_X=torch.tensor([text.roots for text in texts]),
        setting_X=torch.zeros(len(texts), dtype=torch.int64),
        kind_X=[text.kind for text in texts],
        source_X=[text.source for text in texts],
        prompt_X=[text.name for text in texts],
        scalars_RF=torch.from_numpy(np.concatenate(parts)),
        length_R=torch.cat([text.start + torch.arange(text.roots) for text in texts]),
        survivals={VERIFIER: torch.cat([_survivals(text, drafter, space.depth) for text in texts])},
        foretold_R=torch.cat([foretold(text.tokens, text.start - 1, text.roots, max(space.lookups)) for text in texts]),
        hidden_R=torch.full((sum(text.roots for text in texts),), -1),
        from_the_start=True,
    )


def fit_tokens(texts: Sequence[LoggedText], data: Texts, drafter: str, space: ActionSpace) -> TokenStatistics:
    """Statistics by token of the training texts; puts them among the texts' own scalars, each text's without its own
    part.

    Args:
        data: the same texts, with the scalars of no statistics.
    """
    accepted_R = data.survivals[VERIFIER][:, :LONGEST_COUNTED].float().nan_to_num().sum(-1)
    hit_R = data.survivals[VERIFIER][:, 0].float().nan_to_num() if space.depth else torch.zeros_like(accepted_R)
    values_RK = torch.stack([hit_R, accepted_R, (data.foretold_R > 0).float()], dim=-1).double().numpy()
    token_R = np.concatenate([text.tokens[text.start - 1 : text.start - 1 + text.roots] for text in texts])
    found = TokenStatistics.fit(token_R, values_RK)
    begin = len(TEXT_SCALARS)
    own_RK = found.without_own(token_R, values_RK, data.text_R.numpy())
    data.scalars_RF[:, begin : begin + len(TOKEN_SCALARS)] = torch.from_numpy(own_RK).float()
    return found


def _features(text: LoggedText, drafter: str, sampling: Sampling, tokens: TokenStatistics) -> np.ndarray:
    """Scalars of the schema at every root, float32 [R, F]."""
    known = DrafterKnowledge(text.tokens[: text.start], sampling, tokens)
    right_R1 = text.survivals[drafter][:, :1]
    hits = np.nan_to_num(right_R1[:, 0]) if right_R1.shape[1] else np.zeros(len(right_R1))
    found_RF = np.empty((text.roots, len(LOG.scalars)), np.float32)
    for r in range(text.roots):
        found_RF[r] = known.scalars(LOG.levels[1])
        known.committed(text.tokens[text.start + r : text.start + r + 1], hits[r : r + 1])
    return found_RF


def _survivals(text: LoggedText, drafter: str, depth: int) -> torch.Tensor:
    """Of the drafter's chain, float16 [R, depth]. Beyond a text's own depth nothing was accepted."""
    own_RD = torch.from_numpy(text.survivals[drafter][: text.roots])
    return torch.nn.functional.pad(own_RD, (0, depth - own_RD.shape[1])).half()
