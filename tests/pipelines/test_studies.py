"""What the studies compare, on synthetic traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipelines.config import Config, Train
from pipelines.journal import Journal
from pipelines.studies_results import calibrations, flat_metrics, judged, results
from pipelines.variants import FEATURES, Place, first_half, of_prompts, scaled, variants
from selector.data import kind_number
from selector.module import SelectorModule
from selector.schema import SCALAR_NAMES
from tests.selector.synthetic import Traces, module, roots


def without(*names: str) -> SelectorModule:
    shown = module("regressor")
    hidden = SelectorModule(**{**shown.hparams, "left_out": list(names)})
    hidden.fit_standardisation(roots())
    return hidden.eval()


@pytest.mark.parametrize("group", sorted(FEATURES))
def test_a_feature_that_is_left_out_changes_nothing(group: str) -> None:
    """Neither at the root nor along the trunk; the same features shown change what the full network says."""
    data, other = roots(8), roots(8)
    for name in FEATURES[group]:
        if name in SCALAR_NAMES:
            other.scalars[:, SCALAR_NAMES.index(name)] += 1
        elif name == "draft_hidden_parent":
            other.trunk_hidden_BSTD = other.trunk_hidden_BSTD + 1
        else:
            getattr(other, name)[:, 0] += 1
    blind, full = without(*FEATURES[group]), module("regressor")
    seen = [torch.equal(net.outputs(data), net.outputs(other)) for net in (blind, full)]
    along = [torch.equal(net.gains(data, 3), net.gains(other, 3)) for net in (blind, full)]
    assert seen[0] and along[0]
    assert not (seen[1] and along[1])


def test_smaller_shares_of_the_prompts_are_parts_of_larger_ones() -> None:
    data = roots(64)
    data.prompt_B = torch.arange(64) // 4
    parts = {share: set(of_prompts(data, share, seed=1).prompt_B.tolist()) for share in (0.125, 0.5, 1.0)}
    assert [len(part) for part in parts.values()] == [2, 8, 16]
    assert parts[0.125] < parts[0.5] < parts[1.0]
    assert len(of_prompts(data, 0.125, seed=1)) == 8


def test_half_of_the_samples_is_what_training_sees() -> None:
    data = roots(4)
    half = first_half(data)
    assert torch.equal(half.mean_BA, data.half_BA) and torch.equal(half.every_mean_BO, data.every_half_BO)
    assert torch.equal(half.trunk_BSA, data.trunk_BSA[:, :1]) and half.trunk_hidden_BSTD.shape[1] == 1
    trained = module("regressor")
    trained.fit_standardisation(half, errors_of=data)
    weights = module("regressor")
    weights.fit_standardisation(data)
    assert torch.equal(trained.trunk_weight_O, weights.trunk_weight_O)  # losses of both compare
    assert torch.isfinite(trained.loss(half))


def test_places_hold_their_roots() -> None:
    data = roots(6)
    data.kind_B[:2] = kind_number("code")
    data.scalars[:, SCALAR_NAMES.index("temperature")] = torch.tensor([0.2, 0.2, 0.2, 1.0, 1.0, 1.0])
    assert Place("prompts", kind="code").holds_B(data).tolist() == [True, True] + [False] * 4
    assert Place("hot", temperature=1.0).holds_B(data).tolist() == [False] * 3 + [True] * 3
    assert Place().holds_B(data).all()


def test_every_group_has_its_variants() -> None:
    config = Config.model_validate({"name": "x", "studies": {"widths": [0.5], "shares": [0.5], "gpu_like": [0.2]}})
    places = [Place(), Place("prompts of code", kind="code"), Place("gpu_like_1/5", gpu_like=0.2)]
    found = variants(config, places)
    groups = [variant.group for variant in found]
    assert groups == ["full", "objective", "profile", *["features"] * 5, "width", "roots", "samples", "shift"]
    assert len({variant.name for variant in found}) == len(found)
    assert found[0].places == tuple(places)
    assert all(set(variant.places) <= set(places) for variant in found)
    shift = found[-1]
    assert shift.elsewhere and shift.places == (shift.trained,) == (places[1],)
    none = {"features": [], "widths": [], "shares": [], "gpu_like": [], "half_samples": False, "policy": False}
    assert [v.group for v in variants(Config.model_validate({"name": "x", "studies": none}), [Place()])] == ["full"]


def test_widths_scale_and_stay_positive() -> None:
    train = scaled(Train(width=32, hidden=(64, 8), trunk_hidden=(96,)), 0.25)
    assert (train.width, train.hidden, train.trunk_hidden) == (8, (16, 4), (24,))


def test_variants_are_compared_with_the_full_one_on_the_same_prompts(tmp_path: Path) -> None:
    """Through the journal and back: identical variants differ by exactly nothing, others by a finite interval."""
    traces = Traces(64)
    header = {"seed": 1}
    journal = Journal(tmp_path / "journal.jsonl", header)
    for group, variant in (("full", module("regressor")), ("same", module("regressor")), ("other", module("policy"))):
        places = {"all": judged(variant, traces)}
        entry = {"group": group, "variant": group, "run_id": group, "metrics": {}, "places": places}
        journal.add(entry | {"calibration": calibrations(variant, traces)} if group == "full" else entry)
    with journal.path.open("a") as file:
        file.write('{"group": "cut sho')
    kept = Journal(journal.path, header)
    assert kept.entries == journal.entries and Journal(tmp_path / "other.jsonl", header).entries == []
    found = results(kept.entries)
    full, same, other = found["variants"]
    for way in ("at_root", "on_trunk"):
        low, high = full[way]["interval_95"]
        assert low < full[way]["ratio"] < high
        assert same[way]["difference"] == 0 and same[way]["difference_interval_95"] == [0, 0]
    assert other["on_trunk"] is None and other["loss_at_root"] is None
    low, high = other["at_root"]["difference_interval_95"]
    assert low < other["at_root"]["ratio"] - full["at_root"]["ratio"] < high
    assert sum(group["roots"] for group in found["calibration"]["chosen"]["groups"]) == 56  # the decoder's own steps
    assert set(flat_metrics(kept.entries[2])) == {"all/at_root_ratio"}
    json.dumps(found, allow_nan=False)
    assert Journal(journal.path, {"seed": 2}).entries == []
