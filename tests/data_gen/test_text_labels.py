"""Labels along a text: by enumeration of texts and siblings, and what a text's sorted rows
answer."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from data_gen.text_labels.labels import TextLabeller, label_text
from data_gen.verification import VERIFIERS, get_verifier, styled
from data_gen.verification.distributions import Rows
from data_gen.verification.ranking import SortedRows
from selector.actions import Action, ActionSpace
from tests.data_gen.worlds import KINDS, World, normalised

LABELLED = [name for name in VERIFIERS if name not in ("khisti", "greedy_block")]
STYLES = ("greedy",)
SMALL = ActionSpace(2, 1, 1)
WORLDS = [
    *[(2, kind, 1, ActionSpace(3, 1, 2, styles=STYLES)) for kind in KINDS],
    *[(2, kind, 3, ActionSpace(2, 2, 2)) for kind in KINDS],
    (2, "random", 4, ActionSpace(1, 2, 2)),
    *[(3, kind, 2, ActionSpace(3, 1, 1, styles=STYLES)) for kind in KINDS],
    *[(2, kind, 5, ActionSpace(2, 0, 1, styles=STYLES, wide=(5, 8))) for kind in KINDS],
    (2, "random", 6, ActionSpace(2, 1, 2, wide=(4,))),
    *[(2, kind, 7, ActionSpace(2, 0, 2, children=((2, 2), (3, 2)))) for kind in KINDS],
    (3, "random", 8, ActionSpace(1, 0, 2, children=((2, 2),))),
    (2, "zeros", 9, ActionSpace(1, 0, 3, children=((2, 1, 2),))),
]


def along(world: World, text: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and rows of a text that starts at the world's root; the token before the root is none
    of its own."""
    contexts = [text[:i] for i in range(len(text) + 1)]
    return (
        torch.tensor((0, *text)),
        torch.stack([world.target[c] for c in contexts]),
        torch.stack([world.draft[c] for c in contexts]),
    )


def random_text(
    length: int, vocabulary: int, seed: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens drawn from target rows that are there, with a draft that resembles them."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise = scale * torch.randn(
        2, length, vocabulary, generator=generator, dtype=torch.float64
    )
    p_TV, q_TV = logits.softmax(-1), (logits + noise / 2).softmax(-1)
    drawn_T = p_TV.multinomial(1, generator=generator)[:, 0]
    return torch.cat([drawn_T[-1:], drawn_T[:-1]]), p_TV, q_TV


def labels_by_blocks(
    text: tuple[Tensor, Tensor, Tensor],
    size: int,
    space: ActionSpace,
    siblings: int | None = None,
    draft_vocabulary: Any = None,
) -> Tensor:
    tokens_T, p_TV, q_TV = text
    labeller = TextLabeller(
        tokens_T, LABELLED, siblings, torch.Generator().manual_seed(0), space, draft_vocabulary
    )
    for block in zip(p_TV.split(size), q_TV.split(size), strict=True):
        labeller.add(*block)
    return labeller.survivals()


@pytest.mark.parametrize(("vocabulary", "kind", "seed", "space"), WORLDS)
def test_the_mean_over_texts_is_the_block_efficiency(
    vocabulary: int, kind: str, seed: int, space: ActionSpace
) -> None:
    """For every action and verifier (1e-12); both sides by enumeration."""
    world = World(vocabulary, space.depth, kind, seed)
    mean_VA = torch.zeros(len(LABELLED), len(space), dtype=torch.float64)
    for text in product(range(vocabulary), repeat=space.depth):
        if (probability := world.target_probability(text)) > 0:
            mean_VA += (
                probability
                * label_text(*along(world, text), LABELLED, siblings=None, space=space)[:, 0]
            )
    for v, name in enumerate(LABELLED):
        for a, action in enumerate(space):
            verifier = styled(get_verifier(name), action.style_name)
            if action.children:
                trees = world.branching_trees(action.children)
            else:
                trees = world.delayed_trees(*action[:3], action.style_name)
            law_CV = world.appended_law(verifier, trees)
            assert float(mean_VA[v, a]) == pytest.approx(
                world.block_efficiency(law_CV), abs=1e-12
            ), (name, action)


