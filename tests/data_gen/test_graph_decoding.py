"""A decoding step without host synchronisation writes the text of the eager one, and reads the device once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from data_gen.decoding import AnyDecoder, graph, rehearse
from data_gen.decoding.decoder import Decoder
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import PARTS, Chooser, FixedTree, Random
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from data_gen.verification.on_slots import ON_SLOTS
from selector.actions import EMPTY, Action
from selector.schema import EARLY, FULL, LIGHT, PAIR, SCALARS_KEY, InputError
from tests import waits
from tests.data_gen.families import model_of, nameless
from tests.waits import Operators, Readings

PROMPT = [5, 17, 3, 44, 5, 17]
ACTIONS: list[Action] = [
    *(Action(1, 4, 0), Action(2, 1, 3), Action(4, 0, 5), Action(3, 2, 1), Action(1, 8, 3)),
    *(EMPTY, Action.copy(4)),
]


def pair_of(family: str, noise: float = 0.02, dtype: torch.dtype = torch.float64) -> ModelPair:
    """The target, and itself with noise on the weights."""
    target, draft = model_of(family).to(dtype), model_of(family).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += noise * torch.randn(weights.shape, generator=generator, dtype=dtype)
    return nameless(target, draft)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return pair_of("Llama")


def any_of_them() -> Random:
    return Random(ACTIONS, torch.Generator().manual_seed(3))


def both(
    pair: ModelPair, sampling: Sampling, verifier: str = "traversal", choosers: Callable[[], Chooser] = any_of_them
) -> tuple[GraphDecoder, Decoder]:
    """Decoders whose texts are to be equal, each with a chooser of its own."""
    own = get_verifier(verifier)
    return GraphDecoder(pair, sampling, own, choosers(), 90), Decoder(pair, sampling, own, choosers())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", [cls.name for cls in ON_SLOTS])
def test_the_text_is_the_eager_one(verifier: str, temperature: float, pair: ModelPair) -> None:
    """Token for token, from the same uniform numbers, with another action at every step; a second text likewise."""
    sampling = Sampling(temperature, draft_temperature=max(temperature, 0.3))
    decoders = both(pair, sampling, verifier)
    for prompt in (PROMPT, [7]):
        found, expected = (each.decode(prompt, 40, torch.Generator().manual_seed(1)) for each in decoders)
        assert found.tokens == expected.tokens
        assert [step.accepted for step in found.steps] == [step.accepted for step in expected.steps]
    assert max(step.accepted for step in expected.steps) > 1


@pytest.mark.parametrize("family", ["Mistral, sliding window", "Gemma 2", "Gemma 3, nested", "Phi-3", "GPT-2", "OPT"])
def test_families(family: str) -> None:
    """Beyond the sliding window, where there is one. Mixtures of experts have no float64, in which texts are equal."""
    decoders = both(pair_of(family, 0.005), Sampling(1.0))
    found, expected = (each.decode(PROMPT, 40, torch.Generator().manual_seed(0)) for each in decoders)
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("prompt", [PROMPT, [7]], ids=len)
def test_a_draft_that_has_been_asked_for_nothing_catches_up(prompt: list[int], pair: ModelPair) -> None:
    """It passes what was committed meanwhile, however much."""

    class Seldom:
        feature_levels = ()

        def __init__(self) -> None:
            self.steps = 0

        def select(self, features: object) -> Action:
            self.steps += 1
            return Action(2, 1, 2) if self.steps in (8, 55, 56) else EMPTY

    decoders = both(pair, Sampling(1.0), choosers=Seldom)
    found, expected = (each.decode(prompt, 70, torch.Generator().manual_seed(1)) for each in decoders)
    assert found.tokens == expected.tokens


class Watching:
    """Keeps the features that it is asked with; with early ones it seldom answers at once."""

    def __init__(self, levels: tuple[str, ...]) -> None:
        self.feature_levels = levels
        self.seen: list[torch.Tensor] = []

    def select(self, features: dict[str, torch.Tensor] | None) -> Action | None:
        if features is not None:
            self.seen.append(features[SCALARS_KEY].clone())
        asked_again = (
            features is not None and len(features[SCALARS_KEY]) < len(PAIR.scalars) and LIGHT in self.feature_levels
        )
        return None if asked_again and len(self.seen) % 4 else ACTIONS[len(self.seen) % len(ACTIONS)]


@pytest.mark.parametrize("levels", [(EARLY,), (LIGHT,), (EARLY, LIGHT)], ids=str)
def test_features_are_the_eager_ones(levels: tuple[str, ...], pair: ModelPair) -> None:
    choosers = Watching(levels), Watching(levels)
    decoders = both(pair, Sampling(0.5), choosers=partial(next, iter(choosers)))
    found, expected = (each.decode(PROMPT, 40, torch.Generator().manual_seed(1)) for each in decoders)
    assert found.tokens == expected.tokens and len(choosers[1].seen) > 5
    torch.testing.assert_close(choosers[0].seen, choosers[1].seen, atol=1e-5, rtol=1e-5)


def steps_of(decoder: AnyDecoder) -> Iterator[Any]:
    """Steps once the first, which allocates, is over."""
    steps = decoder.steps(PROMPT, torch.Generator().manual_seed(1))
    next(steps)
    return steps


@pytest.mark.parametrize(
    ("verifier", "action"),
    [*product(("traversal",), ACTIONS), ("specinfer", Action(2, 1, 3)), ("lifted_uniform", Action(2, 1, 3))],
    ids=str,
)
def test_a_step_reads_the_device_once(verifier: str, action: Action, pair: ModelPair) -> None:
    """Every `.tolist()`, `.item()`, `bool()` or `nonzero` would wait; the eager step makes several of them."""
    decoder = GraphDecoder(pair, Sampling(1.0), get_verifier(verifier), FixedTree(action), 80)
    steps = steps_of(decoder)
    for _ in range(3):
        with Readings() as readings, Operators() as operators:
            next(steps)
        assert (readings.count, operators.reads) == (1, 0)


def test_a_step_that_shows_the_drafts_rows_reads_twice(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the decision, by one copy to the host, on which the features are computed; and at the end."""
    monkeypatch.setattr(waits, "METHODS", (torch.Tensor.cpu,))
    chooser = FixedTree(Action(2, 1, 3), (LIGHT,))
    steps = steps_of(GraphDecoder(pair, Sampling(1.0), get_verifier("traversal"), chooser, 80))
    for _ in range(3):
        with Readings() as readings:
            step, _ = next(steps)
        assert readings.count == 1
        assert set(step.seconds) == set(PARTS) and min(step.seconds.values()) > 0


