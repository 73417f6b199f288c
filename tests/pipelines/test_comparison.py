from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.comparison import evaluation, method_table, summary_table
from pipelines.config import Config, load_config
from pipelines.methods import AT_ROOT, AUTOREGRESSIVE, BEST_STATIC, SELECTOR, WALL

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
GPU = "gpu_like_1/20"


def config() -> Config:
    return load_config(DEMO, ["verifiers=[naive_tree,specinfer,traversal]", "train.verifier=traversal"])


def rows(
    speeds: dict[str, float], sources: int = 6, spread: float = 0.0, seed: int = 0, clock: str = WALL
) -> list[dict]:
    """Two prompts of each source, decoded at a speed that varies by source, alike for all methods."""
    rng = np.random.default_rng(seed)
    result = []
    for temperature in (1.0, 0.2):
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
                            "clock": clock,
                            "method": method,
                            "verifier": "traversal",
                            "action": [1, 4, 0] if method == BEST_STATIC else None,
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


SPEEDS = {AUTOREGRESSIVE: 50.0, BEST_STATIC: 100.0, AT_ROOT: 110.0, SELECTOR: 125.0}


def test_ratios_are_to_the_tree_that_training_data_promise_the_most_of() -> None:
    result = evaluation(config(), rows(SPEEDS))
    assert result["summary"]["ratio_vs_best_static_delayed"] == pytest.approx(1.25)  # not to the fastest one here
    assert result["summary"]["ratio_vs_static_traversal_wall"] == pytest.approx(125 / 110)
    assert result["summary"]["ratio_vs_autoregressive"] == pytest.approx(2.5)
    assert result["summary"]["selector_time_share"] == pytest.approx(0.01)
    assert {entry["method"] for entry in result["methods"]} == set(SPEEDS)
    assert [entry["method"] for entry in result["methods"] if entry["is_best_static"]] == [BEST_STATIC] * 2
    assert result["methods"][0]["method"] == AUTOREGRESSIVE
    assert result["methods"][0]["block_efficiency"] == pytest.approx(66 / 16)
    assert result["methods"][0]["prompts"] == 12
    assert method_table(result).row_count == 8


def test_every_clock_has_figures_of_its_own() -> None:
    synthetic = {BEST_STATIC: 200.0, AT_ROOT: 160.0, SELECTOR: 220.0}
    result = evaluation(config(), [*rows(SPEEDS), *rows(synthetic, clock=GPU)])
    summary = result["summary"]
    assert summary["ratio_vs_best_static_delayed"] == pytest.approx(1.25)
    assert summary["ratio_vs_best_static_delayed_gpu_like"] == pytest.approx(1.1)
    assert summary["ratio_vs_static_traversal_gpu_like"] == pytest.approx(220 / 160)
    assert summary[f"ratio_vs_static_traversal_{GPU}"] == pytest.approx(220 / 160)
    assert "ratio_vs_autoregressive_gpu_like" not in summary
    single = [e for e in result["ratios"] if (e["clock"], e["figure"]) == (GPU, "ratio_vs_static_traversal")]
    assert [e["ratio"] for e in single] == pytest.approx([220 / 160] * len(config().sampling))
    assert all(e["interval_95"] == pytest.approx([e["ratio"]] * 2) for e in single)
    assert method_table(result).row_count == 8 and method_table(result, GPU).row_count == 6
    assert summary_table(summary).row_count == len([k for k in summary if not k.endswith("interval_95")])


def test_the_bootstrap_is_paired() -> None:
    """Prompts differ a lot, methods by a constant factor: speeds are uncertain, their ratios are not."""
    result = evaluation(config(), rows(SPEEDS, spread=0.2))
    (low, high), *_ = (entry["interval_95"] for entry in result["methods"] if entry["method"] == SELECTOR)
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
    result = evaluation(config(), data)
    low, high = result["summary"]["ratio_vs_best_static_delayed_interval_95"]
    selectors = [entry for entry in result["methods"] if entry["method"] == SELECTOR]
    for entry in selectors:
        assert [low, high] == pytest.approx(entry["ratio_interval_95"])