@pytest.mark.parametrize("siblings", [1, 4])
@pytest.mark.parametrize("kind", ["random", "peaked", "zeros"])
def test_sampled_siblings_are_unbiased(kind: str, siblings: int) -> None:
    """Within 4 standard errors of all siblings enumerated, for every action; a wrong alarm in 6e-5
    of comparisons, so in less than one of 10 runs with other seeds (6 cases, 10 verifiers with
    branches, 24 trees with branches, far from independent).

    No sibling is so rare that the error would not show it. Where the draft is peaked, mostly all
    branches stay on the text. The text stands so often in a row that 4,000 siblings are drawn
    independently.
    """
    space = ActionSpace(3, 1, 2, styles=STYLES, wide=(6,), children=((2, 2),))
    draws = 4000 // siblings
    tokens_T = torch.tensor([0, 1, 1, 0, 2])
    p_TV, q_TV = (
        torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.3
    )
    if kind == "peaked":
        q_TV[torch.arange(4), tokens_T[1:]] += 6
    elif kind == "zeros":  # of the tokens that are not the text's next
        p_TV[[0, 1, 3], [0, 0, 1]] = 0
        q_TV[[0, 2, 3], [2, 1, 1]] = 0
    p_TV, q_TV = normalised(p_TV), normalised(q_TV)
    expected_VA = label_text(tokens_T, p_TV, q_TV, LABELLED, siblings=None, space=space)[:, 0]
    repeated = tokens_T.repeat(draws), p_TV.repeat(draws, 1), q_TV.repeat(draws, 1)
    labels_VRA = label_text(*repeated, LABELLED, siblings, torch.Generator().manual_seed(5), space)
    samples_VNA = labels_VRA[:, :: len(tokens_T)]
    assert samples_VNA.shape[1] == draws
    error_VA = samples_VNA.std(1) / draws**0.5
    assert ((samples_VNA.mean(1) - expected_VA).abs() <= 4 * error_VA + 1e-12).all()
    assert (error_VA > 0).sum() > 80  # siblings were drawn
    assert (error_VA < 0.02 * expected_VA).all()  # and often enough to tell


