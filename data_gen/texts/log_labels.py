"""A log's texts as rows of a trace store, with what each action would have yielded at every root;
and the features of these rows.

Legend: R roots, D depths, F scalars, J keys, K means by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from data_gen.features.root import DrafterKnowledge, scalars_and_keys
from data_gen.features.text import TextState
from data_gen.models.sampling import Sampling
from data_gen.texts.log_steps import Correction
from data_gen.texts.logs import LoggedText, Logs
from data_gen.texts.prompts import Prompt, place_of, split_of
from data_gen.traces import HIT, read_rows, space_of, text_row, text_schema, to_table
from selector import schema
from selector.actions import ActionSpace
from selector.runtime.tokens import TokenStatistics
from selector.schema import LOG, LONGEST_COUNTED, InputError, survival_column
from selector.train.data import SPLITS, Texts, to_texts

VERIFIER = "naive"  # all verifiers agree on a chain at temperature 0


def splits_of(logs: Logs, validation: float, test: float) -> dict[str, list[LoggedText]]:
    """Texts by split, from shares of the sources; InputError where these are too few. All texts of
    a source fall into one split; held-out texts, if there are any, are the test split."""
    needed = set(SPLITS)
    if logs.held_out:
        test = 0.0
        needed.discard("test")
    ordered = sorted({text.source for text in logs.texts}, key=place_of)
    split = {source: split_of(Prompt("", "", "", source), validation, test) for source in ordered}
    if needed - set(split.values()):
        split = _counted_off(ordered, validation, test)
        if "train" not in split.values():
            raise InputError(
                f"{logs.name}: {len(ordered)} sources of texts are too few for a split"
            )
    texts_by_split: dict[str, list[LoggedText]] = {name: [] for name in SPLITS}
    texts_by_split["test"] = list(logs.held_out)
    for text in logs.texts:
        texts_by_split[split[text.source]].append(text)
    return texts_by_split


def _counted_off(ordered: Sequence[str], validation: float, test: float) -> dict[str, str]:
    """The split of each source, where by chance few sources all miss a split."""

    def count(share: float) -> int:
        return max(1, round(share * len(ordered))) if share else 0

    names = ["test"] * count(test)
    names += ["validation"] * count(validation)
    names += ["train"] * len(ordered)
    return dict(zip(ordered, names, strict=False))


@dataclass(frozen=True)
class Labeller:
    """Labels the texts of a log for the chains of one drafter and for lookups."""

    drafter: str
    space: ActionSpace
    sampling: Sampling

    def table(self, texts: Sequence[LoggedText]) -> pa.Table:
        """A row of the trace store for each text."""
        rows = [self._row(text) for text in texts]
        return to_table(rows, text_schema([VERIFIER], False, self.space, [HIT]))

    def _row(self, text: LoggedText) -> dict[str, object]:
        root = text.start - 1  # the last prompt token
        longest = max(self.space.lookups)
        row = text_row(
            text.name,
            text.source,
            text.kind,
            self.sampling,
            text.tokens,
            root,
            text.roots,
            longest,
        )
        row[HIT] = text.hits(self.drafter)
        row[survival_column(VERIFIER)] = self._survivals(text)
        return row

    def _survivals(self, text: LoggedText) -> torch.Tensor:
        """NaN, for unknown, where nothing was drafted, and at depths beyond what was drafted."""
        drafted_RD = torch.from_numpy(text.of(self.drafter))
        # beyond the longest chain of dense labels nothing is accepted
        beyond = torch.nan if text.is_sparse(self.drafter) else 0.0
        further = (len(drafted_RD), self.space.depth - drafted_RD.shape[1])
        return torch.cat([drafted_RD, torch.full(further, beyond)], dim=-1)


@lru_cache(maxsize=1)
def read_log_texts(folder: Path, digest: str) -> dict[str, Texts]:
    """The texts of a log's trace store by split; InputError as `read_rows`. `digest` is the
    manifest's checksum: the features of one store are computed once in a process."""
    train = with_features(read_rows(folder, "train"))
    correction = correction_of(train)
    texts_by_split = {"train": train}
    for split in SPLITS[1:]:
        table = read_rows(folder, split)
        texts_by_split[split] = with_features(table, train.tokens, correction)
    return texts_by_split


def correction_of(texts: Texts) -> Correction | None:
    """How labels follow from the steps of some texts; None where all of them are known."""
    if bool((texts.drafted_R == texts.space.depth).all()):
        return None
    sizes = texts.size_X.tolist()
    return Correction.of([part_RD.numpy() for part_RD in _observed(texts).split(sizes)])


def imputed(texts: Texts, correction: Correction | None, again: float | None = None) -> Texts:
    """The texts with means in place of labels that the log does not tell, as
    `Correction.imputed`."""
    if correction is None:
        return texts
    parts = []
    for part_RD in _observed(texts).split(texts.size_X.tolist()):
        parts.append(torch.from_numpy(correction.imputed(part_RD.numpy(), again)).half())
    return replace(texts, survivals={VERIFIER: torch.cat(parts)})


def _observed(texts: Texts) -> Tensor:
    """A drafter's labels, NaN where nothing was drafted, float32 [R, D]."""
    return texts.observed(VERIFIER, slice(None), texts.space)[:, : texts.space.depth]


def with_features(
    table: pa.Table, tokens: TokenStatistics | None = None, correction: Correction | None = None
) -> Texts:
    """The texts of a log's rows, with labels at every root. Without the training texts' statistics
    by token, these are the training texts: each has the statistics of other sources', and the
    statistics of all are kept. Without a `correction`, it is that of these texts."""
    statistics = tokens or TokenStatistics.empty()
    scalars: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    for row in range(len(table)):
        text_scalars_RF, text_keys_RJ = _along(table, row, statistics)
        scalars.append(text_scalars_RF)
        keys.append(text_keys_RJ)
    space = space_of(table)
    scalars_RF = torch.from_numpy(np.concatenate(scalars))
    texts = to_texts(table, [VERIFIER], scalars_RF, space, space.lookups, LOG)
    texts = imputed(texts, correction or correction_of(texts))
    if tokens is not None:
        return replace(texts, tokens=tokens)
    survivals_RD = texts.survivals[VERIFIER][:, :LONGEST_COUNTED].float()
    copied_R = texts.lookup_R.clamp(max=LONGEST_COUNTED)
    values_RK = torch.stack([survivals_RD.sum(-1), copied_R], dim=-1).double().numpy()
    source_R = texts.source_number_X[texts.text_R].numpy()
    tokens, token_scalars_RF = TokenStatistics.fit(np.concatenate(keys), values_RK, source_R)
    begin = len(schema.TEXT_SCALARS)
    texts.scalars_RF[:, begin : LOG.first] = torch.from_numpy(token_scalars_RF)
    return replace(texts, tokens=tokens)


def _along(table: pa.Table, row: int, statistics: TokenStatistics) -> tuple[np.ndarray, np.ndarray]:
    """The scalars and the keys at every root of a text."""
    tokens = table["tokens"][row].values.to_pylist()
    hits = table[HIT][row].values.to_pylist()
    sampling = Sampling(table["temperature"][row].as_py(), table["top_p"][row].as_py())
    start = table["start"][row].as_py() + 1
    knowledge = DrafterKnowledge(tokens[:start], sampling, statistics)
    states: list[TextState] = []
    of_hits: list[list[float]] = []
    for r in range(len(hits)):
        states.append(knowledge.state())
        of_hits.append(knowledge.hits())
        knowledge.committed(tokens[start + r : start + r + 1], hits[r : r + 1])
    return scalars_and_keys(states, of_hits, statistics)
