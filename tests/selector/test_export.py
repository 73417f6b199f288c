from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selector.actions import EMPTY, Action, trunk_tokens
from selector.export import write_artefact
from selector.latency import LatencyProfile, Table, interpolated
from selector.network import further_actions, further_cost
from selector.runtime import Selector, best_gain, decision_tables, load_selector
from selector.schema import HIDDEN_STATES, SCALAR_NAMES, InputError
from tests.selector.synthetic import SPACE, module, profile, roots

FALLBACK = Action(1, 3, 0)
FURTHER = [SPACE.index(action) for action in (*map(SPACE.chain, range(17)), Action(3, 0, 4), Action(2, 2, 3))]
STATIC, AT_ROOT, ON_TRUNK = (
    {
        "temperature": temperature,
        "top_p": 1.0,
        "action": [1, 3, 0],
        "at_root": at_root,
        "on_trunk": on_trunk,
        "gain": 300.0,
        "further": FURTHER,
        "first": 2,
        "verifier_of": [0] * len(SPACE),
        "mean_efficiency": [roots().mean_BA.mean(0).tolist()],
    }
    for temperature, at_root, on_trunk in ((0.2, False, False), (0.6, True, False), (1.0, False, True))
)


def export(folder: Path, objective: str, check: Callable[[Selector], None] = lambda _: None) -> Selector:
    trained = module(objective)
    trained.fit_gain(roots())
    facts = {"pair": {"target": "t", "draft": "d", "fingerprint": profile().pair}, "metrics": {}, "run_id": "none"}
    return write_artefact(
        folder, trained, roots(), profile(), ["traversal"], FALLBACK, [STATIC, AT_ROOT, ON_TRUNK], facts, check
    )


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact") / "selector"
    export(folder, "regressor")
    return folder


@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_the_exported_selector_chooses_as_the_trained_module(tmp_path: Path, objective: str) -> None:
    selector = export(tmp_path / "selector", objective)
    trained = module(objective)
    trained.fit_gain(roots())
    fresh = roots(50, seed=9)
    expected = [SPACE.actions[i] for i in trained.choices(fresh).tolist()]
    assert len(set(expected)) > 1
    one_by_one = [selector.select({n: v[b] for n, v in fresh.features().items()}) for b in range(50)]
    assert one_by_one == expected
    scores = selector.scores(fresh.features())
    assert scores.shape == (50, 233) and [SPACE.actions[i] for i in scores.argmax(-1).tolist()] == expected
    assert selector.scores({n: v[0] for n, v in fresh.features().items()}).shape == (233,)


def test_a_root_without_features_gets_the_fallback(artefact: Path) -> None:
    assert load_selector(artefact).select(None) == FALLBACK


def test_each_sampling_setting_has_its_own_way_to_decide(artefact: Path) -> None:
    selector = load_selector(artefact)
    features = {name: value[0] for name, value in roots(1, seed=3).features().items()}
    static, at_root, on_trunk = (selector.at(temperature) for temperature in (0.1, 0.55, 1.3))
    assert static.latency is None and not static.on_trunk and static.select(None) == Action(1, 3, 0)
    assert at_root.latency is selector.latency and at_root.select(None) == Action(1, 3, 0)
    scores = 1 + module("regressor").network(
        [features[name][None] for name in HIDDEN_STATES], features["scalars"][None]
    )
    lengths_L, seconds_LA = profile().table(SPACE.actions, "traversal", True)
    cost = 300.0 * interpolated(seconds_LA, lengths_L, features["scalars"][6:7])[0]
    assert at_root.select(features) == SPACE.actions[int((scores[0] - cost).argmax())]
    assert on_trunk.latency is None and on_trunk.on_trunk and on_trunk.select(None) == SPACE.chain(16)


