from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from selector.actions import EMPTY, Action, Choice, Lookup, choice_of
from selector.artefact import Features
from selector.data import Timed
from selector.decision import NEVER, Mode, Rule, net_tokens, without_draft
from selector.export import deployed, write_artefact
from selector.latency import LatencyProfile, Table
from selector.module import SelectorModule
from selector.runtime import MATCH_AT, Selector, load_selector, static_speeds, torchscript
from selector.schema import (
    EARLY,
    EARLY_SCALARS,
    FULL,
    HIDDEN_STATES,
    LIGHT,
    MATCH,
    SCALARS,
    SCALARS_KEY,
    InputError,
    sha256,
)
from selector.tuning import decided
from tests.selector.synthetic import SPACE, mode_row, opinionated, profile, survivals_of, texts, timed

FALLBACK = Action(1, 3, 0)
SHAPES = [*map(SPACE.chain, range(17)), Action(3, 0, 4), Action(2, 2, 3), Action(4, 1, 8), Lookup(4), Lookup(16)]
LIMITED = tuple(sorted(map(SPACE.index, SHAPES)))
STATIC = Mode(0.2, 1.0, Action(1, 4, 0), speed=180.0)
COPIES = Mode(0.4, 1.0, Action(1, 4, 0), (MATCH,), speed=190.0, rule=Rule(5, 8))
ANY = Mode(0.6, 1.0, Action(1, 3, 0), (LIGHT,), speed=200.0, rho=0.0)
KNOWN_EARLY = Mode(0.8, 1.0, Action(1, 3, 0), (EARLY,), speed=210.0, rho=0.25)
SOME = Mode(1.0, 1.0, Action(2, 2, 3), (LIGHT,), speed=220.0, rho=0.5, allowed=LIMITED)
NUCLEUS = Mode(1.0, 0.9, Action(1, 5, 0), (LIGHT,), speed=150.0, rho=1.0, allowed=LIMITED)
IN_TURN = Mode(1.4, 1.0, Action(2, 2, 3), (EARLY, LIGHT), speed=220.0, rho=0.5)
SOME_IN_TURN = Mode(1.4, 0.9, Action(2, 2, 3), (EARLY, LIGHT), speed=220.0, rho=0.25, allowed=LIMITED)
MODES = STATIC, COPIES, ANY, KNOWN_EARLY, SOME, NUCLEUS, IN_TURN, SOME_IN_TURN
NAMES = ["static", "copies", "decided", "early", "limited", "nucleus", "in turn", "limited in turn"]
KINDS = [(objective, sees) for objective in ("policy", "regressor") for sees in (LIGHT, FULL)]


def efficiencies(at: int) -> Tensor:
    """Of the static trees under a mode's sampling setting: the text is harder in one than in another."""
    return SPACE.tree_space.efficiencies(survivals_of(torch.tensor([0.55 + 0.05 * at])))[0]


def modes_of(sees: str) -> list[Mode]:
    """Of a selector that sees so much."""
    return [replace(mode, sees=tuple(sees if each == LIGHT else each for each in mode.sees)) for mode in MODES]


def export(
    folder: Path, objective: str = "regressor", sees: str = LIGHT, check: Callable[[Selector], None] = lambda _: None
) -> Selector:
    facts = {"pair": {"target": "t", "draft": "d", "fingerprint": profile().pair}, "metrics": {}, "run_id": "none"}
    rows = [mode_row(mode, efficiencies(at)) for at, mode in enumerate(modes_of(sees))]
    return write_artefact(folder, module_of(objective, sees), profile(), "traversal", FALLBACK, rows, facts, check)


@cache
def module_of(objective: str, sees: str = LIGHT) -> SelectorModule:
    return opinionated(objective, sees)


loaded = cache(load_selector)


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
    data = timed(texts(count, 12, seed=9, sees=sees, setting=(mode.temperature, mode.top_p), repeats=0.3))
    return data, (~data.texts.first_R).nonzero()[:, 0]


