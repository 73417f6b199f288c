"""A machine's latency profile, and the time of a decoding step with a given action.

Legend: L context lengths, A actions, V numbers of verified tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selector.actions import IID, Action
from selector.files import Array
from selector.sampling import Sampling
from selector.schema import FORMAT, FULL, LIGHT, MATCH, InputError
from selector.tables import FREE, Table, along

__all__ = [
    "FREE",
    "MOST_TOKENS",
    "UNCUT",
    "WIDEST",
    "Batches",
    "LatencyProfile",
    "StepTimes",
    "Table",
    "Verification",
    "distinct_key",
    "draft_passes",
]

MOST_TOKENS = 64  # verified tokens of a request whose price is linear, the root included
WIDEST = 128  # verified tokens of a request in an engine's step
UNCUT = Sampling()


@dataclass(frozen=True)
class Batches:
    """Times of forward passes over several requests together."""

    sizes: list[int]  # batch sizes, ascending
    draft: list[Table]  # for each size, the draft's forward pass, by context length
    drafting: list[Table]  # for each size, once in a step that drafts, by context length
    # for each size, the rest of a step, by context length and verified tokens with the root
    target: list[Table]
    stepped: bool  # as in `along`, for requests and for tokens
    # for each size, the decisions of all requests of a step, by what they see; empty where they
    # were not timed
    decide: list[dict[str, float]] = field(default_factory=list)

    def at(self, batch: int, tokens: int) -> tuple[Table, Table, Table]:
        """The draft's forward pass, drafting once, and the rest of a step for a batch size, the
        last for 1 to `tokens` tokens."""
        timed_lengths: set[int] = set()
        timed_counts = set(range(1, tokens + 1))
        for table in self.target:
            timed_lengths.update(table.lengths)
            # means of requests, which need not be whole
            timed_counts.update(size for size in table.sizes if 1 < size < tokens)
        lengths = sorted(timed_lengths)
        counts = sorted(timed_counts)
        return (
            self._table(self.draft, batch, lengths, [1]),
            self._table(self.drafting, batch, lengths, [0]),
            self._table(self.target, batch, lengths, counts),
        )

    @classmethod
    def of(cls, values: dict[str, Any]) -> Batches:
        """The times of an entry in JSON."""
        tables = {}
        for role in ("draft", "drafting", "target"):
            tables[role] = [Table(**table) for table in values[role]]
        return cls(**{**values, **tables})

    def decisions_at(self, batch: int) -> dict[str, float]:
        """The decisions of a batch size, linear between the timed ones."""
        seconds = {}
        for level in self.decide[0]:
            by_size = [decide[level] for decide in self.decide]
            seconds[level] = along(self.sizes, by_size, batch, stepped=False)
        return seconds

    def _table(
        self, tables: list[Table], batch: int, lengths: list[int], sizes: list[int]
    ) -> Table:
        rows = []
        for length in lengths:
            row = []
            for size in sizes:
                by_batch = [table.along(length, size, self.stepped) for table in tables]
                row.append(along(self.sizes, by_batch, batch, self.stepped))
            rows.append(row)
        return Table(lengths, sizes, rows)


class StepTimes(NamedTuple):
    """Seconds of the parts of a step of a batch of one size, as arrays for compiled loops."""

    lengths_L: Array  # context lengths, ascending, at least two
    draft_L: Array  # one forward pass of the draft
    drafting_L: Array  # once in a step that drafts
    verified_V: Array  # mean verified tokens of a request, ascending
    target_LV: Array  # the rest of a step, by verified tokens

    @property
    def token_L(self) -> Array:
        """Seconds of one more verified token of every request."""
        more_tokens = self.verified_V[-1] - self.verified_V[0]
        token_L: Array = (self.target_LV[:, -1] - self.target_LV[:, 0]) / more_tokens
        return token_L

    def prices(self, length: float, batch: int) -> tuple[float, float, float]:
        """Seconds of one more verified token of one request, of one forward pass of the draft over
        all, and of drafting once, at a mean context length."""
        token = np.interp(length, self.lengths_L, self.token_L / batch)
        draft_pass = np.interp(length, self.lengths_L, self.draft_L)
        drafting = np.interp(length, self.lengths_L, self.drafting_L)
        return float(token), float(draft_pass), float(drafting)


class Verification(NamedTuple):
    """Seconds that the verification of a drafted tree takes, beyond the target's forward pass."""

    token: float = 0.0  # for each drafted token
    branching: float = 0.0  # once, where there are branches
    depth: float = 0.0  # for each depth of branches, however many branches there are


