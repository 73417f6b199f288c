from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from selector.actions import EMPTY, Action
from selector.artefact import FORMAT, Features
from selector.data import Timed
from selector.decision import NEVER, Mode, net_tokens
from selector.export import deployed, write_artefact
from selector.latency import LatencyProfile, Table
from selector.module import SelectorModule
from selector.runtime import Selector, load_selector, static_speeds, torchscript
from selector.schema import FULL, HIDDEN_STATES, LIGHT, SCALARS, SCALARS_KEY, SCHEMA_VERSION, InputError, sha256
from selector.tuning import actions_of
from tests.selector.synthetic import SPACE, mode_row, opinionated, profile, survivals_of, texts, timed

FALLBACK = Action(1, 3, 0)
SHAPES = [*map(SPACE.chain, range(17)), Action(3, 0, 4), Action(2, 2, 3), Action(4, 1, 8)]
LIMITED = tuple(sorted(map(SPACE.index, SHAPES)))
STATIC = Mode(0.2, 1.0, Action(1, 4, 0), speed=180.0)
ANY = Mode(0.6, 1.0, Action(1, 3, 0), decides=True, speed=200.0, rho=0.0)
SOME = Mode(1.0, 1.0, Action(2, 2, 3), decides=True, speed=220.0, rho=0.5, allowed=LIMITED)
NUCLEUS = Mode(1.0, 0.9, Action(1, 5, 0), decides=True, speed=150.0, rho=1.0, allowed=LIMITED)
MODES = STATIC, ANY, SOME, NUCLEUS
KINDS = [(objective, sees) for objective in ("policy", "regressor") for sees in (LIGHT, FULL)]


def efficiencies(at: int) -> Tensor:
    """Of the static trees under a mode's sampling setting: the text is harder in one than in another."""
    return SPACE.efficiencies(survivals_of(torch.tensor([0.55 + 0.1 * at])))[0]