def test_decisions_along_the_trunk_are_those_of_the_trained_module(artefact: Path) -> None:
    trained, data = module("regressor"), roots(30, seed=4)
    tuned = load_selector(artefact).at(1.0)
    lengths_L, seconds_LA = profile().table(SPACE.actions, "traversal", False, 2)
    drafted = []
    for b in range(30):
        length = float(data.scalars[b, SCALAR_NAMES.index("context_length")])
        seconds_1A = interpolated(seconds_LA, lengths_L, torch.tensor([length]))
        cost_TA = further_cost(300.0 * seconds_1A, SPACE)[0, :, FURTHER]
        for t in range(2, SPACE.decisions + 1):
            gains_A = trained.gains(data.rows(slice(b, b + 1)), t)[0, 0, FURTHER]
            expected = SPACE.actions[int(further_actions(SPACE)[t, FURTHER[int((gains_A - cost_TA[t]).argmax())]])]
            hidden, scalars = data.trunk_hidden_BSTD[b, 0, t - 1].float(), data.trunk_scalars_BSTF[b, 0, t - 1]
            assert tuned.decide(hidden, scalars, t, length) == expected
            drafted.append(expected)
    assert len(set(drafted)) > 3
    assert tuned.first == 2 and tuned.decide(hidden, scalars, 16, length) == SPACE.chain(16)


@pytest.mark.parametrize("temperature", [0.2, 0.6, 1.0])
@pytest.mark.parametrize(
    ("nodes", "shapes"), [(5, None), (None, [(1, 2, 0), (2, 3, 2), (3, 0, 4)]), (9, [(2, 2, 3), (2, 2, 8)])]
)
def test_only_allowed_trees_are_chosen(
    artefact: Path, temperature: float, nodes: int | None, shapes: list[tuple[int, int, int]] | None
) -> None:
    """Whatever the decisions on the way: the trunk's end, carried out token by token, is an allowed tree."""
    tuned, data = load_selector(artefact).at(temperature, nodes=nodes, shapes=shapes), roots(20, seed=6)
    allowed = {a for a in SPACE if (nodes is None or a.nodes <= nodes) and (shapes is None or a in map(tuple, shapes))}
    hidden_BSTD, scalars_BSTF = data.along_trunks(slice(None))
    for b in range(20):
        action = tuned.select({name: value[b] for name, value in data.features().items()})
        if tuned.on_trunk:
            drafted = 0
            while drafted <= trunk_tokens(action):
                action = tuned.decide(hidden_BSTD[b, 0, drafted], scalars_BSTF[b, 0, drafted], drafted, 50.0)
                drafted += 1
                if drafted > SPACE.decisions:
                    break
        assert action in allowed
    assert tuned.select(None) in allowed or tuned.on_trunk


def test_limits_that_leave_no_tree_are_refused(artefact: Path) -> None:
    selector = load_selector(artefact)
    with pytest.raises(InputError, match="no action is left of those with at most 3 nodes"):
        selector.at(1.0, nodes=3, shapes=[(4, 0, 8)])
    with pytest.raises(InputError, match="shapes: "):
        selector.at(1.0, shapes=[(4, 8)])
    with pytest.raises(InputError, match=r"shapes: action \(9, 0, 8\) is not in the space"):
        selector.at(1.0, shapes=[(9, 0, 8)])


def test_another_machine_has_its_own_static_tree_and_speed(artefact: Path) -> None:
    here = load_selector(artefact).at(0.2)
    slow = load_selector(artefact, latency=profile(draft=1.0)).at(0.2)
    assert slow.select(None) == Action(1, 0, 0) != here.select(None)  # drafting never pays there
    assert slow.mode.gain < here.mode.gain


def test_another_machines_profile_changes_the_choice(artefact: Path) -> None:
    features = roots(40, seed=2).features()
    slow_draft = profile(draft=1.0)

    def depths(selector: Selector) -> list[int]:
        actions = [selector.select({n: v[b] for n, v in features.items()}) for b in range(40)]
        return [action.L1 + action.L2 for action in actions]

    here, there = depths(load_selector(artefact)), depths(load_selector(artefact, latency=slow_draft))
    assert sum(there) < sum(here)
    same = load_selector(artefact, latency=artefact / "latency.json")
    assert depths(same) == here and same.modes == load_selector(artefact).modes