@dataclass(frozen=True)
class LatencyProfile:
    """Times of one pair on one machine, in seconds, fitted to real decoding steps. A step's time is
    the sum of those of its forward passes, its verification and its decisions.

    Attributes:
        distinct: for each sampling setting (`str`) and K (`str`), the mean number of distinct nodes
            that K branches have at each of their depths. Equal prefixes of branches are
            one node of the target's forward pass. Where one is missing, all nodes count.
        weights: hashes of some weights of the target and of the draft; empty where not known.
        lag: additional seconds of a step that drafts, by the number of tokens that the steps since
            the draft's last forward pass have appended: its KV cache lacks them.
        batches: an engine's forward passes over several requests together; `draft` and `target` are
            then those of the smallest batch. None where one request was timed.
        draws: the same from other draws of the timed steps, for their uncertainty; empty where each
            kind of step was timed once.
        plain: a step of a server without a drafter, at one context, by the number of requests; 0
            where none was timed.
    """

    device: str  # processor, threads, dtype
    pair: str  # fingerprint of the models
    # the draft's forward pass and sampling of the next tokens, by context length and width in
    # tokens
    draft: Table
    # a step without drafting: the target's forward pass and all else, by context length and nodes
    target: Table
    # by verifier; and by style, of trees that are verified alike whatever it is
    verify: dict[str, Verification]
    # the decisions of a step, with their features, by what they see: `schema.LEVELS`, or the match
    # alone
    decide: dict[str, float]
    drafting: Table = FREE  # once in a step in which anything is drafted, by context length
    nucleus: float = 0.0  # additional time of one next-token distribution where top-p is below 1
    batches: Batches | None = None
    draws: list[Batches] = field(default_factory=list)
    plain: Table = FREE
    distinct: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    lag: Table = FREE

    @classmethod
    def load(cls, path: Path) -> LatencyProfile:
        """InputError where the file is missing, damaged, or of another format."""
        try:
            values = json.loads(Path(path).read_text())
            file_format = values.pop("format")
            if file_format == FORMAT:  # a file of another format may have other keys
                return cls._of_json(values)
        except OSError as error:
            raise InputError(
                f"{path}: no latency profile there: run the latency stage first"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: not a latency profile: run the latency stage again"
            ) from error
        raise InputError(
            f"{path}: format {file_format}; this program reads {FORMAT}: run the latency stage "
            "again"
        )

    @classmethod
    def _of_json(cls, values: dict[str, Any]) -> LatencyProfile:
        for name in ("check", "matrices"):  # for who reads the file
            values.pop(name, None)
        if not isinstance(values["drafting"], dict):
            values["drafting"] = {"lengths": [0], "sizes": [0], "seconds": [[values["drafting"]]]}
        for name in ("draft", "drafting", "target", "lag"):
            values[name] = Table(**values[name])
        values["verify"] = {
            name: Verification(*seconds) for name, seconds in values["verify"].items()
        }
        if "batches" in values:
            values["batches"] = Batches.of(values["batches"])
        values["draws"] = list(map(Batches.of, values.get("draws", [])))
        if "plain" in values:
            values["plain"] = Table(**values["plain"])
        return cls(**values)

    def to_json(self) -> dict[str, object]:
        """The content of the profile's file."""
        entries = {name: value for name, value in asdict(self).items() if value is not None}
        if self.drafting.lengths == [0]:
            entries["drafting"] = self.drafting.at(0, 0)
        return {"format": FORMAT, **entries}

    def at_batch(self, batch: int) -> LatencyProfile:
        """The times of a step in which `batch` requests are decoded together, all with the same
        action.

        The draft's forward pass is one over a single token of each request, because engines draft
        chains. Raises InputError where only single requests were timed.
        """
        if self.batches is None:
            if batch == 1:
                return self
            raise InputError(
                f"the latency profile of {self.device} holds times of one request alone"
            )
        draft, drafting, target = self.batches.at(batch, WIDEST)
        decide = self.decide
        if self.batches.decide:
            decide = self.batches.decisions_at(batch)
        return replace(
            self,
            draft=draft,
            drafting=drafting,
            target=target,
            decide=decide,
            plain=Table(self.plain.lengths, [0], [[self.plain.at(0, batch)]]),
            batches=None,
            draws=[],
        )

    @property
    def presence(self) -> float:
        """How much longer a step of this batch size takes because there is a drafter, even if it
        drafts nothing; 0 where no server without one was timed."""
        (length,) = self.plain.lengths
        plain = self.plain.at(length, 0)
        return max(0.0, self.target.at(length, 1) - plain) if plain else 0.0

    @property
    def drawn(self) -> list[LatencyProfile]:
        """The profiles of the draws, which are as likely as this one; without any this one."""
        profiles = []
        for draw in self.draws:
            decide = self.batches.decide if self.batches else []
            profiles.append(replace(self, batches=replace(draw, decide=decide), draws=[]))
        return profiles or [self]

    def step_times(self, batch: int) -> StepTimes:
        """The parts of a step's time for a batch size; InputError as `at_batch`."""
        profile = self.at_batch(batch)
        lengths = profile.target.lengths
        if len(lengths) == 1:
            lengths = [*lengths, lengths[0] + 1]
        sizes = [size for size in profile.target.sizes if size <= MOST_TOKENS]
        return StepTimes(
            lengths_L=np.array(lengths, float),
            draft_L=np.array([profile.draft.at(length, 1) for length in lengths]),
            drafting_L=np.array([profile.drafting.at(length, 0) for length in lengths]),
            verified_V=np.array(sizes, float),
            target_LV=np.array(
                [[profile.target.at(length, size) for size in sizes] for length in lengths]
            ),
        )

    def nodes(self, action: Action, sampling: Sampling = UNCUT) -> float:
        """The mean number of nodes in the target's forward pass under a sampling setting, with the
        root."""
        distinct = self.distinct.get(str(sampling), {}).get(distinct_key(action), [])
        if len(distinct) < action.L2 or action.style_name != IID or action.K == 1:
            return 1 + action.nodes  # branches of other styles have no node in common
        return 1 + action.L1 + sum(distinct[: action.L2])

    def action_seconds(
        self,
        action: Action,
        length: float,
        verifier: str,
        feature_levels: Sequence[str] = (),
        sampling: Sampling = UNCUT,
        nodes: float | None = None,
    ) -> float:
        """Predicted seconds of one decoding step after `length` committed tokens, the root token
        included.

        `feature_levels` are those that the decision used, or the match. `nodes`, with the root, are
        those in the target's forward pass; `nodes(action, sampling)` if None.
        """
        if nodes is None:
            nodes = self.nodes(action, sampling)
        sees_root = LIGHT in feature_levels or FULL in feature_levels
        passes = draft_passes(action, length, sees_root)
        seconds = self.target.at(length, nodes) + sum(self.draft.at(*size) for size in passes)
        seconds += self.decision_seconds(feature_levels)
        if action.drafts:
            verification = self.verify.get(action.style_name, self.verify[verifier])
            seconds += self.drafting.at(length, 0) + verification.token * action.nodes
            if action.K > 1 and not action.is_certain:
                seconds += verification.branching + verification.depth * action.L2
        if sampling.top_p < 1:
            seconds += self.nucleus * (nodes + sum(width for _, width in passes))
        return seconds

    def decision_seconds(self, feature_levels: Sequence[str]) -> float:
        """Seconds of a step's decisions, which see these levels of features or the match."""
        return sum(self.decide.get(level, 0.0) for level in feature_levels)

    def table(
        self,
        actions: tuple[Action, ...],
        verifier: str,
        feature_levels: Sequence[str] = (),
        sampling: Sampling = UNCUT,
    ) -> tuple[Tensor, Tensor]:
        """The measured context lengths, float32 [L], at least two, and `action_seconds` there,
        float32 [L, A].

        Raises InputError where the verifier or a feature level was not measured.
        """
        if verifier not in self.verify:
            raise InputError(f"the latency profile of {self.device} has no times for {verifier}")
        for level in feature_levels:
            if level != MATCH and level not in self.decide:
                raise InputError(
                    f"the latency profile of {self.device} has no time for a decision that sees "
                    f"{level}"
                )
        key = actions, verifier, tuple(feature_levels), sampling
        if key not in self._tables:
            lengths = self.draft.lengths
            if len(lengths) == 1:
                lengths = [0, *lengths]
            rows = []
            for length in lengths:
                seconds_A = [
                    self.action_seconds(action, length, verifier, feature_levels, sampling)
                    for action in actions
                ]
                rows.append(seconds_A)
            self._tables[key] = torch.tensor(lengths, dtype=torch.float32), torch.tensor(rows)
        return self._tables[key]

    @cached_property
    def _tables(self) -> dict[Any, tuple[Tensor, Tensor]]:
        # earlier answers of `table`: tuning and the methods of an evaluation ask for the same ones
        return {}


def distinct_key(action: Action) -> str:
    """The name of a tree's distinct nodes in `LatencyProfile.distinct`."""
    return str(action) if action.children else str(action.K)


def draft_passes(action: Action, length: float, root: bool = False) -> list[tuple[float, int]]:
    """Context length and width in tokens of the draft's forward passes in a step. The first has
    width 2, because after full acceptance it also covers the last accepted token; with `root` it is
    always made, for the decision."""
    if not action.drafts:
        return [(length, 2)] if root else []
    passes: list[tuple[float, int]] = [(length, 2)]
    if not isinstance(action.style, str):  # a tree of levels, drafted one after another
        passed = 0
        for width in action.inner_widths:
            passed += width
            passes.append((length + passed, width))
        return passes
    K, L1, L2 = action[:3]
    # nothing is drafted after the last token of a chain, so it needs no pass
    last = L1 if L2 > 0 else L1 - 1
    passes += [(length + depth, 1) for depth in range(1, last + 1)]
    passes += [(length + L1 + depth * K, K) for depth in range(1, L2)]
    return passes