def batch_of(data: Timed, rows: Tensor, sees: str) -> Features:
    scalars_BF, states = data.texts.features(rows, sees == FULL)
    return {SCALARS_KEY: scalars_BF, **dict(zip(HIDDEN_STATES, states, strict=False))}


def one_by_one(batch: Features) -> list[Features]:
    return [{name: rows[b] for name, rows in batch.items()} for b in range(len(batch[SCALARS_KEY]))]


def early_of(features: Features) -> Features:
    """What is known before the draft has passed the root."""
    return {SCALARS_KEY: features[SCALARS_KEY][..., : len(EARLY_SCALARS)]}


def mask_of(mode: Mode, data: Timed) -> Tensor:
    """What may be chosen at every root, bool [R, A]."""
    matches = data.texts.scalars_RF[:, MATCH_AT].tolist()
    if mode.rule is not None:
        return torch.tensor([[action == mode.copied(match) for action in SPACE] for match in matches])
    return mode.mask(SPACE).expand(len(matches), -1)


def worth(made: SelectorModule, data: Timed, mode: Mode, early: bool = False) -> Tensor:
    """What the module and the decision rule say of every action at every root, [R, A]; with all features, or with the
    early ones alone. The others are not looked at where the mode does not ask for them."""
    early = early or mode.sees in ((), (MATCH,), (EARLY,))
    scores_RA = made.scores(data.texts, EARLY if early else None)
    if not made.is_regressor:
        return scores_RA.masked_fill(~mask_of(mode, data), NEVER)
    g, rho = torch.tensor([[mode.speed]]), torch.tensor([[mode.rho]])
    seconds_RA = data.seconds([sees for sees in mode.sees if sees == EARLY] if early else mode.sees)
    return net_tokens(scores_RA, seconds_RA, g, rho, mask_of(mode, data))


DRAFTS = torch.tensor([not without_draft(action) for action in SPACE])


def most_lost(made: SelectorModule, data: Timed, mode: Mode, rows: Tensor, chosen: list[int]) -> float:
    """By how many tokens the worst of some choices falls short of the best. Of a mode that is asked in turn a choice
    without a draft may be that of the early features; any other is the one with all, where the early one would draft.
    """

    def lost(early: bool) -> tuple[Tensor, Tensor]:
        worth_BA = worth(made, data, mode, early)[rows]
        return worth_BA.amax(-1, keepdim=True) - worth_BA, torch.tensor(chosen).unsqueeze(-1)

    lost_BA, chosen_B1 = lost(early=False)
    late_B = lost_BA.gather(-1, chosen_B1)[:, 0]
    if len(mode.sees) < 2:
        return float(late_B.max())
    early_BA, _ = lost(early=True)
    asks_again_B = early_BA[:, DRAFTS].amin(-1)
    early_B = early_BA.masked_fill(DRAFTS, torch.inf).gather(-1, chosen_B1)[:, 0]
    return float(torch.minimum(early_B, torch.maximum(late_B, asks_again_B)).max())


def in_turn(ask: Callable[[Features], Choice | None], mode: Mode, features: Features) -> int:
    """What an engine drafts: where the early features will do, the rest is never computed."""
    action = ask(early_of(features)) if EARLY in mode.sees else None
    if action is None or (len(mode.sees) > 1 and not without_draft(action)):
        action = ask(features)
    assert action is not None
    return SPACE.index(action)