@pytest.mark.parametrize(
    "space", [ActionSpace(3, 1, 2), ActionSpace(2, 2, 1), ActionSpace(2, 0, 3)], ids=str
)
def test_a_root_depends_on_its_own_look_ahead_alone(space: ActionSpace) -> None:
    """Every root of a text, which comes in any blocks, has the labels that it has in a text that
    begins there and ends with its look-ahead."""
    text = random_text(11, 3, seed=3)
    labels_VRA = label_text(*text, LABELLED, siblings=None, space=space)
    assert labels_VRA.shape == (len(LABELLED), 11 - space.depth, len(space))
    for size in (1, 2, 5):
        by_blocks = space.efficiencies(labels_by_blocks(text, size, space))
        assert torch.allclose(by_blocks, labels_VRA, atol=1e-12)
    for root in range(11 - space.depth):
        part = [values[root : root + space.depth + 1] for values in text]
        alone_VA = label_text(*part, LABELLED, siblings=None, space=space)[:, 0]
        assert torch.allclose(labels_VRA[:, root], alone_VA, atol=1e-12), root


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_at_temperature_0_a_greedy_tree_holds_the_most_likely_tokens(rank: int) -> None:
    """Its first branches reach the text if the draft's logits rank the text's token among the first
    K; the branches go on as chains of the most likely tokens, which are the text here."""
    space = ActionSpace(3, 1, 2, styles=STYLES)
    tokens_T = torch.tensor([0, 1, 4, 2])
    p_TV = one_hot(tokens_T.roll(-1), 6).double()
    logits_TV = torch.arange(6.0) + 10 * p_TV
    logits_TV[0, 1] = 5.5 - rank  # after the root; elsewhere the draft is right
    q_TV = one_hot(logits_TV.argmax(-1), 6).double()
    labeller = TextLabeller(tokens_T, LABELLED, space=space)
    labeller.add(p_TV, q_TV, logits_TV)
    efficiency_VA = space.efficiencies(labeller.survivals())[:, 0]
    for K in (2, 3):
        of_tree_V = efficiency_VA[:, space.index(Action(K, 0, 2, "greedy"))]
        assert of_tree_V.unique().tolist() == [3.0 if rank < K else 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_labels_of_peaked_rows_are_finite(dtype: torch.dtype) -> None:
    """Probabilities from one down to what vanishes in short floats, and supports cut as top-p
    does."""
    tokens_T, p_TV, q_TV = random_text(40, 300, seed=6, scale=12.0)
    for rows_TV in (p_TV, q_TV):
        rows_TV[rows_TV < rows_TV.topk(20).values[:, -1:]] = 0
    p_TV[torch.arange(39), tokens_T[1:]] += 1e-6  # what was drawn stays possible
    labels = label_text(
        tokens_T,
        p_TV.to(dtype),
        q_TV.to(dtype),
        LABELLED,
        2,
        torch.Generator().manual_seed(1),
        ActionSpace(4, 2, 3),
    )
    assert torch.isfinite(labels).all()
    assert (labels >= 1).all()


@pytest.mark.parametrize("vocabulary", [2, 7, 8, 33])
def test_sorted_sums_are_those_of_the_unsorted_rows(vocabulary: int) -> None:
    """Any `a` and `b`, some of them 0 and some right at a token's ratio; supports that differ and
    ratios that are equal; rows that do not sum to one; short floats."""
    generator = torch.Generator().manual_seed(12)
    smooth = torch.rand(2, 6, vocabulary, generator=generator, dtype=torch.float64) ** 4
    # sixteen draws in each row, so that all quotients are exact
    drawn = torch.randint(0, vocabulary, (2, 6, 16), generator=generator)
    tied = one_hot(drawn, vocabulary).sum(-2).double()
    tied[1, 0] = tied[0, 0]
    nodes_M = torch.randint(0, 6, (400,), generator=generator)
    any_a_M, any_b_M = torch.rand(2, 400, generator=generator, dtype=torch.float64)
    any_a_M[:10], any_b_M[5:20] = 0, 0
    whole_a_M, whole_b_M = torch.randint(0, 9, (2, 400), generator=generator).double()
    for (p_PV, q_PV), a_M, b_M in (
        (smooth, any_a_M, any_b_M),
        (tied, any_a_M, any_b_M),
        (tied, whole_a_M, whole_b_M),
    ):
        expected_M = Rows(p_PV, q_PV).at(nodes_M).excess(a_M, b_M)
        excess_M = SortedRows(p_PV, q_PV).at(nodes_M).excess(a_M, b_M)
        torch.testing.assert_close(excess_M, expected_M, rtol=0, atol=1e-11)
    for dtype in (torch.float32, torch.bfloat16):
        short_p_PV, short_q_PV = smooth.to(dtype)
        expected_M = Rows(short_p_PV, short_q_PV).at(nodes_M).excess(any_a_M, any_b_M)
        excess_M = SortedRows(short_p_PV, short_q_PV).at(nodes_M).excess(any_a_M, any_b_M)
        torch.testing.assert_close(excess_M, expected_M, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("siblings", [None, 2])
def test_tokens_that_the_draft_cannot_say_need_no_place_in_the_order(siblings: int | None) -> None:
    tokens_T, p_TV, q_TV = random_text(24, 6, seed=9)
    said_S = torch.tensor([1, 2, 5])
    # they need not sum to one
    q_TV = torch.zeros_like(q_TV).index_copy(-1, said_S, q_TV[:, said_S])
    space = ActionSpace(3, 1, 2, styles=STYLES)
    few = labels_by_blocks((tokens_T, p_TV, q_TV), 7, space, siblings, said_S)
    every = labels_by_blocks((tokens_T, p_TV, q_TV), 7, space, siblings)
    assert torch.allclose(few, every, rtol=0, atol=1e-12) and every.max() > 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_ends_of_the_unit_interval_draw_possible_tokens(dtype: torch.dtype) -> None:
    """Tokens of probability 0 stand first, last and between in the sorted rows; there p may be 0 as
    well."""
    p_PV = torch.tensor(
        [[0.1, 0.2, 0.0, 0.3, 0.4, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]], dtype=dtype
    )
    q_PV = torch.tensor(
        [[0.0, 0.3, 0.0, 0.0, 0.6, 0.1], [0.3, 0.7, 0.0, 0.0, 0.0, 0.0]], dtype=dtype
    )
    uniform_n = torch.tensor([0.0, 1e-300, 0.5, 1 - 2**-53], dtype=torch.float64)
    drawn_Pn = SortedRows(p_PV, q_PV).draw(torch.arange(2), uniform_n.expand(2, -1))
    assert (q_PV.gather(-1, drawn_Pn) > 0).all()


@pytest.mark.parametrize(
    ("tokens", "target", "draft", "names", "space", "message"),
    [
        (5, 5, 5, ["traversal", "khisti"], SMALL, "khisti has no labels along a text"),
        (5, 5, 5, ["greedy_block"], SMALL, "greedy_block has no labels along a text"),
        (8, 7, 8, ["naive"], SMALL, "8 tokens need as many rows; target has 7, draft 8"),
        (4, 4, 4, ["naive"], ActionSpace(2, 2, 2), "4 tokens leave no root with a look-ahead of 4"),
    ],
)
def test_what_cannot_be_labelled_is_named(
    tokens: int, target: int, draft: int, names: list[str], space: ActionSpace, message: str
) -> None:
    tokens_T, p_TV, q_TV = random_text(tokens, 3, seed=8)
    with pytest.raises(ValueError, match=message):
        label_text(tokens_T, p_TV[:target], q_TV[:draft], names, space=space)


@pytest.mark.parametrize("size", [2, 8])
def test_a_text_that_the_target_cannot_write_or_that_lacks_rows_is_refused(size: int) -> None:
    tokens_T, p_TV, q_TV = random_text(8, 3, seed=9)
    labeller = TextLabeller(tokens_T, ["naive"], space=SMALL)
    labeller.add(p_TV[:5], q_TV[:5])
    with pytest.raises(ValueError, match="8 tokens need as many rows; there are 5"):
        labeller.survivals()
    p_TV[4, tokens_T[5]] = 0
    with pytest.raises(ValueError, match="token 5 of the text has probability 0 under the target"):
        labels_by_blocks((tokens_T, p_TV, q_TV), size, SMALL)