def test_only_times_count_and_not_the_lengths_at_which_they_were_measured(artefact: Path) -> None:
    def steady(lengths: list[int]) -> LatencyProfile:
        def table(seconds: float) -> Table:
            return Table(lengths, [1], [[seconds]] * len(lengths))

        return replace(profile(), device="another", draft=table(1e-3), target=table(5e-3))

    few, many = (load_selector(artefact, latency=steady(lengths)) for lengths in ([64], [8, 512, 4096]))
    assert [mode.gain for mode in few.modes] == pytest.approx([mode.gain for mode in many.modes], rel=1e-6)
    assert [mode.action for mode in few.modes] == [mode.action for mode in many.modes]


def test_a_profile_of_another_pair_is_refused(artefact: Path) -> None:
    with pytest.raises(InputError, match="measured with another pair"):
        load_selector(artefact, latency=replace(profile(), pair="another"))


def test_a_failed_check_leaves_the_earlier_artefact(tmp_path: Path) -> None:
    def refuse(_: Selector) -> None:
        raise InputError("no")

    export(tmp_path / "selector", "policy")
    with pytest.raises(InputError):
        export(tmp_path / "selector", "regressor", refuse)
    assert load_selector(tmp_path / "selector").config["objective"] == "policy"


@pytest.mark.parametrize("name", ["selector.pt", "config.json", "latency.json", "README.md", "SHA256SUMS"])
def test_one_changed_byte_is_refused(artefact: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "selector"
    shutil.copytree(artefact, copy)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(bytes(content))
    with pytest.raises(InputError) as error:
        load_selector(copy)
    assert "\n" not in str(error.value) and str(copy) in str(error.value)


def test_a_missing_file_is_named(artefact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "selector"
    shutil.copytree(artefact, copy)
    (copy / "selector.pt").unlink()
    with pytest.raises(InputError, match=r"selector.pt: missing"):
        load_selector(copy)
    with pytest.raises(InputError, match="no selector directory"):
        load_selector(tmp_path)


def test_another_schema_version_is_refused(artefact: Path, tmp_path: Path) -> None:
    from selector.schema import SCHEMA_VERSION, sha256

    copy = tmp_path / "selector"
    shutil.copytree(artefact, copy)
    config = copy / "config.json"
    old = sha256(config)
    config.write_text(config.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 7'))
    sums = copy / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(old, sha256(config)))
    with pytest.raises(InputError, match="schema version 7; this program reads"):
        load_selector(copy)


def test_an_earlier_artefact_is_replaced_whole(tmp_path: Path) -> None:
    export(tmp_path / "selector", "policy")
    (tmp_path / "selector" / "stray").write_text("x")
    export(tmp_path / "selector", "regressor")
    assert load_selector(tmp_path / "selector").config["objective"] == "regressor"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["selector"]
    assert not (tmp_path / "selector" / "stray").exists()


def test_the_runtime_needs_torch_alone(artefact: Path) -> None:
    """In a process where every other heavy package is missing."""
    program = f"""
import sys
for name in ("transformers", "pytorch_lightning", "mlflow", "pyarrow", "datasets", "torchmetrics", "pandas"):
    sys.modules[name] = None
import torch
from selector.runtime import load_selector
selector = load_selector({str(artefact)!r})
widths = selector.config["features"]["hidden_states"]
features = {{name: torch.zeros(width) for name, width in widths.items()}}
features["scalars"] = torch.full((len(selector.config["features"]["scalars"]),), 50.0)
print(selector.select(features))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("(")


def test_the_schema_names_the_hidden_states(artefact: Path) -> None:
    assert list(load_selector(artefact).config["features"]["hidden_states"]) == list(HIDDEN_STATES)


@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_another_machine_has_its_own_verifiers(tmp_path: Path, objective: str) -> None:
    """A second verifier, better by half a token on branches, is dear where the selector was trained, and free there."""
    times = {"traversal": profile().verify["traversal"], "second": Table([1], [1], [[1.0]])}
    here = replace(profile(), verify=times)
    half_dear = Table([1], [1, 2, 3, 4], [[0.0, 1.0, 0.0, 1.0]])  # with two or four branches
    there = replace(profile(), verify={**times, "second": half_dear})
    data, trained = roots(verifiers=2), module(objective, verifiers=2)
    efficiencies = data.every_mean_BO.mean(0).view(2, -1).tolist()
    modes = [{**mode, "mean_efficiency": efficiencies} for mode in (STATIC, AT_ROOT)]
    if objective == "regressor":
        modes.append({**ON_TRUNK, "mean_efficiency": efficiencies})
    facts = {"pair": {"target": "t", "draft": "d", "fingerprint": profile().pair}, "metrics": {}, "run_id": "none"}
    write_artefact(tmp_path / "selector", trained, data, here, ["traversal", "second"], FALLBACK, modes, facts)
    selector = load_selector(tmp_path / "selector", latency=there)
    tuned = [selector.at(mode["temperature"]) for mode in modes]
    # where it is free, the second is as good on a chain, better with branches, and faster
    own_A = torch.tensor([int(action.K in (1, 3) and action != EMPTY) for action in SPACE])
    names = [("traversal", "second")[position] for position in own_A.tolist()]
    assert all(each.verifiers == names for each in tuned)
    tokens = data.every_mean_BO.mean(0).view(2, -1).gather(0, own_A.unsqueeze(0))[0].tolist()
    speeds = [e / there.action_seconds(a, 100, v) for e, a, v in zip(tokens, SPACE, names, strict=True)]
    assert tuned[0].select(None) == SPACE.actions[speeds.index(max(speeds))]
    few = selector.at(0.2, shapes=[(1, 2, 0), (2, 0, 2)])
    assert few.verifiers == names and few.select(None) in (Action(1, 2, 0), Action(2, 0, 2))
    if objective == "policy":
        return
    _, lengths_L, seconds_SLA, _ = decision_tables(there, selector.modes, ["traversal", "second"], regressor=True)
    seconds_BA = interpolated(seconds_SLA[0], lengths_L, data.scalars[:, SCALAR_NAMES.index("context_length")])
    moved = replace(data, verifier_BA=own_A.expand_as(data.verifier_BA), seconds_BA=seconds_BA)
    with torch.no_grad():
        predicted_BA, further_BSA = trained.outputs(moved), trained.gains(moved, 3)
    weight_B1 = data.weight_B.unsqueeze(-1)
    expected_BA = predicted_BA - best_gain(weight_B1 * predicted_BA, weight_B1 * seconds_BA) * seconds_BA
    assert torch.allclose(selector.scores(data.features()), expected_BA, rtol=1e-2, atol=1e-2)  # calibrated in halves
    hidden_BSTD, scalars_BSTF = data.along_trunks(slice(3, 4))
    at_root, on_trunk = (selector.modes[i] for i in (1, 2))
    for b in range(20):
        features = {name: value[b] for name, value in data.features().items()}
        assert torch.allclose(selector.efficiency(features, selector.body_of(at_root)), predicted_BA[b], atol=1e-4)
        state = (hidden_BSTD[b, 0, 0], scalars_BSTF[b, 0, 0])
        cost_A = torch.rand(len(SPACE), generator=torch.Generator().manual_seed(b))
        scores_A = further_BSA[b, 0] - cost_A
        chosen = selector.further(*state, selector.head_of(on_trunk), cost_A)
        assert float(scores_A[chosen]) == pytest.approx(float(scores_A.max()), abs=1e-4)
