"""Verification on fixed slots: the same exact laws as on merged trees, and so lossless."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from data_gen.trees import DraftTree, Layout
from data_gen.verification import VERIFIERS, get_verifier
from data_gen.verification.on_slots import ON_SLOTS, law_on_slots
from selector.actions import EMPTY, Action
from tests.data_gen.worlds import KINDS, World

CPU = torch.device("cpu")
NAMES = [cls.name for cls in ON_SLOTS]
SHAPES = [EMPTY, Action(1, 3, 0), Action(2, 0, 2), Action(2, 1, 2), Action(3, 0, 2), Action(4, 1, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("action", SHAPES, ids=str)
def test_the_law_of_every_draft_is_that_on_its_merged_tree(action: Action, kind: str) -> None:
    """Of every draft of the shape over two tokens that may be drawn (1e-12)."""
    layout = Layout(action, CPU)
    world = World(2, layout.depth, kind, seed=3)
    parents = layout.parents_S[1:].tolist()
    ends = [layout.slot(layout.L2, k) for k in range(layout.K)] if layout.L2 else []
    for tokens in product(range(2), repeat=layout.size - 1):
        texts: list[tuple[int, ...]] = [()]  # at every slot
        for parent, token in zip(parents, tokens, strict=True):
            texts.append((*texts[parent], token))
        if any(world.draft[texts[parent]][token] == 0 for parent, token in zip(parents, tokens, strict=True)):
            continue
        p_SV, q_SV = (torch.stack([rows[text] for text in texts]) for rows in (world.target, world.draft))
        tree = DraftTree.from_paths(texts[layout.L1], [texts[end][layout.L1 :] for end in ends] or [[]])
        for name in NAMES:
            verifier = get_verifier(name)
            stops_S, extra = law_on_slots(verifier, layout, torch.tensor([0, *tokens]), p_SV, q_SV)
            law_NV = torch.zeros(len(tree), 2, dtype=torch.float64)
            for slot in stops_S.nonzero()[:, 0].tolist():
                extra_V = extra(torch.tensor([slot]))[0]
                law_NV[tree.node_of(texts[slot])] += stops_S[slot] * extra_V / extra_V.sum()
            assert (law_NV - verifier.law(tree, *world.rows(tree))).abs().max() < 1e-12, (name, tokens)


@pytest.mark.parametrize("name", sorted(set(VERIFIERS) - set(NAMES)))
def test_verifiers_that_look_are_refused(name: str) -> None:
    layout = Layout(EMPTY, CPU)
    with pytest.raises(ValueError, match=f"{name} .* has to look"):
        law_on_slots(get_verifier(name), layout, torch.zeros(1, dtype=torch.int64), torch.ones(1, 2), torch.ones(1, 2))