@pytest.mark.parametrize("at", range(len(MODES)), ids=NAMES)
@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_all_ways_to_ask_choose_as_the_trained_module(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str, at: int
) -> None:
    """TorchScript in batches and one root at a time, the selector, the fast path, and the module's own choices. They
    add up in other orders: an action counts as the same where it is worth the same to 1e-4 tokens."""
    selector, made, mode = loaded(artefacts[objective, sees]), module_of(objective, sees), modes_of(sees)[at]
    data, rows = roots_of(mode, sees)
    batch = batch_of(data, rows, sees)
    roots = one_by_one(batch)
    own_R = decided(data, made.opinions(data.texts, mode), mode, objective == "policy").action_R
    tuned = selector.at(mode.temperature, mode.top_p)
    assert tuned.mode == mode
    assert tuned.sees == mode.sees

    def script(features: Features) -> Choice:
        return SPACE.actions[int(selector.module(features)[0])]

    with torch.inference_mode():
        index_B, _ = selector.module(batch)
        if EARLY in mode.sees:
            early_B, _ = selector.module(early_of(batch))
            index_B = torch.where(DRAFTS[early_B] & (len(mode.sees) > 1), index_B, early_B)
        alone = [in_turn(script, mode, features) for features in roots]
    asked = {
        "module": own_R[rows].tolist(),
        "batch": index_B.tolist(),
        "script": alone,
        "select": [in_turn(selector.select, mode, features) for features in roots],
        "fast": [in_turn(tuned.select, mode, features) for features in roots],
    }
    for name, chosen in asked.items():
        assert most_lost(made, data, mode, rows, chosen) < 1e-4, name
        assert sum(a == b for a, b in zip(chosen, asked["module"], strict=True)) >= 0.95 * len(rows), name
    kinds = len(set(asked["fast"]))
    assert kinds > 2 if mode.decides else kinds == (1 if mode.rule is None else 2)


