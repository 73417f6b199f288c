"""Golden vectors: what an engine's own code must compute along a fixed text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_gen.features.rows import row_numbers, scalars_along
from data_gen.models.pair import ModelRows
from data_gen.models.sampling import Sampling
from pipelines.train.golden import ROOTS, golden
from selector.actions import Action
from selector.decision import LookupRule, Mode
from selector.export.write import load_script, write_artefact
from selector.runtime.selector import load_selector
from selector.schema import EARLY_SCALARS, FULL, HIDDEN_STATES, LIGHT, LOG, PAIR
from selector.train.module import SelectorModule
from tests.selector import logged
from tests.selector.exported import FALLBACK, efficiencies, modes_of, module_of
from tests.selector.synthetic import mode_row, profile


def exported(folder: Path, level: str) -> dict[str, Any]:
    """An artefact with golden vectors; these."""
    facts = {"pair": {"target": "t", "draft": "d", "fingerprint": profile().pair}, "metrics": {}, "run_id": "none"}
    rows = [mode_row(mode, efficiencies(at)) for at, mode in enumerate(modes_of(level))]
    module = module_of("regressor", level)
    write_artefact(folder, module, profile(), "traversal", FALLBACK, rows, facts, golden=golden)
    return json.loads((folder / "golden.json").read_text())


@pytest.mark.parametrize("level", [LIGHT, FULL])
@torch.no_grad()
def test_features_and_decisions_are_those_of_other_code(tmp_path: Path, level: str) -> None:
    """Of one pass over the whole text, and of the TorchScript, which is asked with one level after the other."""
    found = exported(tmp_path / "selector", level)
    selector, script = load_selector(tmp_path / "selector"), load_script(tmp_path / "selector")
    tokens, start = found["prompt"] + found["tokens"], len(found["prompt"]) - 1
    for mode, setting in zip(modes_of(level), found["settings"], strict=True):
        assert setting["feature_levels"] == list(mode.asked)
        sampling = Sampling(**setting["sampling"])
        rows = [
            ModelRows(own.probabilities(torch.tensor(found[name])), torch.tensor(found[name]), torch.zeros(41, 1))
            for own, name in ((sampling, "target_logits"), (sampling.draft, "draft_logits"))
        ]
        numbers = {name: np.array(values) for name, values in row_numbers(*rows, found["tokens"]).items()}
        scalars_RF = scalars_along(tokens, start, sampling, numbers)
        for root in setting["roots"]:
            expected_F = scalars_RF[root["committed"]]
            np.testing.assert_allclose(root["scalars"], expected_F, rtol=1e-5, atol=1e-6)
            answers = [None if answer is None else tuple(answer) for answer in root["answers"]]
            if not mode.feature_levels:
                match = dict(zip(PAIR.names, root["scalars"], strict=True))["match"]
                assert answers == [tuple(mode.copied(match) if mode.rule else mode.action)]
                continue
            assert len(answers) == len(mode.feature_levels) and answers[-1] is not None
            scalars = torch.tensor(root["scalars"])
            whole = {name: torch.zeros(width) for name, width in selector.widths.items()} | {"scalars": scalars}
            for name, answer in zip(mode.feature_levels, answers, strict=True):
                view = whole if name == level else {"scalars": scalars[: len(EARLY_SCALARS)]}
                choice = selector.actions[int(script(view)[0])]
                assert answer == choice or (answer is None and choice.drafts)
    chosen = {tuple(root["answers"][-1]) for setting in found["settings"] for root in setting["roots"]}
    assert len(chosen) > 3 and [root["committed"] for root in found["settings"][0]["roots"]] == list(ROOTS)
    assert len((tmp_path / "selector" / "golden.json").read_bytes()) < 60_000


def test_of_a_logs_selector(tmp_path: Path) -> None:
    """Both levels, and the rule that copies."""
    space, own = logged.SPACE, logged.profile()
    module = SelectorModule("regressor", LOG.levels[1], [], {"hidden": [8]}, schema=LOG.name, space=space.to_json())
    texts = logged.texts()
    module.begin_at(texts, "naive", torch.arange(len(texts.length_R)))
    modes = [Mode(Sampling(0.0), space.chain(2), (level,), batch=2, level=level) for level in LOG.levels]
    rule = replace(modes[0], feature_levels=(), rule=LookupRule(2, 6), batch=4)
    rows = [mode_row(mode, torch.ones(len(space.trees))) for mode in (*modes, rule)]
    facts = {"pair": {"target": "t", "draft": "d", "fingerprint": own.pair}, "metrics": {}, "run_id": "none"}
    write_artefact(tmp_path / "s", module, own, "naive", space.chain(2), rows, facts, golden=golden)
    found = json.loads((tmp_path / "s" / "golden.json").read_text())
    selector, script = load_selector(tmp_path / "s"), load_script(tmp_path / "s")
    for setting in found["settings"]:
        for root in setting["roots"]:
            assert len(root["scalars"]) == (LOG.first if setting["level"] == LOG.levels[0] else len(LOG.scalars))
            features = {"scalars": torch.tensor(root["scalars"])}
            (answer,) = root["answers"]
            tuned = selector.at(0.0, batch=setting["batch"], level=setting["level"])
            assert Action.of(answer) == tuned.select(features) == selector.actions[int(script(features)[0])]
    copied = [root["answers"][0] for root in found["settings"][-1]["roots"]]
    assert list(Action.copy(6)) in copied and list(space.chain(2)) in copied
    assert set(HIDDEN_STATES).isdisjoint(found)
