"""The gain that a quick model predicts, on texts whose labels are made by hand."""

from __future__ import annotations

from selector.train.potential import potential
from selector.train.tuning import TIE
from tests.selector.synthetic import texts, timed


def test_where_texts_repeat_themselves_the_gain_is_over_the_lookup_rule() -> None:
    """There the rule has most of what can be gained over a tree, and a feature that tells nothing adds nothing."""
    fitted_on, judged_on = (timed(texts(24, seed=seed, repeats=0.4, told=False)) for seed in (1, 2))
    found = potential(fitted_on, judged_on)
    assert found.over == "lookup rule"
    assert found.gain.value < 1 + 2 * TIE * found.gain.error


def test_elsewhere_it_is_over_the_static_tree_and_a_feature_that_tells_gains() -> None:
    fitted_on, judged_on = (timed(texts(24, seed=seed)) for seed in (1, 2))
    found = potential(fitted_on, judged_on)
    assert found.over == "static tree"
    assert found.gain.value > 1 + 2 * TIE * found.gain.error