@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_scores_are_what_the_trained_module_says(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str
) -> None:
    """With all features and with the early ones alone, of a batch and of one root."""
    selector, made = loaded(artefacts[objective, sees]), module_of(objective, sees)
    for mode in modes_of(sees):
        data, rows = roots_of(mode, sees, count=2)
        for early in (False, True):
            batch = early_of(batch_of(data, rows, sees)) if early else batch_of(data, rows, sees)
            scores_BA = selector.scores(batch)
            assert torch.allclose(scores_BA, worth(made, data, mode, early)[rows], atol=1e-3, rtol=1e-5)
            for features, scores_A in zip(one_by_one(batch), scores_BA, strict=True):
                assert torch.allclose(selector.scores(features), scores_A, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("at", [NAMES.index("in turn"), NAMES.index("limited in turn")], ids=["any", "limited"])
@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_the_draft_is_asked_for_where_the_early_choice_needs_it(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str, at: int
) -> None:
    """And nowhere else; both happen. Who has all features may give them at once, and gets the later choice."""
    selector, mode = loaded(artefacts[objective, sees]), modes_of(sees)[at]
    data, rows = roots_of(mode, sees)
    roots = one_by_one(batch_of(data, rows, sees))
    tuned = selector.at(mode.temperature, mode.top_p)
    early = [tuned.select(early_of(features)) for features in roots]
    known = [selector.select(early_of(features)) for features in roots]
    assert early == [action if without_draft(action) else None for action in known]
    assert 0.05 < sum(action is None for action in early) / len(roots) < 0.95
    late = [tuned.select(features) for features in roots]
    assert all(action is not None for action in late)
    assert any(own is not None and own != other for own, other in zip(early, late, strict=True))


def test_early_features_are_read_where_they_are_asked_for_and_refused_elsewhere(artefact: Path) -> None:
    """By the fast path. More than is asked for does no harm."""
    selector = loaded(artefact)
    for mode in MODES:
        data, rows = roots_of(mode, LIGHT, count=1)
        features = one_by_one(batch_of(data, rows, LIGHT))[0]
        tuned = selector.at(mode.temperature, mode.top_p)
        if mode.sees == (LIGHT,):
            with pytest.raises(InputError, match=r"scalars is torch\.float32"):
                tuned.select(early_of(features))
        elif len(mode.sees) < 2:
            assert tuned.select(early_of(features)) == tuned.select(features)


def test_the_match_alone_will_do_for_the_rule(artefact: Path) -> None:
    selector = loaded(artefact)
    tuned = selector.at(COPIES.temperature)
    data, rows = roots_of(COPIES, LIGHT)
    chosen = set()
    for features in one_by_one(batch_of(data, rows, LIGHT)):
        match = features[SCALARS_KEY][MATCH_AT]
        action = tuned.select({MATCH: match})
        assert action == tuned.select(early_of(features)) == selector.select(features) == COPIES.copied(float(match))
        chosen.add(action)
    assert chosen == {COPIES.action, Lookup(8)}


@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_the_highest_score_is_chosen_and_the_rest_is_never_drafted(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str
) -> None:
    selector = loaded(artefacts[objective, sees])
    for mode in modes_of(sees):
        data, rows = roots_of(mode, sees, count=2)
        batch = batch_of(data, rows, sees)
        scores_BA = selector.scores(batch)
        assert scores_BA.shape == (len(rows), 237)
        may_BA = mask_of(mode, data)[rows]
        assert ((scores_BA > NEVER / 2) == may_BA).all()
        assert (scores_BA[~may_BA] == NEVER).all()
        for b, features in enumerate(one_by_one(batch)):
            scores_A = selector.scores(features)
            assert scores_A.shape == (237,)
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
    near = {(0.1, 1.0): STATIC, (0.42, 1.0): COPIES, (0.55, 1.0): ANY, (0.87, 1.0): KNOWN_EARLY}
    near |= {(1.15, 1.0): SOME, (1.1, 0.85): NUCLEUS, (1.6, 1.0): IN_TURN, (1.35, 0.85): SOME_IN_TURN}
    batches = []
    for setting, mode in near.items():
        assert selector.at(*setting).mode == mode
        data, rows = roots_of(replace(mode, temperature=setting[0], top_p=setting[1]), LIGHT, count=1)
        batches.append(batch_of(data, rows, LIGHT)[SCALARS_KEY])
    mixed_BF = torch.cat(batches)[torch.randperm(88, generator=torch.Generator().manual_seed(1))]
    scores_BA = selector.scores({SCALARS_KEY: mixed_BF})
    for scalars_F, scores_A in zip(mixed_BF, scores_BA, strict=True):
        assert torch.allclose(selector.scores({SCALARS_KEY: scalars_F}), scores_A, atol=1e-4, rtol=1e-5)
    assert selector.at(1.0).mode == SOME  # top-p 1 unless it is said


LIMITS = [
    (5, None),
    (None, [(1, 2, 0), (2, 3, 2), (3, 0, 4)]),
    (9, [(2, 2, 3), (2, 2, 8)]),
    (None, [(4, 8, 8), (4, 8, 7)]),  # none of the limited mode's own
    (None, [(1, 3, 0), (2, 0, 4), (8,), (16,)]),
    (0, None),
]


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
@pytest.mark.parametrize(("nodes", "shapes"), LIMITS)
@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_only_allowed_trees_are_chosen(
    artefacts: dict[tuple[str, str], Path],
    objective: str,
    nodes: int | None,
    shapes: list[tuple[int, ...]] | None,
    mode: Mode,
) -> None:
    """The best of those that an engine can draft; the static one is the fastest tree, and time is worth less. A rule
    whose lookup is not among them is left out."""
    selector, made = loaded(artefacts[objective, LIGHT]), module_of(objective)
    tuned = selector.at(mode.temperature, mode.top_p, nodes=nodes, shapes=shapes)
    can = [
        a
        for a, action in enumerate(SPACE)
        if (nodes is None or action.nodes <= nodes) and (shapes is None or action in map(tuple, shapes))
    ]
    speed_A = static_speeds(selector.config, MODES.index(mode), selector.latency)
    best = max((a for a in can if a < len(SPACE.trees)), key=lambda a: float(speed_A[a]))
    copies = mode.rule is not None and SPACE.index(Lookup(mode.rule.length)) in can
    assert (tuned.sees, tuned.mode.rule) == ((mode.sees, mode.rule) if mode.decides or copies else ((), None))
    assert tuned.select(None) == SPACE.actions[best]
    own = mode.allowed or range(len(SPACE))
    may = {a for a in can if a in own} or set(can)
    assert set(tuned.mode.allowed) == {*may, best}
    factor = float(speed_A[best] / speed_A[SPACE.index(mode.action)])
    assert tuned.mode.speed == pytest.approx(factor * mode.speed)
    data, rows = roots_of(mode, LIGHT, count=2)
    roots = one_by_one(batch_of(data, rows, LIGHT))
    chosen = [in_turn(tuned.select, tuned.mode, features) for features in roots]
    assert set(chosen) <= set(can)
    assert most_lost(made, data, tuned.mode, rows, chosen) < 1e-4


def test_limits_that_leave_no_tree_are_refused(artefact: Path) -> None:
    selector = load_selector(artefact)
    with pytest.raises(InputError, match="no tree is left of those with at most 3 nodes"):
        selector.at(1.0, nodes=3, shapes=[(4, 0, 8), (2,)])
    for shapes in ([], [(8,), (16,)]):
        with pytest.raises(InputError, match="no tree is left"):
            selector.at(1.0, shapes=shapes)
    with pytest.raises(InputError, match="shapes: lookup 3 is not among"):
        selector.at(1.0, shapes=[(1, 3, 0), (3,)])
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
            [own.action_seconds(action, 100, "traversal", (), filtered) for action in SPACE.trees]
            for own in (profile(), slow)
        ]
        before_A, speed_A = (efficiencies(at) / torch.tensor(times) for times in seconds)
        best = int(speed_A.argmax())
        assert moved.action == SPACE.actions[best] == there.at(mode.temperature, mode.top_p).select(None)
        assert moved.speed == pytest.approx(mode.speed * float(speed_A[best] / before_A[SPACE.index(mode.action)]))
        assert moved.speed < mode.speed
        assert (moved.sees, moved.rule, moved.rho, moved.allowed) == (mode.sees, mode.rule, mode.rho, ())
    assert here.modes[0].action != there.modes[0].action