def export(
    folder: Path, objective: str = "regressor", sees: str = LIGHT, check: Callable[[Selector], None] = lambda _: None
) -> Selector:
    facts = {"pair": {"target": "t", "draft": "d", "fingerprint": profile().pair}, "metrics": {}, "run_id": "none"}
    rows = [mode_row(mode, efficiencies(at)) for at, mode in enumerate(MODES)]
    made = opinionated(objective, sees)
    return write_artefact(folder, made, profile(), "traversal", FALLBACK, rows, facts, check)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("artefacts")
    for kind in KINDS:
        export(folder / "-".join(kind), *kind)
    return {kind: folder / "-".join(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def artefact(artefacts: dict[tuple[str, str], Path]) -> Path:
    return artefacts["regressor", LIGHT]


def roots_of(mode: Mode, sees: str, count: int = 5) -> tuple[Timed, Tensor]:
    """Fresh texts of a mode's setting, and their roots that have features."""
    data = timed(texts(count, 12, seed=9, sees=sees, setting=(mode.temperature, mode.top_p)))
    return data, (~data.texts.first_R).nonzero()[:, 0]


def batch_of(data: Timed, rows: Tensor, sees: str) -> Features:
    scalars_BF, states = data.texts.features(rows, sees == FULL)
    return {SCALARS_KEY: scalars_BF, **dict(zip(HIDDEN_STATES, states, strict=False))}


def one_by_one(batch: Features) -> list[Features]:
    return [{name: rows[b] for name, rows in batch.items()} for b in range(len(batch[SCALARS_KEY]))]


def worth(made: SelectorModule, data: Timed, mode: Mode) -> Tensor:
    """What the module and the decision rule say of every tree at every root, [R, A]."""
    scores_RA = made.scores(data.texts)
    if not made.is_regressor:
        return scores_RA.masked_fill(~mode.mask(SPACE), NEVER)
    g, rho = torch.tensor([[mode.speed]]), torch.tensor([[mode.rho]])
    seconds_RA = data.seconds(made.hparams["sees"])
    return net_tokens(scores_RA, seconds_RA, g, rho, mode.mask(SPACE).unsqueeze(0))


@pytest.mark.parametrize("mode", MODES, ids=["static", "decided", "limited", "nucleus"])
@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_all_ways_to_ask_choose_as_the_trained_module(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str, mode: Mode
) -> None:
    """TorchScript in batches and one root at a time, the selector, the fast path, and the module's own choices. They
    add up in other orders: a tree counts as the same where it is worth the same to 1e-4 tokens."""
    selector, made = load_selector(artefacts[objective, sees]), opinionated(objective, sees)
    data, rows = roots_of(mode, sees)
    batch = batch_of(data, rows, sees)
    own_R = actions_of(data, made.scores(data.texts), mode, data.seconds(sees), objective == "policy")
    worth_BA = worth(made, data, mode)[rows]
    tuned = selector.at(mode.temperature, mode.top_p)
    assert tuned.mode == mode
    assert tuned.sees == (sees if mode.decides else None)
    with torch.inference_mode():
        index_B, scores_BA = selector.module(batch)
        alone = [selector.module(features) for features in one_by_one(batch)]
    asked = {
        "module": own_R[rows].tolist(),
        "batch": index_B.tolist(),
        "script": [int(index) for index, _ in alone],
        "select": [SPACE.index(selector.select(features)) for features in one_by_one(batch)],
        "fast": [SPACE.index(tuned.select(features)) for features in one_by_one(batch)],
    }
    for name, chosen in asked.items():
        lost_B = worth_BA.amax(-1) - worth_BA[torch.arange(len(rows)), chosen]
        assert float(lost_B.max()) < 1e-4, name
        assert sum(a == b for a, b in zip(chosen, asked["module"], strict=True)) >= 0.95 * len(rows), name
    assert len(set(asked["fast"])) == 1 if not mode.decides else len(set(asked["fast"])) > 2
    assert torch.allclose(scores_BA, worth_BA, atol=1e-3, rtol=1e-5)
    assert torch.allclose(torch.stack([scores_A for _, scores_A in alone]), scores_BA, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_the_highest_score_is_chosen_and_the_rest_is_never_drafted(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str
) -> None:
    selector = load_selector(artefacts[objective, sees])
    for mode in MODES:
        data, rows = roots_of(mode, sees, count=2)
        batch = batch_of(data, rows, sees)
        scores_BA = selector.scores(batch)
        assert scores_BA.shape == (len(rows), 233)
        assert ((scores_BA > NEVER / 2) == mode.mask(SPACE)).all()
        assert (scores_BA[:, ~mode.mask(SPACE)] == NEVER).all()
        for b, features in enumerate(one_by_one(batch)):
            scores_A = selector.scores(features)
            assert scores_A.shape == (233,)
            assert torch.allclose(scores_A, scores_BA[b], atol=1e-4, rtol=1e-5)
            assert selector.select(features) == SPACE.actions[int(scores_A.argmax())]


def test_a_root_without_features_gets_the_static_tree(artefact: Path) -> None:
    selector = load_selector(artefact)
    assert selector.select(None) == FALLBACK
    for mode in MODES:
        assert selector.at(mode.temperature, mode.top_p).select(None) == mode.action


def test_the_nearest_sampling_setting_decides(artefact: Path) -> None:
    """In a batch, too, where each root has its own."""
    selector = load_selector(artefact)
    near = {(0.1, 1.0): STATIC, (0.55, 1.0): ANY, (1.3, 1.0): SOME, (1.1, 0.85): NUCLEUS}
    batches = []
    for setting, mode in near.items():
        assert selector.at(*setting).mode == mode
        data, rows = roots_of(replace(mode, temperature=setting[0], top_p=setting[1]), LIGHT, count=1)
        batches.append(batch_of(data, rows, LIGHT)[SCALARS_KEY])
    mixed_BF = torch.cat(batches)[torch.randperm(44, generator=torch.Generator().manual_seed(1))]
    scores_BA = selector.scores({SCALARS_KEY: mixed_BF})
    for scalars_F, scores_A in zip(mixed_BF, scores_BA, strict=True):
        assert torch.allclose(selector.scores({SCALARS_KEY: scalars_F}), scores_A, atol=1e-4, rtol=1e-5)
    assert selector.at(1.0).mode == SOME  # top-p 1 unless it is said


LIMITS = [
    (5, None),
    (None, [(1, 2, 0), (2, 3, 2), (3, 0, 4)]),
    (9, [(2, 2, 3), (2, 2, 8)]),
    (None, [(4, 8, 8), (4, 8, 7)]),  # none of the limited mode's own
    (0, None),
]


@pytest.mark.parametrize("mode", MODES, ids=["static", "decided", "limited", "nucleus"])
@pytest.mark.parametrize(("nodes", "shapes"), LIMITS)
@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_only_allowed_trees_are_chosen(
    artefacts: dict[tuple[str, str], Path],
    objective: str,
    nodes: int | None,
    shapes: list[tuple[int, int, int]] | None,
    mode: Mode,
) -> None:
    """The best of those that an engine can draft; the static one is the fastest of them, and time is worth less."""
    selector, made = load_selector(artefacts[objective, LIGHT]), opinionated(objective)
    tuned = selector.at(mode.temperature, mode.top_p, nodes=nodes, shapes=shapes)
    can = [
        a
        for a, action in enumerate(SPACE)
        if (nodes is None or action.nodes <= nodes) and (shapes is None or action in map(tuple, shapes))
    ]
    speed_A = static_speeds(selector.config, MODES.index(mode), selector.latency)
    best = max(can, key=lambda a: float(speed_A[a]))
    assert tuned.select(None) == SPACE.actions[best]
    own = mode.allowed or range(len(SPACE))
    may = {a for a in can if a in own} or set(can)
    assert set(tuned.mode.allowed) == {*may, best}
    factor = float(speed_A[best] / speed_A[SPACE.index(mode.action)])
    assert tuned.mode.speed == pytest.approx(factor * mode.speed)
    data, rows = roots_of(mode, LIGHT)
    worth_BA = worth(made, data, tuned.mode)[rows]
    for b, features in enumerate(one_by_one(batch_of(data, rows, LIGHT))):
        chosen = SPACE.index(tuned.select(features))
        assert chosen in can
        assert float(worth_BA[b, chosen]) > float(worth_BA[b].max()) - 1e-4


def test_limits_that_leave_no_tree_are_refused(artefact: Path) -> None:
    selector = load_selector(artefact)
    with pytest.raises(InputError, match="no action is left of those with at most 3 nodes"):
        selector.at(1.0, nodes=3, shapes=[(4, 0, 8)])
    with pytest.raises(InputError, match="no action is left"):
        selector.at(1.0, shapes=[])
    with pytest.raises(InputError, match="shapes: "):
        selector.at(1.0, shapes=[(4, 8)])
    with pytest.raises(InputError, match=r"shapes: action \(9, 0, 8\) is not in the space"):
        selector.at(1.0, shapes=[(9, 0, 8)])


def test_another_machine_has_its_own_static_trees_speeds_and_times(artefact: Path) -> None:
    """The best static tree by that machine's times and what trees yielded; g in proportion to the speeds; any tree."""
    slow = replace(profile(draft=8e-3), device="slow")
    here, there = load_selector(artefact), load_selector(artefact, latency=slow)
    assert there.latency == slow
    for at, (mode, moved) in enumerate(zip(here.modes, there.modes, strict=True)):
        filtered = mode.top_p < 1
        seconds = [
            [own.action_seconds(action, 100, "traversal", None, filtered) for action in SPACE]
            for own in (profile(), slow)
        ]
        before_A, speed_A = (efficiencies(at) / torch.tensor(times) for times in seconds)
        best = int(speed_A.argmax())
        assert moved.action == SPACE.actions[best] == there.at(mode.temperature, mode.top_p).select(None)
        assert moved.speed == pytest.approx(mode.speed * float(speed_A[best] / before_A[SPACE.index(mode.action)]))
        assert moved.speed < mode.speed
        assert (moved.decides, moved.rho, moved.allowed) == (mode.decides, mode.rho, ())
    assert here.modes[0].action != there.modes[0].action


@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_decisions_there_are_by_that_machines_times(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str
) -> None:
    """The exported file and the fast path alike."""
    slow = replace(profile(draft=3e-3), device="slow")
    selector, made = load_selector(artefacts[objective, sees], latency=slow), opinionated(objective, sees)
    for moved, mode in zip(selector.modes, MODES, strict=True):
        data, rows = roots_of(mode, sees, count=3)
        data = Timed(data.texts, "traversal", slow)
        worth_BA = worth(made, data, moved)[rows]
        batch = batch_of(data, rows, sees)
        assert torch.allclose(selector.scores(batch), worth_BA, atol=1e-3, rtol=1e-5)
        tuned = selector.at(mode.temperature, mode.top_p)
        for b, features in enumerate(one_by_one(batch)):
            for chosen in (selector.select(features), tuned.select(features)):
                assert float(worth_BA[b, SPACE.index(chosen)]) > float(worth_BA[b].max()) - 1e-4


def test_where_drafting_is_dear_shorter_trees_are_drafted(artefact: Path) -> None:
    data, rows = roots_of(ANY, LIGHT)

    def depth(selector: Selector) -> int:
        chosen = [selector.select(features) for features in one_by_one(batch_of(data, rows, LIGHT))]
        return sum(action.L1 + action.L2 for action in chosen)

    here, there = depth(load_selector(artefact)), depth(load_selector(artefact, latency=profile(draft=8e-3)))
    assert there < 0.5 * here
    never = load_selector(artefact, latency=profile(draft=1.0))
    assert never.at(0.2).select(None) == EMPTY
    assert depth(never) <= len(rows)  # the pass over the root has been made for the decision, and gives one token


def test_the_same_machine_changes_nothing(artefact: Path) -> None:
    plain = load_selector(artefact)
    for same in (artefact / "latency.json", str(artefact / "latency.json"), profile()):
        assert load_selector(artefact, latency=same).modes == plain.modes == list(MODES)


def test_only_times_count_and_not_the_lengths_at_which_they_were_measured(artefact: Path) -> None:
    def steady(lengths: list[int]) -> LatencyProfile:
        def table(seconds: float) -> Table:
            return Table(lengths, [1], [[seconds]] * len(lengths))

        return replace(profile(), device="another", draft=table(1e-3), target=table(5e-3))

    few, many = (load_selector(artefact, latency=steady(lengths)) for lengths in ([64], [8, 512, 4096]))
    assert [mode.speed for mode in few.modes] == pytest.approx([mode.speed for mode in many.modes], rel=1e-6)
    assert [mode.action for mode in few.modes] == [mode.action for mode in many.modes]
    data, rows = roots_of(SOME, LIGHT)
    for features in one_by_one(batch_of(data, rows, LIGHT)):
        assert few.at(1.0).select(features) == many.at(1.0).select(features)
        assert torch.allclose(few.scores(features), many.scores(features), atol=1e-4)


def test_a_profile_of_another_pair_is_refused(artefact: Path) -> None:
    with pytest.raises(InputError, match="measured with another pair"):
        load_selector(artefact, latency=replace(profile(), pair="another"))


def test_a_profile_without_the_verifier_is_refused(artefact: Path) -> None:
    other = replace(profile(), device="another", verify={"block": profile().verify["traversal"]})
    with pytest.raises(InputError, match="the latency profile of another has no times for traversal"):
        load_selector(artefact, latency=other)


def test_a_profile_that_is_not_there_is_named(artefact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.json: no latency profile there"):
        load_selector(artefact, latency=tmp_path / "none.json")


@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_what_is_deployed_is_what_is_exported(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str
) -> None:
    """The module in this process, scripted or not, gives what the file gives."""
    made = deployed(opinionated(objective, sees), profile(), MODES, "traversal")
    with torchscript():
        scripted = torch.jit.script(made)
    data, rows = roots_of(SOME, sees, count=1)
    batch = batch_of(data, rows, sees)
    with torch.inference_mode():
        expected = load_selector(artefacts[objective, sees]).module(batch)
        for own in (made, scripted):
            for mine, other in zip(own(batch), expected, strict=True):
                assert torch.allclose(mine, other, atol=1e-5)


def test_the_config_says_what_an_engine_needs(artefacts: dict[tuple[str, str], Path]) -> None:
    for (objective, sees), folder in artefacts.items():
        config = json.loads((folder / "config.json").read_text())
        assert config["format"] == FORMAT and config["schema_version"] == SCHEMA_VERSION
        assert (config["objective"], config["sees"], config["verifier"]) == (objective, sees, "traversal")
        assert [scalar["name"] for scalar in config["features"]["scalars"]] == [scalar.name for scalar in SCALARS]
        assert list(config["features"]["hidden_states"]) == (list(HIDDEN_STATES) if sees == FULL else [])
        assert [Action(*action) for action in config["actions"]] == list(SPACE)
        assert [Mode.of(mode) for mode in config["modes"]] == list(MODES)
        for name, checksum in config["checksums"].items():
            assert sha256(folder / name) == checksum
        selector = load_selector(folder)
        assert (selector.sees, selector.fallback) == (sees, FALLBACK)
        readme = (folder / "README.md").read_text()
        for name in (*(scalar.name for scalar in SCALARS), *config["features"]["hidden_states"]):
            assert f"`{name}`" in readme
        assert not re.search(r"target_hidden", readme) or sees == FULL


def test_a_failed_check_leaves_the_earlier_artefact(tmp_path: Path) -> None:
    def refuse(_: Selector) -> None:
        raise InputError("no")

    export(tmp_path / "selector", "policy")
    with pytest.raises(InputError):
        export(tmp_path / "selector", "regressor", check=refuse)
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


@pytest.mark.parametrize("sees", [LIGHT, FULL])
def test_the_runtime_needs_torch_alone(artefacts: dict[tuple[str, str], Path], sees: str) -> None:
    """In a process where every other heavy package is missing."""
    program = f"""
import sys
for name in ("transformers", "pytorch_lightning", "mlflow", "pyarrow", "datasets", "torchmetrics", "pandas", "scipy"):
    sys.modules[name] = None
import torch
from selector.runtime import load_selector
selector = load_selector({str(artefacts["regressor", sees])!r})
widths = selector.config["features"]["hidden_states"]
features = {{name: torch.zeros(width) for name, width in widths.items()}}
features["scalars"] = torch.full((len(selector.config["features"]["scalars"]),), 1.0)
print(selector.select(features), selector.at(1.0).select(features))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\(\d, \d, \d\) \(\d, \d, \d\)\n", result.stdout)
