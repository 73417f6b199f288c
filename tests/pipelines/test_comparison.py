from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.comparison import AUTOREGRESSIVE, SELECTOR, evaluation, method_table
from pipelines.config import Config, load_config

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
NAMES = ("static naive_tree", "static specinfer", "static traversal")
TUNED = {
    (temperature, 1.0): {
        name: {"verifier": name.split()[1], "action": [1, 4, 0], "predicted": predicted}
        for name, predicted in zip(NAMES, (100.0, 120.0, 110.0), strict=True)
    }
    for temperature in (1.0, 0.6)
}


def config() -> Config:
    return load_config(DEMO, ["verifiers=[naive_tree,specinfer,traversal]", "train.verifier=traversal"])


def rows(speeds: dict[str, float], sources: int = 6, spread: float = 0.0, seed: int = 0) -> list[dict]:
    """Two prompts of each source, decoded at a speed that varies by source, alike for all methods."""
    rng = np.random.default_rng(seed)
    result = []
    for temperature in (1.0, 0.6):
        for source in range(sources):
            factor = 1 + spread * rng.standard_normal()
            for prompt in range(2):
                for method, speed in speeds.items():
                    result.append(
                        {
                            "prompt": f"{source}-{prompt}",
                            "source": str(source),
                            "temperature": temperature,
                            "top_p": 1.0,
                            "method": method,
                            "verifier": "traversal",
                            "tokens": 64,
                            "seconds": 64 / (speed * factor),
                            "steps": 16,
                            "block_tokens": 66,
                            "step_seconds": 60 / (speed * factor),
                            "select_seconds": 0.6 / (speed * factor) if method == SELECTOR else 0.0,
                            "actions": {"(1, 4, 0)": 16},
                        }
                    )
    return result


SPEEDS = {AUTOREGRESSIVE: 50.0, NAMES[0]: 90.0, NAMES[1]: 100.0, NAMES[2]: 110.0, SELECTOR: 125.0}


def test_ratios_are_to_the_method_that_training_data_promise_the_most_of() -> None:
    result = evaluation(config(), rows(SPEEDS), TUNED)
    assert result["summary"]["ratio_vs_best_static_delayed"] == pytest.approx(1.25)  # specinfer, not the fastest here
    assert result["summary"]["ratio_vs_autoregressive"] == pytest.approx(2.5)
    assert result["summary"]["selector_time_share"] == pytest.approx(0.01)
    assert [entry["method"] for entry in result["methods"]][:5] == list(SPEEDS)
    assert [entry["method"] for entry in result["methods"] if entry["is_best_static"]] == [NAMES[1]] * 2
    assert result["methods"][0]["block_efficiency"] == pytest.approx(66 / 16)
    assert result["methods"][0]["prompts"] == 12
    assert method_table(result).row_count == 10


def test_the_bootstrap_is_paired() -> None:
    """Prompts differ a lot, methods by a constant factor: speeds are uncertain, their ratios are not."""
    result = evaluation(config(), rows(SPEEDS, spread=0.2), TUNED)
    low, high = result["methods"][4]["interval_95"]
    assert high / low > 1.1
    low, high = result["summary"]["ratio_vs_best_static_delayed_interval_95"]
    assert high - low < 1e-9


def test_the_bootstrap_resamples_sources_once_for_all_settings() -> None:
    """With ratios that vary by source, alike in both settings, averaging settings must not narrow the interval."""
    data = rows(SPEEDS, sources=12)
    rng = np.random.default_rng(1)
    factors = {str(source): 1 + 0.3 * rng.standard_normal() for source in range(12)}
    for row in data:
        if row["method"] == SELECTOR:
            row["seconds"] *= factors[row["source"]]
    result = evaluation(config(), data, TUNED)
    low, high = result["summary"]["ratio_vs_best_static_delayed_interval_95"]
    selectors = [entry for entry in result["methods"] if entry["method"] == SELECTOR]
    for entry in selectors:
        assert [low, high] == pytest.approx(entry["ratio_interval_95"])