@pytest.mark.parametrize(("objective", "sees"), KINDS)
def test_decisions_there_are_by_that_machines_times(
    artefacts: dict[tuple[str, str], Path], objective: str, sees: str
) -> None:
    """The exported file and the fast path alike."""
    slow = replace(profile(draft=3e-3), device="slow")
    selector, made = load_selector(artefacts[objective, sees], latency=slow), module_of(objective, sees)
    for moved in selector.modes:
        data, rows = roots_of(moved, sees, count=3)
        data = Timed(data.texts, "traversal", slow)
        batch = batch_of(data, rows, sees)
        assert torch.allclose(selector.scores(batch), worth(made, data, moved)[rows], atol=1e-3, rtol=1e-5)
        tuned = selector.at(moved.temperature, moved.top_p)
        for ask in (selector.select, tuned.select):
            chosen = [in_turn(ask, moved, features) for features in one_by_one(batch)]
            assert most_lost(made, data, moved, rows, chosen) < 1e-4


def test_where_drafting_is_dear_shorter_trees_are_drafted(artefact: Path) -> None:
    data, rows = roots_of(ANY, LIGHT)

    def depth(selector: Selector) -> int:
        chosen = [selector.select(features) for features in one_by_one(batch_of(data, rows, LIGHT))]
        return sum(action.L1 + action.L2 for action in chosen if isinstance(action, Action))

    here, there = depth(load_selector(artefact)), depth(load_selector(artefact, latency=profile(draft=8e-3)))
    assert there < 0.5 * here
    never = load_selector(artefact, latency=profile(draft=1.0))
    assert never.at(0.2).select(None) == EMPTY
    assert depth(never) <= len(rows)  # the pass over the root has been made for the decision, and gives one token
    data, rows = roots_of(IN_TURN, LIGHT)
    tuned = never.at(IN_TURN.temperature)
    for features in one_by_one(batch_of(data, rows, LIGHT)):
        assert tuned.select(early_of(features)) is not None  # it is not even to pass the root


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
    of_few, of_many = few.at(1.0), many.at(1.0)
    for features in one_by_one(batch_of(data, rows, LIGHT)):
        assert of_few.select(features) == of_many.select(features)
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
    made = deployed(module_of(objective, sees), profile(), modes_of(sees), "traversal")
    with torchscript():
        scripted = torch.jit.script(made)
    data, rows = roots_of(SOME, sees, count=1)
    whole = batch_of(data, rows, sees)
    with torch.inference_mode():
        for batch in (whole, early_of(whole), one_by_one(whole)[3], early_of(one_by_one(whole)[3])):
            expected = loaded(artefacts[objective, sees]).module(batch)
            for own in (made, scripted):
                for mine, other in zip(own(batch), expected, strict=True):
                    assert torch.allclose(mine, other, atol=1e-5)


