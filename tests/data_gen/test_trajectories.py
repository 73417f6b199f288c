from __future__ import annotations

import pytest
import torch

from data_gen.decoding import Decoder, Features, Fixed
from data_gen.drafting import draft_tree, nodes_of
from data_gen.features import TrunkFeatures
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.trajectories import TrajectoryLabeller, choose_roots, seed_of, trunk_columns
from data_gen.verification import VERIFIERS, get_verifier
from selector.actions import Action, ActionSpace
from selector.latency import LatencyProfile, Table
from selector.schema import HIDDEN_STATES, SCALAR_NAMES, SCALARS_KEY, TRACE_SCALARS, TRUNK_SCALARS, label_columns

PROMPT = [5, 17, 203, 44, 91]
TRUNK_SCALAR_NAMES = [scalar.name for scalar in TRUNK_SCALARS]
SAMPLING = Sampling(0.7)
ONE = Table([10], [1], [[0.001]])
PROFILE = LatencyProfile("here", "pair", ONE, ONE, {"traversal": ONE}, 0.0, 0.0, 0.0)


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
    (labels,) = labeller.labels([(root, 1)])
    index = ActionSpace.default().index(action)
    draft, target = CachedModel(pair.draft), CachedModel(pair.target)
    root_probs = SAMPLING.probabilities(draft.extend(tokens).logits_BWV[0, -1])
    target.extend(tokens[:-1])
    generator = torch.Generator().manual_seed(2)
    own = {name: [] for name in verifiers}
    for _ in range(100):
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
    first, other = one.labels([(6, 1), (7, 1)])
    for together in (1, 4):
        (again,) = TrajectoryLabeller(pair, tokens, SAMPLING, 2, ["traversal"], together).labels([(6, 1)])
        for name in first:  # passes over other batches round differently
            assert torch.allclose(first[name].double(), again[name].double(), atol=1e-4), name
    assert not torch.allclose(first["traversal.mean"], other["traversal.mean"], atol=1e-2)


def test_the_empty_tree_yields_one_token(pair: ModelPair) -> None:
    labels = TrajectoryLabeller(pair, PROMPT, SAMPLING, 2, list(VERIFIERS)).labels([(len(PROMPT), 1)])[0]
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
    assert sum(root.weight for root in steps) == pytest.approx(len(decoded.steps))  # the prompt has features throughout


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    assert seed_of(1, "a", SAMPLING) == seed_of(1, "a", Sampling(0.7)) != seed_of(1, "b", SAMPLING)


def test_what_is_recorded_along_a_trunk_is_what_a_decoder_knows(pair: ModelPair) -> None:
    """Hidden states, entropies and probabilities against passes of the models over the trunk's own text."""
    labeller = TrajectoryLabeller(pair, [*PROMPT, 3, 8], SAMPLING, 2, ["traversal"])
    lengths, space = [7, 4], ActionSpace.default()
    uniforms = torch.rand(2, nodes_of(space), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    batch = labeller.supertrees(lengths, uniforms)
    known = trunk_columns(batch)
    for s, length in enumerate(lengths):
        trunk = batch.tokens_R[batch.trunk_ST[s, 1:]].tolist()
        text = torch.tensor([[*labeller.tokens[:length], *trunk]])
        features = TrunkFeatures(length, SAMPLING)
        with torch.inference_mode():
            draft, target = pair.draft(text, output_hidden_states=True), pair.target(text)
        for t in range(space.decisions):
            q_V, p_V = (SAMPLING.probabilities(model.logits[0, length - 1 + t]) for model in (draft, target))
            features.drawn(trunk[t], q_V)
            scalars = dict(zip(TRUNK_SCALAR_NAMES, features.scalars().tolist(), strict=True))
            assert torch.allclose(known["trunk.hidden"][s, t], draft.hidden_states[-1][0, length - 1 + t], atol=1e-4)
            assert float(known["trunk.token_logprob"][s, t]) == pytest.approx(scalars["token_logprob"], abs=1e-3)
            entropy = -float((q_V * q_V.clamp(min=1e-30).log()).sum())
            assert float(known["trunk.token_entropy"][s, t]) == pytest.approx(entropy, abs=1e-3)
            assert scalars["path_logprob"] == pytest.approx(
                float(known["trunk.token_logprob"][s, : t + 1].sum()), abs=1e-2
            )
            assert scalars["drafted"] == t + 1 and scalars["context_length"] == length
            accept = min(1.0, float(p_V[trunk[t]] / q_V[trunk[t]]))
            assert float(known["trunk.accept"][s, t]) == pytest.approx(accept, abs=1e-3)


def test_labels_given_a_trunk_average_to_the_labels(pair: ModelPair) -> None:
    """Means over the samples agree for every chain; what a tree adds to its trunk is the same in both."""
    labeller = TrajectoryLabeller(pair, PROMPT, SAMPLING, 60, ["traversal", "specinfer"])
    (labels,) = labeller.labels([(len(PROMPT), 3)])
    for name in ("traversal", "specinfer"):
        columns = label_columns(name)
        trunk_SA, mean_A = labels[columns["trunk"]], labels[columns["mean"]]
        assert trunk_SA.shape == (60, 233)
        error_A = (trunk_SA.var(0) / 60 + labels[columns["error"]] ** 2).sqrt()
        assert bool(((trunk_SA.mean(0) - mean_A).abs() < 4.5 * error_A + 1e-9).all())  # false alarms: 7e-6 each
        for action in (Action(1, 3, 0), Action(3, 3, 2)):  # the first of a chain is known without a draw
            assert bool((trunk_SA[:, ActionSpace.default().index(action)] >= 1).all())
