"""Labels the texts of a log: the features of every root, and what each action would have yielded there.

Legend: R roots, D depths, F scalars, J keys, K means by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from data_gen.features.root import DrafterKnowledge, lookup_lengths
from data_gen.models.sampling import Sampling
from data_gen.texts.logs import LoggedText, Logs
from data_gen.texts.prompts import Prompt, place_of, split_of
from selector.actions import ActionSpace
from selector.runtime.artefact import TokenStatistics
from selector.schema import HIT_KEY, KEYS, LOG, LONGEST_COUNTED, TEXT_SCALARS, TOKEN_SCALARS, InputError
from selector.train.data import SPLITS, Texts

VERIFIER = "naive"  # all verifiers agree on a chain at temperature 0


def splits_of(logs: Logs, validation: float, test: float) -> dict[str, list[LoggedText]]:
    """Texts by split, from shares of the sources; InputError where these are too few. All texts of a source fall into
    one split; held-out texts, if there are any, are the test split."""
    test = 0.0 if logs.held_out else test
    ordered = sorted({text.source for text in logs.texts}, key=place_of)
    split = {source: split_of(Prompt("", "", "", source), validation, test) for source in ordered}
    missing = set(SPLITS) - set(split.values()) - ({"test"} if logs.held_out else set())
    if missing:  # by chance, few sources may all miss a split: the splits are then counted off
        tested, validated = (max(1, round(share * len(ordered))) if share else 0 for share in (test, validation))
        names = ["test"] * tested + ["validation"] * validated + ["train"] * len(ordered)
        split = dict(zip(ordered, names, strict=False))
        if "train" not in split.values():
            raise InputError(
                f"logs.files: {len(ordered)} sources of texts are too few for a split: add some, or --test"
            )
    found: dict[str, list[LoggedText]] = {name: [] for name in SPLITS} | {"test": list(logs.held_out)}
    for text in logs.texts:
        found[split[text.source]].append(text)
    return found


@dataclass(frozen=True)
class Labeller:
    """Labels the texts of a log; `tokens` are the training texts' statistics by token."""

    drafter: str
    space: ActionSpace
    sampling: Sampling
    tokens: TokenStatistics = field(default_factory=TokenStatistics.empty)

    def label(self, texts: Sequence[LoggedText]) -> Texts:
        return self._labelled(texts)[0]

    def learn_from(self, texts: Sequence[LoggedText]) -> tuple[Labeller, Texts]:
        """A labeller with the statistics of some texts, and these texts, labelled with the statistics of the others."""
        data, keys_RJ = self._labelled(texts)
        survivals_RD = data.survivals[VERIFIER][:, :LONGEST_COUNTED].float()
        survivals_RD = torch.where(survivals_RD.isnan(), survivals_RD.nanmean(0), survivals_RD).nan_to_num()
        copied_R = data.lookup_R.clamp(max=LONGEST_COUNTED)
        values_RK = torch.stack([survivals_RD.sum(-1), copied_R], dim=-1).double().numpy()
        tokens, found_RF = TokenStatistics.fit(keys_RJ, values_RK, data.text_R.numpy())
        begin, split_at = len(TEXT_SCALARS), len(TOKEN_SCALARS)
        data.scalars_RF[:, begin : begin + split_at] = torch.from_numpy(found_RF[:, :split_at])
        data.scalars_RF[:, split_at - found_RF.shape[1] :] = torch.from_numpy(found_RF[:, split_at:])
        return replace(self, tokens=tokens), data

    def _labelled(self, texts: Sequence[LoggedText]) -> tuple[Texts, np.ndarray]:
        scalars, keys = zip(*map(self._features, texts), strict=True)
        longest = max(self.space.lookups)
        data = Texts(
            settings=[self.sampling],
            size_X=torch.tensor([text.roots for text in texts]),
            setting_X=torch.zeros(len(texts), dtype=torch.int64),
            kind_X=[text.kind for text in texts],
            source_X=[text.source for text in texts],
            prompt_X=[text.name for text in texts],
            scalars_RF=torch.from_numpy(np.concatenate(scalars)),
            length_R=torch.cat([text.start + torch.arange(text.roots) for text in texts]),
            survivals={VERIFIER: torch.cat([self._survivals(text) for text in texts])},
            lookup_R=torch.cat([lookup_lengths(text.tokens, text.start - 1, text.roots, longest) for text in texts]),
            hidden_R=torch.full((sum(text.roots for text in texts),), -1),
            from_the_start=True,
            schema=LOG,
            space=self.space,
        )
        return data, np.concatenate(keys)

    def _features(self, text: LoggedText) -> tuple[np.ndarray, np.ndarray]:
        known = DrafterKnowledge(text.tokens[: text.start], self.sampling, self.tokens)
        hits = text.hits(self.drafter)
        scalars_RF = np.empty((text.roots, len(LOG.scalars)), np.float32)
        keys_RJ = np.empty((text.roots, len(KEYS) + len(HIT_KEY)), np.int64)
        for r in range(text.roots):
            scalars_RF[r], keys_RJ[r] = known.scalars(LOG.levels[1]), known.keys()
            known.committed(text.tokens[text.start + r : text.start + r + 1], hits[r : r + 1])
        return scalars_RF, keys_RJ

    def _survivals(self, text: LoggedText) -> torch.Tensor:
        """NaN, for unknown, at depths beyond those that were drafted, where all drafted tokens were accepted."""
        own_RD = torch.from_numpy(text.of(self.drafter))
        further = torch.zeros(len(own_RD), self.space.depth - own_RD.shape[1])
        if own_RD.shape[1] == 0 or bool(own_RD.isnan().any()):  # steps alone were logged
            rejected_R = own_RD[:, -1:].eq(0).any(-1)
            further[~rejected_R] = torch.nan
        return torch.cat([own_RD, further], dim=-1).half()