def test_the_config_says_what_an_engine_needs(artefacts: dict[tuple[str, str], Path]) -> None:
    for (objective, sees), folder in artefacts.items():
        config = json.loads((folder / "config.json").read_text())
        assert (config["format"], config["schema_version"]) == ("espalier-selector-4", 4)
        assert config["features"]["early"] == len(EARLY_SCALARS)
        assert (config["objective"], config["sees"], config["verifier"]) == (objective, sees, "traversal")
        assert [scalar["name"] for scalar in config["features"]["scalars"]] == [scalar.name for scalar in SCALARS]
        assert list(config["features"]["hidden_states"]) == (list(HIDDEN_STATES) if sees == FULL else [])
        assert [choice_of(action) for action in config["actions"]] == list(SPACE)
        assert [Mode.of(mode) for mode in config["modes"]] == modes_of(sees)
        for name, checksum in config["checksums"].items():
            assert sha256(folder / name) == checksum
        selector = load_selector(folder)
        assert (selector.sees, selector.fallback) == ((sees,), FALLBACK)
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


def changed(artefact: Path, copy: Path, change: Callable[[dict], object]) -> Path:
    """A copy with another config, and the checksum that goes with it."""
    shutil.copytree(artefact, copy)
    path, sums = copy / "config.json", copy / "SHA256SUMS"
    old, config = sha256(path), json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    sums.write_text(sums.read_text().replace(old, sha256(path)))
    return copy


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"schema_version": 7}, "espalier-selector-4 of schema version 7; this program reads"),
        (
            {"format": "espalier-selector-3", "schema_version": 3},
            "espalier-selector-3 of schema version 3; this program",
        ),
    ],
)
def test_another_version_is_refused(artefact: Path, tmp_path: Path, other: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_selector(changed(artefact, tmp_path / "selector", lambda config: config.update(other)))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["modes"][2].update(sees=[FULL]),  # the network has no hidden states
        lambda config: config["modes"][6].update(sees=[EARLY, FULL]),
        lambda config: config["modes"][1].update(rule=[5, 3]),  # no such lookup
        lambda config: config["modes"][1].update(rule=None),
        lambda config: config["modes"][2].update(allowed=[0, 237]),
        lambda config: config["modes"][2].update(action=[8]),  # a lookup everywhere
        lambda config: config["modes"][0]["mean_efficiency"].append(1.0),
        lambda config: config.update(fallback=[8]),
        lambda config: config["actions"].pop(),
        lambda config: config["features"].update(early=3),
        lambda config: config["features"].pop("early"),
    ],
)
def test_a_config_whose_parts_do_not_fit_is_refused(
    artefact: Path, tmp_path: Path, change: Callable[[dict], object]
) -> None:
    with pytest.raises(InputError, match=r"config.json: damaged \(\w+\); export the selector again"):
        load_selector(changed(artefact, tmp_path / "selector", change))


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
early = {{"scalars": features["scalars"][: selector.config["features"]["early"]]}}
print(selector.select(features), selector.at(1.0).select(features), selector.select(early))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"((\(\d, \d, \d\)|lookup \d+)\s){3}", result.stdout)
