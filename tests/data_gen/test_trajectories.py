from __future__ import annotations

import pytest
import torch

from data_gen.decoding import Decoder, Features, Fixed
from data_gen.drafting import draft_tree
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.trajectories import TrajectoryLabeller, choose_roots, seed_of
from data_gen.verification import VERIFIERS, get_verifier
from selector.actions import Action, ActionSpace
from selector.latency import LatencyProfile, Table
from selector.schema import HIDDEN_STATES, SCALAR_NAMES, SCALARS_KEY, TRACE_SCALARS, label_columns

PROMPT = [5, 17, 203, 44, 91]
SAMPLING = Sampling(0.7)
ONE = Table([10], [1], [[0.001]])
PROFILE = LatencyProfile("here", "pair", ONE, ONE, {"traversal": ONE}, 0.0, 0.0)


class Recorder:
    """A chooser that keeps the features it is given."""

    def __init__(self) -> None:
        self.latency = PROFILE
        self.seen: list[Features | None] = []

    def select(self, features: Features | None) -> Action:
        self.seen.append(features)
        return [Action(2, 1, 2), Action(1, 3, 0), Action(1, 0, 0), Action(4, 0, 1)][len(self.seen) % 4]


def test_trace_features_are_those_a_decoder_has(pair: ModelPair) -> None:
    recorder = Recorder()
    decoder = Decoder(pair, SAMPLING, get_verifier("traversal"), recorder)
    decoded = decoder.decode(PROMPT, 30, torch.Generator().manual_seed(0))
    labeller = TrajectoryLabeller(pair, PROMPT + decoded.tokens, SAMPLING, 2, ["traversal"])
    assert len(recorder.seen) == len(decoded.steps) > 5
    for step, seen in zip(decoded.steps, recorder.seen, strict=True):
        columns = labeller.features(step.length)
        for name in HIDDEN_STATES:
            assert torch.allclose(columns[name], seen[name], atol=1e-4), (name, step)
        scalars = dict(zip(SCALAR_NAMES, seen[SCALARS_KEY].tolist(), strict=True))
        assert [columns[n] for n in TRACE_SCALARS] == pytest.approx([scalars[n] for n in TRACE_SCALARS], abs=1e-3)
        assert scalars["context_length"] == step.length
        assert scalars["draft_pass_seconds"] == pytest.approx(0.001)


def test_a_prompt_of_one_token_has_no_features(pair: ModelPair) -> None:
    recorder = Recorder()
    Decoder(pair, SAMPLING, get_verifier("traversal"), recorder).decode([9], 5, torch.Generator().manual_seed(0))
    assert recorder.seen[0] is None
    assert all(features is not None for features in recorder.seen[1:])


@pytest.mark.parametrize("action", [Action(1, 4, 0), Action(3, 1, 2)], ids=str)
def test_labels_agree_with_independent_trees_of_the_action(pair: ModelPair, action: Action) -> None:
    """Mean label against trees drafted for the action alone: |z| < 4.5 (false alarms: 7e-6 each)."""
    tokens = [*PROMPT, 3, 8]
    root = len(tokens)
    verifiers = list(VERIFIERS)
    labeller = TrajectoryLabeller(pair, tokens, SAMPLING, 30, verifiers)
    labels = labeller.labels(root, seed=1)
    index = ActionSpace.default().index(action)
    draft, target = CachedModel(pair.draft), CachedModel(pair.target)
    root_probs = SAMPLING.probabilities(draft.extend(tokens).logits_BWV[0, -1])
    target.extend(tokens[:-1])
    generator = torch.Generator().manual_seed(2)
    own = {name: [] for name in verifiers}
    for _ in range(150):
        drafted = draft_tree(draft, root_probs, action, SAMPLING, generator)
        draft.keep([])
        ids = drafted.tree.tokens_N.clone()
        ids[0] = tokens[-1]
        logits = target.forward(ids.unsqueeze(0), drafted.tree.depths_N, drafted.tree.ancestors_NN()).logits_BWV[0]
        target.keep([])
        for name in verifiers:
            rule = get_verifier(name)
            own[name].append(rule.block_efficiency(drafted.tree, SAMPLING.probabilities(logits), drafted.probs_NV))
    for name in verifiers:
        columns = label_columns(name)
        values = torch.tensor(own[name])
        spread = (float(labels[columns["error"]][index]) ** 2 + float(values.var()) / len(values)) ** 0.5
        assert abs(float(labels[columns["mean"]][index]) - float(values.mean())) < 4.5 * spread + 1e-9


def test_labels_depend_on_the_seed_alone(pair: ModelPair) -> None:
    tokens = [*PROMPT, 3, 8, 11]
    one = TrajectoryLabeller(pair, tokens, SAMPLING, 2, ["traversal"])
    first, other = one.labels(6, seed=1), one.labels(7, seed=1)
    again = TrajectoryLabeller(pair, tokens, SAMPLING, 2, ["traversal"]).labels(6, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["traversal.mean"], other["traversal.mean"])


def test_the_empty_tree_yields_one_token(pair: ModelPair) -> None:
    labels = TrajectoryLabeller(pair, PROMPT, SAMPLING, 2, list(VERIFIERS)).labels(len(PROMPT), seed=1)
    for name in VERIFIERS:
        assert float(labels[f"{name}.mean"][0]) == pytest.approx(1)
        assert int(labels[f"{name}.realised"][0]) == 1


def test_half_of_the_roots_are_steps_and_half_every_nth_token(pair: ModelPair) -> None:
    decoder = Decoder(pair, SAMPLING, get_verifier("traversal"), Fixed(Action(1, 2, 0)))
    decoded = decoder.decode(PROMPT, 64, torch.Generator().manual_seed(0), audit=True)
    roots = choose_roots(PROMPT, decoded, 8, 16, seed=1)
    steps = [root for root in roots if root.step is not None]
    assert [root.length for root in roots if root.step is None] == [5, 21, 37, 53]
    assert len(steps) == 4 and all(root.length == root.step.length for root in steps)


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    assert seed_of(1, "a", SAMPLING) == seed_of(1, "a", Sampling(0.7)) != seed_of(1, "b", SAMPLING)
