"""Losslessness by enumeration, with a policy in the loop that decides again after every trunk token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from data_gen.choosers import StoppingHead
from data_gen.drafting import Drawn, draft_tree
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification import VERIFIERS, exchangeable, get_verifier
from selector.actions import Action
from tests.data_gen.worlds import KINDS, World

DEPTH = 3
SHAPES = [(1, 0), (2, 1), (3, 1), (2, 2)]  # (K, L2); no branches first


def random_policy(seed: int) -> Callable[[tuple[int, ...]], Action]:
    """Stops, drafts on, or branches, at random for every trunk; the decisions are as many as there are trunks."""
    generator = torch.Generator().manual_seed(seed)
    decisions: dict[tuple[int, ...], Action] = {}

    def decide(trunk: tuple[int, ...]) -> Action:
        if trunk not in decisions:
            left = DEPTH - len(trunk)
            if left > 0 and torch.rand((), generator=generator) < 0.5:
                decisions[trunk] = Action(1, len(trunk) + 1, 0)  # draft on
            else:
                fitting = [(K, L2) for K, L2 in SHAPES if left >= L2]
                K, L2 = fitting[int(torch.randint(len(fitting), (), generator=generator))]
                decisions[trunk] = Action(K, len(trunk), L2)
        return decisions[trunk]

    return decide


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VERIFIERS)
def test_deciding_along_the_trunk_is_lossless(name: str, kind: str) -> None:
    world = World(3, depth=DEPTH, kind=kind, seed=21)
    for seed in range(3):
        law_CV = world.appended_law(get_verifier(name), world.decided_trees(random_policy(seed)))
        assert world.losslessness_error(law_CV, DEPTH) < 1e-12, seed


@pytest.mark.parametrize("kind", KINDS)
def test_the_stopping_head_is_lossless(kind: str) -> None:
    """Its own decisions, replayed on every trunk that can be drawn; the state is one of the trunk so far."""
    world, sampling, stops = World(3, depth=DEPTH, kind=kind, seed=21), Sampling(), set()

    def accepts(hidden_D: torch.Tensor, scalars_F: torch.Tensor) -> float:
        return float(torch.sigmoid(2.5 + hidden_D.sum() + scalars_F[1]))

    def decide(trunk: tuple[int, ...]) -> Action:
        chooser = StoppingHead(accepts, 0.3, DEPTH, sampling)
        for depth in range(len(trunk) + 1):
            before = trunk[: max(depth - 1, 0)]
            hidden_D = torch.randn(4, generator=torch.Generator().manual_seed(world.number[before]))
            token = trunk[depth - 1] if depth else -1
            action = chooser.revise(Drawn(depth, token, world.draft[before], hidden_D), 2)
        if len(trunk) == action.L1:
            stops.add(action.L1)
        return action

    law_CV = world.appended_law(get_verifier("block"), world.decided_trees(decide))
    assert world.losslessness_error(law_CV, DEPTH) < 1e-12
    assert stops == {1, 2, 3}


def law_in_exchange(world: World, names: list[str], seed: int) -> torch.Tensor:
    """The law where every tree, by its trunk and shape, is verified by one of several verifiers, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[tuple[float, DraftTree]]] = {name: [] for name in names}
    drawn: dict[tuple, str] = {}
    for probability, tree in world.decided_trees(random_policy(seed)):
        trunk = tuple(tree.token(node) for node in tree.path_to(tree.branch_nodes[0][0])) if tree.branch_nodes else ()
        name = names[int(torch.randint(len(names), (), generator=generator))]
        parts[drawn.setdefault((trunk, len(tree.branch_nodes)), name)].append((probability, tree))
    return sum(world.appended_law(get_verifier(name), iter(part)) for name, part in parts.items())


@pytest.mark.parametrize("kind", ["random", "zeros", "peaked"])
def test_verifiers_alike_on_a_chain_are_lossless_in_exchange(kind: str) -> None:
    world = World(3, depth=DEPTH, kind=kind, seed=21)
    for chain in ("naive", "block"):
        names = [name for name in VERIFIERS if VERIFIERS[name].on_a_chain == chain]
        assert len(names) > 4
        for seed in (0, 3, 5):
            assert world.losslessness_error(law_in_exchange(world, names, seed), DEPTH) < 1e-12, seed


@pytest.mark.parametrize("names", [["naive_tree", "traversal"], ["nss", "specinfer"], ["nss", "lifted_uniform"]])
def test_others_are_not(names: list[str]) -> None:
    world = World(3, depth=DEPTH, kind="random", seed=21)
    assert max(world.losslessness_error(law_in_exchange(world, names, seed), DEPTH) for seed in (0, 3, 5)) > 1e-4
    assert not exchangeable(*map(get_verifier, names))


@pytest.mark.parametrize("name", ["specinfer", "lifted_uniform"])
def test_the_enumeration_notices_a_policy_that_peeks(name: str) -> None:
    """It drops the second branch by the first one's token; Traversal, which tries siblings in order, would bear it."""
    world = World(3, depth=2, kind="random", seed=3)

    def peeking() -> object:
        for probability, trunk, branches in world.drafts(2, 0, 1):
            yield probability, DraftTree.from_paths(trunk, branches[:1] if branches[0] == [0] else branches)

    law_CV = world.appended_law(get_verifier(name), peeking())
    assert world.losslessness_error(law_CV, 2) > 1e-4


def test_drafting_follows_the_decisions(pair: ModelPair) -> None:
    """Every decision sees the token just drawn, where it was drawn, and nothing later; then it is carried out."""
    sampling, seen = Sampling(0.7), []
    draft = CachedModel(pair.draft)
    root = sampling.probabilities(draft.extend([5, 17, 203]).logits_BWV[0, -1])
    plan = [Action(1, 5, 0), Action(1, 8, 2), Action(1, 4, 0), Action(2, 3, 2)]

    def revise(drawn: Drawn) -> Action:
        seen.append(drawn)
        return plan[drawn.depth]

    drafted = draft_tree(draft, root, Action(1, 5, 0), sampling, torch.Generator().manual_seed(1), revise=revise)
    assert drafted.action == Action(2, 3, 2)
    tree = drafted.tree
    assert len(tree.branch_nodes) == 2 and int(tree.depths_N.max()) == 5
    trunk = tree.path_to(tree.branch_nodes[0][0])
    assert [drawn.token for drawn in seen[1:]] == [tree.token(node) for node in trunk]
    assert [drawn.depth for drawn in seen] == [0, 1, 2, 3]
    assert all(drawn.hidden_D is None and torch.equal(drawn.probs_V, root) for drawn in seen[:2])
    for drawn, parent in zip(seen[2:], trunk, strict=False):
        assert torch.equal(drawn.probs_V, drafted.probs_NV[parent])
        assert torch.equal(drawn.hidden_D, drafted.hidden_ND[parent])


def test_a_shorter_trunk_than_what_is_drafted_is_refused(pair: ModelPair) -> None:
    draft = CachedModel(pair.draft)
    root = Sampling().probabilities(draft.extend([5, 17]).logits_BWV[0, -1])

    def revise(drawn: Drawn) -> Action:
        return Action(2, 0, 3) if drawn.depth else Action(1, 3, 0)

    with pytest.raises(ValueError, match="shorter trunk"):
        draft_tree(draft, root, Action(1, 3, 0), Sampling(), torch.Generator().manual_seed(1), revise=revise)
