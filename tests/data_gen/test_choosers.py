"""Choosers that decide again while drafting."""

from __future__ import annotations

import pytest
import torch

from data_gen.choosers import EntropyStop, SelectorChooser, StoppingHead, chooser_of
from data_gen.decoding import Decoder, Fixed, Revising
from data_gen.drafting import Drawn, draft_tree
from data_gen.features import TrunkFeatures
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.verification import get_verifier
from selector.actions import Action, ActionSpace
from selector.schema import TRUNK_SCALARS
from selector.stopping import StoppingNetwork, TokenAcceptance

PROMPT = [5, 17, 203, 44, 91]
SPACE = ActionSpace.default()


class Recorded:
    """Stands where an exported selector under one sampling setting stands; stops at a depth that varies by step."""

    latency = None
    on_trunk = True
    first = 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, float, torch.Tensor]] = []

    def select(self, features: object) -> Action:
        return SPACE.chain(16)

    def decide(self, hidden_D: torch.Tensor, scalars_F: torch.Tensor, drafted: int, length: float) -> Action:
        assert hidden_D.shape == (32,) and scalars_F.shape == (len(TRUNK_SCALARS),)
        self.asked.append((drafted, length, scalars_F))
        if drafted == 1 + int(length) % 4:
            return Action(3, drafted, 2) if int(length) % 3 == 0 else SPACE.chain(drafted)
        return SPACE.chain(16)


def test_an_exported_selector_decides_after_every_trunk_token(pair: ModelPair) -> None:
    tuned = Recorded()
    chooser = chooser_of(tuned, Sampling(0.8, 0.9))
    assert isinstance(chooser, SelectorChooser) and isinstance(chooser, Revising)
    decoder = Decoder(pair, Sampling(0.8, 0.9), get_verifier("lifted_uniform"), chooser)
    decoded = decoder.decode(PROMPT, 40, torch.Generator().manual_seed(1))
    expected = []
    for step in decoded.steps:
        stop = 1 + step.length % 4
        assert step.action == (Action(3, stop, 2) if step.length % 3 == 0 else SPACE.chain(stop))
        assert step.seconds["select"] > 0
        expected += [(drafted, step.length) for drafted in range(stop + 1)]
    assert [(drafted, length) for drafted, length, _ in tuned.asked] == expected
    for drafted, length, scalars in tuned.asked:
        known = dict(zip((scalar.name for scalar in TRUNK_SCALARS), scalars.tolist(), strict=True))
        assert known["drafted"] == drafted and known["context_length"] == length
        assert known["temperature"] == pytest.approx(0.8) and known["top_p"] == pytest.approx(0.9)
        assert 0 >= known["token_logprob"] >= known["path_logprob"]


def test_a_selector_that_does_not_decide_along_the_trunk_is_not_asked(pair: ModelPair) -> None:
    tuned = Recorded()
    tuned.on_trunk = False
    chooser = chooser_of(tuned, Sampling())
    assert not isinstance(chooser, Revising)
    steps = Decoder(pair, Sampling(), get_verifier("block"), chooser).decode(PROMPT, 9, torch.Generator()).steps
    assert not tuned.asked and {step.action for step in steps} == {SPACE.chain(16)}


@pytest.mark.parametrize("entropy", [0.0, 5.0, 100.0])
def test_the_entropy_stop_ends_a_chain_at_the_first_doubt(pair: ModelPair, entropy: float) -> None:
    decoder = Decoder(pair, Sampling(0.7), get_verifier("block"), EntropyStop(entropy, longest=6))
    steps = decoder.decode(PROMPT, 40, torch.Generator().manual_seed(1)).steps
    lengths = {step.action.L1 for step in steps}
    assert all(step.action.K == 1 for step in steps)
    assert lengths == {0.0: {1}, 100.0: {6}}.get(entropy, lengths) and max(lengths) <= 6
    if entropy == 5.0:
        assert len(lengths) > 1


def acceptance() -> TokenAcceptance:
    """A head as training leaves it, apart from its weights: it varies with the state."""
    torch.manual_seed(3)
    network = StoppingNetwork(32 + len(TRUNK_SCALARS))
    network.head.bias.data.fill_(1.5)
    return TokenAcceptance(network.eval())


@pytest.mark.parametrize("rejected", [0.0, 0.3, 0.6, 1.0])
def test_the_stopping_head_ends_a_chain_where_a_rejection_is_likely(pair: ModelPair, rejected: float) -> None:
    """Stated anew from what was drafted: the first depth at which one minus the product passes the threshold."""
    accepts, sampling, longest = acceptance(), Sampling(0.7), 6
    stops = set()
    for seed in range(12):
        draft = CachedModel(pair.draft)
        root = draft.extend(PROMPT)
        root_probs_V, root_hidden_D = sampling.probabilities(root.logits_BWV[0, -1]), root.hidden_BWD[0, -1]
        chooser, seen = StoppingHead(accepts, rejected, longest, sampling), []

        def revise(drawn: Drawn, chooser=chooser, seen=seen, root_hidden_D=root_hidden_D) -> Action:
            seen.append(drawn._replace(hidden_D=root_hidden_D) if drawn.hidden_D is None else drawn)
            return chooser.revise(seen[-1], len(PROMPT))

        generator = torch.Generator().manual_seed(seed)
        drafted = draft_tree(draft, root_probs_V, chooser.select(None), sampling, generator, revise=revise)
        trunk, doubts, kept = TrunkFeatures(len(PROMPT), sampling), [], 1.0
        for drawn in seen[1:]:
            trunk.drawn(drawn.token, drawn.probs_V)
            kept *= accepts(drawn.hidden_D, trunk.scalars())
            doubts.append(1 - kept)
        stop = next((depth for depth, doubt in enumerate(doubts, 1) if doubt > rejected), longest)
        assert drafted.action == Action(1, stop, 0) and len(doubts) == stop
        stops.add(stop)
    assert stops == {0.0: {1}, 1.0: {longest}}.get(rejected, stops)
    if rejected == 0.6:
        assert len(stops) > 1


@pytest.mark.parametrize(
    "chooser",
    [EntropyStop(1.0, 9), chooser_of(Recorded(), Sampling(0)), StoppingHead(acceptance(), 0.5, 9, Sampling(0))],
)
def test_deciding_along_the_trunk_decodes_the_targets_text(pair: ModelPair, chooser: object) -> None:
    expected = pair.target.generate(
        torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    decoder = Decoder(pair, Sampling(0), get_verifier("lifted_uniform"), chooser)
    assert decoder.decode(PROMPT, 40, torch.Generator().manual_seed(0)).tokens == expected[0, len(PROMPT) :].tolist()


def test_verifiers_that_differ_by_action_must_be_exchangeable_where_drafted_tokens_decide(pair: ModelPair) -> None:
    own = {action: get_verifier("block" if action.K == 1 else "specinfer") for action in SPACE}
    Decoder(pair, Sampling(), own, Fixed(Action(2, 0, 2)))  # decided before anything is drafted
    with pytest.raises(ValueError, match="block, specinfer: not lossless in exchange"):
        Decoder(pair, Sampling(), own, EntropyStop(1.0, longest=4))
    own = {action: get_verifier("block" if action.K == 1 else "lifted_uniform") for action in SPACE}
    steps = Decoder(pair, Sampling(), own, EntropyStop(1.0, longest=4)).decode(PROMPT, 9, torch.Generator()).steps
    assert sum(step.accepted + 1 for step in steps) >= 9