def test_what_is_counted_as_a_reading(pair: ModelPair) -> None:
    steps = steps_of(Decoder(pair, Sampling(1.0), get_verifier("traversal"), FixedTree(Action(2, 1, 3))))
    with Readings() as readings, Operators() as operators:
        next(steps)
        before = operators.reads
        rows, place = torch.ones(3, 2), torch.tensor(1)
        found = [bool(rows.sum() > 0), int(place), rows[place], rows.nonzero(), float(place), place.item()]
    assert readings.count > 1
    assert operators.reads == before + len(found)  # to index with a tensor of no axes reads it, too


def test_what_is_refused(pair: ModelPair) -> None:
    def decoder(verifier: str = "traversal", chooser: Chooser | None = None, length: int = 20) -> GraphDecoder:
        return GraphDecoder(pair, Sampling(1.0), get_verifier(verifier), chooser or FixedTree(Action(1, 3, 0)), length)

    with pytest.raises(ValueError, match=r"khisti .* has to look"):
        decoder("khisti")
    with pytest.raises(InputError, match="this selector asks for full features"):
        decoder(chooser=FixedTree(EMPTY, (FULL,)))
    apart = pair_of("Llama")
    apart.draft.to("meta")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="whole on one device"):
        GraphDecoder(apart, Sampling(1.0), get_verifier("traversal"), FixedTree(EMPTY), 20)
    with pytest.raises(InputError, match=r"\(2, 0, 2, greedy\): the graph decoder drafts i.i.d. branches"):
        decoder(chooser=FixedTree(Action(2, 0, 2, "greedy"))).decode([1], 5, torch.Generator())
    with pytest.raises(InputError, match="this decoder was made for 20"):
        decoder().decode([1] * 18, 30, torch.Generator())
    with torch.no_grad():
        broken = pair_of("Llama")
        broken.target.get_output_embeddings().weight[3] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        GraphDecoder(broken, Sampling(1.0), get_verifier("traversal"), FixedTree(EMPTY), 20).decode(
            [1], 3, torch.Generator()
        )


def test_a_rehearsal_asks_and_decodes_with_every_action(pair: ModelPair) -> None:
    asked: list[Action] = []
    chooser = Random(ACTIONS, torch.Generator().manual_seed(3))
    chooser.select = lambda features: asked.append(chooser.actions[0]) or chooser.actions[0]  # type: ignore[method-assign]
    rehearse(replace(pair, decoder="graph"), Sampling(1.0), get_verifier("traversal"), chooser, ACTIONS, PROMPT, 12)
    assert len(asked) >= len(ACTIONS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("verifier", [cls.name for cls in ON_SLOTS])
def test_a_recorded_step_is_the_same_step(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as a CUDA graph writes what the same work writes when it is queued anew."""
    own = pair_of("Llama", dtype=torch.float32)
    for model in (own.target, own.draft):
        model.cuda()
    texts = []
    for runs_before in (10**9, 1):
        monkeypatch.setattr(graph, "WARM", runs_before)
        own.spare.clear()
        decoder = GraphDecoder(own, Sampling(1.0), get_verifier(verifier), any_of_them(), 80)
        texts.append(decoder.decode(PROMPT, 60, torch.Generator(device="cuda").manual_seed(1)).tokens)
        (memory,) = own.spare.popitem()[1]
        assert bool(memory._recorded) == (runs_before == 1)
    assert texts[0] == texts[1]
