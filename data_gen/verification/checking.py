"""`espalier check-verifier MODULE:NAME [style=..]`: does the text that a user's verifier appends
follow the target?

The worlds are so small that all drafts can be listed. Where the verifier gives its law, the law of
the appended text is exact. Where it only draws, drawn texts are compared with the target's by
chi-square, at a false-alarm rate of `ALARM`.

NAME is a function `law(tree, target_probs_NV, draft_probs_NV)` that returns P(accepted node, extra
token), which is checked exactly; a function
`verify(tree, target_probs_NV, draft_probs_NV, generator)` that draws an accepted node and an extra
token, which is checked by chi-square; or a class of `data_gen.verification.Verifier`. Trees are
`DraftTree`s.

Legend: N tree nodes, V vocabulary, D drafts, S sequences of one length.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from data_gen.trees import DraftTree
from data_gen.verification import Verifier
from selector.actions import IID, STYLES, WITHOUT_REPLACEMENT
from selector.schema import InputError

Law = Callable[[DraftTree, Tensor, Tensor], Tensor]
Draw = Callable[[DraftTree, Tensor, Tensor, torch.Generator], Sequence[int]]

ALARM = 1e-4
EXACT = 1e-9  # the largest error of a law
# K, L1, L2
SHAPES = ((1, 1, 0), (1, 2, 0), (2, 0, 1), (3, 0, 1), (1, 3, 0), (2, 0, 2), (2, 1, 1), (3, 0, 2))
MOST_DRAFTS = 100  # of i.i.d. tokens
KINDS = ("random", "zeros", "equal", "one_hot", "peaked")
CASES = tuple(  # vocabulary, shape, kind of world; small ones first
    (V, shape, kind)
    for V, shape, kind in product((2, 3), SHAPES, KINDS)
    if V ** (shape[1] + shape[0] * shape[2]) <= MOST_DRAFTS
)
TOP_K = "top_k"  # the k most likely tokens: a style of other projects' drafts
DRAWS = 4000


class World:
    """The target's and the draft's random distributions by context, a tuple of up to `depth` tokens
    from the root."""

    def __init__(self, vocabulary: int, depth: int, kind: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.target: dict[tuple[int, ...], Tensor] = {}
        self.draft: dict[tuple[int, ...], Tensor] = {}
        for length in range(depth + 1):
            for context in product(range(vocabulary), repeat=length):
                self.target[context], self.draft[context] = self._pair(kind, generator)

    def _pair(self, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        p, q = torch.rand(2, self.vocabulary, generator=generator, dtype=torch.float64) + 1e-3
        if kind == "zeros":  # supports that differ, and may be disjoint
            p = p * (torch.rand(self.vocabulary, generator=generator) < 0.6)
            q = q * (torch.rand(self.vocabulary, generator=generator) < 0.6)
            p[torch.randint(self.vocabulary, (), generator=generator)] += 0.1
            q[torch.randint(self.vocabulary, (), generator=generator)] += 0.1
        elif kind == "equal":
            q = p.clone()
        elif kind == "one_hot":
            p = torch.zeros_like(p)
            p[torch.randint(self.vocabulary, (), generator=generator)] = 1.0
        elif kind == "peaked":  # drafts are mostly duplicates
            q = q**8
        return p / p.sum(), q / q.sum()

    def rows(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        contexts = [_tokens(tree, node) for node in range(len(tree))]
        target_NV = torch.stack([self.target[context] for context in contexts])
        draft_NV = torch.stack([self.draft[context] for context in contexts])
        return target_NV, draft_NV

    def target_probability(self, sequence: tuple[int, ...], start: int = 0) -> float:
        return _probability(self.target, sequence, start)

    def draft_probability(self, path: tuple[int, ...], start: int = 0) -> float:
        return _probability(self.draft, path, start)

    def drafts(
        self, K: int, L1: int, L2: int, style: str = IID
    ) -> Iterator[tuple[float, list[int], list[list[int]]]]:
        """Every delayed draft that can happen, with its probability: (probability, trunk,
        branches)."""
        for trunk in product(range(self.vocabulary), repeat=L1):
            trunk_probability = self.draft_probability(trunk)
            if not trunk_probability:
                continue
            if L2 == 0:
                yield trunk_probability, list(trunk), [[]] * K
                continue
            for probability, first in self.children(trunk, K, style):
                continuations = [self._continuations((*trunk, token), L2) for token in first]
                for choice in product(*continuations):
                    share = prod(p for p, _ in choice)
                    branches = [path for _, path in choice]
                    yield trunk_probability * (probability * share), list(trunk), branches

    def _continuations(
        self, context: tuple[int, ...], length: int
    ) -> list[tuple[float, list[int]]]:
        """The branches of a length whose first token ends the context, and the probabilities of
        their other tokens."""
        drafts: list[tuple[float, list[int]]] = []
        for others in product(range(self.vocabulary), repeat=length - 1):
            path = context + others
            probability = self.draft_probability(path, len(context))
            if probability > 0:
                drafts.append((probability, list(path[len(context) - 1 :])))
        return drafts

    def children(
        self, context: tuple[int, ...], k: int, style: str
    ) -> Iterator[tuple[float, list[int]]]:
        """Every list of k children that a style (or `TOP_K`) can draw after a context, with its
        probability."""
        q = self.draft[context].tolist()
        if style == IID:
            for tokens in product(range(self.vocabulary), repeat=k):
                probability = prod(q[token] for token in tokens)
                if probability:
                    yield probability, list(tokens)
        elif style == WITHOUT_REPLACEMENT:
            support = [token for token in range(self.vocabulary) if q[token] > 0]
            for drawn in permutations(support, min(k, len(support))):
                shares: list[float] = []
                for n, token in enumerate(drawn):
                    mass = sum(q[other] for other in support if other not in drawn[:n])
                    shares.append(q[token] / mass)
                yield prod(shares), list(drawn)
        else:
            likely = self.draft[context].argsort(descending=True, stable=True).tolist()
            rest: list[int] = []
            if style != TOP_K:
                rest = [token for token in likely[k - 1 :] if q[token] > 0]
            if not rest:
                yield 1.0, likely[:k]
            mass = sum(q[token] for token in rest)
            for token in rest:
                yield q[token] / mass, [*likely[: k - 1], token]


def _probability(
    rows: dict[tuple[int, ...], Tensor], sequence: tuple[int, ...], start: int
) -> float:
    """P(the tokens of a sequence from `start` on), by the distributions after each context."""
    probability = 1.0
    for i in range(start, len(sequence)):
        probability *= float(rows[sequence[:i]][sequence[i]])
    return probability


class Drafted(NamedTuple):
    probability: float
    tree: DraftTree
    rows: tuple[Tensor, Tensor]  # of target and draft after each node, float64 [N, V]

    def __str__(self) -> str:
        return ", ".join(str(_tokens(self.tree, nodes[-1])) for nodes in self.tree.branch_nodes)


@dataclass(frozen=True)
class Fault:
    shape: tuple[int, int, int]
    style: str
    vocabulary: int
    what: str
    drafted: Drafted

    def __str__(self) -> str:
        target_NV, draft_NV = self.drafted.rows
        node_lines: list[str] = []
        for n, (p_V, q_V) in enumerate(zip(target_NV.tolist(), draft_NV.tolist(), strict=True)):
            token = self.drafted.tree.token(n)
            laws = f"p = ({_shown(p_V)}), q = ({_shown(q_V)})"
            node_lines.append(f"  node {n}, token {token}: {laws}")
        rows = "\n".join(node_lines)
        return (
            f"wrong on trees (K, L1, L2) = {self.shape} of style {self.style} over "
            f"{self.vocabulary} tokens: {self.what}\n"
            f"for example the tree with the branches {self.drafted}:\n{rows}"
        )


def _shown(probs_V: list[float]) -> str:
    return ", ".join(f"{probability:.4f}" for probability in probs_V)


def check_verifier(verifier: Verifier | Law | Draw, style: str = IID) -> Fault | None:
    """The first fault of a verifier for drafts of a style, with an example; None where there is
    none. A law is checked exactly, and a function that draws with `DRAWS` draws for each case."""
    if isinstance(verifier, Verifier):
        return check_law(verifier.law, style)
    if _needed_arguments(verifier) == 3:
        return check_law(cast(Law, verifier), style)
    return check_draws(cast(Draw, verifier), style, DRAWS)


def check_law(law: Law, style: str) -> Fault | None:
    """The first fault of a verifier that gives P(accepted node, extra token), [N, V]; None where
    there is none."""
    for case in CASES:
        world, drafts, fault = _case(*case, style)
        # by sequence, what each draft adds to its probability
        no_shares = partial(np.zeros, len(drafts))
        shares_by_sequence: defaultdict[tuple[int, ...], np.ndarray] = defaultdict(no_shares)
        for d, drafted in enumerate(drafts):
            law_NV = law(drafted.tree, *drafted.rows)
            reason = _no_law(law_NV, drafted)
            if reason is not None:
                return fault(reason, drafted)
            for node, token in (law_NV > 0).nonzero().tolist():
                appended = (*_tokens(drafted.tree, node), token)
                share = drafted.probability * float(law_NV[node, token])
                shares_by_sequence[appended][d] += share
        for sequence, expected in _sequences(world, case[1]):
            # the verifier appends the first n tokens, and the target writes the others
            share_D = np.zeros(len(drafts))
            for n in range(1, len(sequence) + 1):
                rest = world.target_probability(sequence, start=n)
                share_D += rest * shares_by_sequence[sequence[:n]]
            if abs(share_D.sum() - expected) > EXACT:
                what = (
                    f"the text {sequence} has probability {share_D.sum():.10f}, the target gives "
                    f"it {expected:.10f}"
                )
                return fault(what, drafts[int(share_D.argmax())])
    return None


def check_draws(draw: Draw, style: str, draws: int, seed: int = 0) -> Fault | None:
    """As `check_law`, for a verifier that draws the accepted node and the extra token; `draws` for
    each case."""
    generator = torch.Generator().manual_seed(seed)
    random = np.random.default_rng(seed)
    for case in CASES:
        world, drafts, fault = _case(*case, style)
        number = {sequence: n for n, (sequence, _) in enumerate(_sequences(world, case[1]))}
        seen_SD = np.zeros((len(number), len(drafts)))
        probabilities = [drafted.probability for drafted in drafts]
        for d in random.choice(len(drafts), draws, p=probabilities):
            tree = drafts[d].tree
            p_NV, q_NV = drafts[d].rows
            node, token = map(int, draw(tree, p_NV, q_NV, generator))
            exists = 0 <= node < len(tree) and 0 <= token < world.vocabulary
            if not (exists and p_NV[node, token] > 0):
                what = f"node {node} and token {token} were drawn, which is impossible"
                return fault(what, drafts[d])
            text = (*_tokens(tree, node), token)
            while len(text) <= case[1][1] + case[1][2]:
                text = (*text, int(random.choice(world.vocabulary, p=world.target[text].numpy())))
            seen_SD[number[text], d] += 1
        expected_S = draws * np.array([expected for _, expected in _sequences(world, case[1])])
        if _chance(seen_SD.sum(-1), expected_S) < ALARM / len(CASES):
            worst = int(np.abs(seen_SD.sum(-1) - expected_S).argmax())
            seen = int(seen_SD[worst].sum())
            text = list(number)[worst]
            what = (
                f"the text {text} came {seen} times in {draws}, the target writes it "
                f"{expected_S[worst]:.1f} times"
            )
            return fault(what, drafts[int(seen_SD[worst].argmax())])
    return None


def _case(
    vocabulary: int, shape: tuple[int, int, int], kind: str, style: str
) -> tuple[World, list[Drafted], Callable[[str, Drafted], Fault]]:
    world = World(vocabulary, shape[1] + shape[2], kind, seed=vocabulary)
    drafts = []
    for probability, trunk, branches in world.drafts(*shape, style):
        tree = DraftTree.from_paths(trunk, branches)
        drafts.append(Drafted(probability, tree, world.rows(tree)))
    return world, drafts, lambda what, drafted: Fault(shape, style, vocabulary, what, drafted)


def _tokens(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.token(n) for n in tree.path_to(node))


def _sequences(
    world: World, shape: tuple[int, int, int]
) -> Iterator[tuple[tuple[int, ...], float]]:
    for sequence in product(range(world.vocabulary), repeat=shape[1] + shape[2] + 1):
        yield sequence, world.target_probability(sequence)


def _no_law(law_NV: Tensor, drafted: Drafted) -> str | None:
    if law_NV.shape != drafted.rows[0].shape:
        return f"its law has the shape {list(law_NV.shape)}, not {list(drafted.rows[0].shape)}"
    if not bool(torch.isfinite(law_NV).all()) or float(law_NV.min()) < -EXACT:
        return "its law has numbers that are no probabilities"
    if abs(float(law_NV.sum()) - 1) > EXACT:
        return f"its law sums to {float(law_NV.sum()):.10f}"
    return None


def _chance(seen_S: np.ndarray, expected_S: np.ndarray) -> float:
    """P(a right verifier deviates more), by chi-square; cells of fewer than five are taken
    together."""
    if seen_S[expected_S == 0].sum() > 0:
        return 0.0
    large_S = expected_S >= 5
    seen = np.append(seen_S[large_S], seen_S[~large_S].sum())
    expected = np.append(expected_S[large_S], expected_S[~large_S].sum())
    kept = expected > 0
    statistic = ((seen[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return float(stats.chi2.sf(statistic, max(1, kept.sum() - 1)))


def check_named(words: Sequence[str]) -> bool:
    """Check and print what was found; whether the verifier is right. InputError for what cannot be
    checked."""
    import_path, *others = words
    style = IID
    if others:
        style = others[0].removeprefix("style=")
    if len(others) > 1 or style not in (*STYLES, TOP_K):
        styles = ", ".join((*STYLES, TOP_K))
        raise InputError(
            f"check-verifier: after MODULE:NAME comes style=.., a style among {styles}"
        )
    verifier = named(import_path, style)
    law = getattr(verifier, "law", verifier)
    if not callable(law):
        raise InputError(f"check-verifier: {verifier!r:.60} is neither a function nor a verifier")
    with _errors_named("the verifier raises"):
        fault = check_verifier(law, style)
        how = "the law of the text is the target's, exactly"
        if _needed_arguments(law) != 3:
            how = f"{DRAWS} draws each differ no more than chance allows (false alarms: {ALARM:g})"
    print(fault or f"right: {how}, on {len(CASES)} kinds of trees of style {style}")
    return fault is None


def _needed_arguments(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in parameters)


def named(module_and_name: str, style: str) -> Any:
    """The object at MODULE:NAME, from the working directory, too; a class of verifiers is made for
    the style."""
    module, _, name = module_and_name.partition(":")
    sys.path.insert(0, "")
    try:
        with _errors_named(f"{module_and_name}:"):
            verifier = getattr(importlib.import_module(module), name)
            if isinstance(verifier, type) and issubclass(verifier, Verifier):
                return verifier(style)
            return verifier
    finally:
        sys.path.pop(0)


@contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Whatever the user's code raises becomes one line; its call of `sys.exit` does not end this
    program."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"check-verifier: {what} {type(error).__name__}: {reason}") from error
