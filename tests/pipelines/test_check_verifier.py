"""`espalier check-verifier` finds planted faults, passes right verifiers, and says what it cannot
check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_gen.verification import VERIFIERS
from data_gen.verification.checking import check_draws, check_law, named
from pipelines.cli import app

PLANTED = "tests.data_gen.verification.planted"


@pytest.mark.parametrize("name", ["naive_tree", "traversal", "lifted_uniform", "lifted_best"])
def test_ours_are_right(name: str) -> None:
    assert check_law(VERIFIERS[name]("iid").law, "iid") is None


def test_a_right_verifier_that_draws_passes() -> None:
    """Chi-square with a false-alarm rate of 1e-4 and a fixed seed."""
    assert check_draws(named(f"{PLANTED}:right", "iid"), "iid", draws=100) is None


@pytest.mark.parametrize(
    ("name", "style", "where"),
    [
        ("min_ratio_on_top_k", "top_k", "(2, 0, 1)"),
        ("residual_not_renormalised", "iid", "(2, 0, 1)"),
        ("siblings_out_of_order", "iid", "(2, 0, 1)"),
        ("block_without_minimum", "iid", "(1, 2, 0)"),
    ],
)
def test_planted_faults_are_found_at_the_smallest_tree(name: str, style: str, where: str) -> None:
    done = CliRunner().invoke(app, ["check-verifier", f"{PLANTED}:{name}", f"style={style}"])
    assert done.exit_code == 1, done.output
    assert f"wrong on trees (K, L1, L2) = {where}" in done.output
    assert "the text (" in done.output and "for example the tree with the branches" in done.output


def test_an_error_of_rounding_is_seen_and_an_option_is_no_generator(inside: Path) -> None:
    law = "lambda tree, p, q, *, scale=1: torch.cat([p[:1], 0 * p[1:]]).float()"
    (inside / "mine.py").write_text(f"import torch\nlaw = {law}")
    done = CliRunner().invoke(app, ["check-verifier", "mine:law"])
    (laws,) = re.findall(r"has probability (\S+), the target gives it (\S+)", done.output)
    assert done.exit_code == 1 and 0 < abs(float(laws[0]) - float(laws[1])) < 1e-6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_module:verify"], "no_such_module:verify: ModuleNotFoundError"),
        (
            [f"{PLANTED}:right", "style=sorted"],
            "a style among iid, without_replacement, greedy, top_k",
        ),
        ([f"{PLANTED}:right", "speed=2"], "after MODULE:NAME comes style=.."),
        (["data_gen.verification:Greedy"], "greedy is not lossless for style 'iid'"),
        (["math:gcd"], "the verifier raises"),
        (["ends:verify"], "ends:verify: SystemExit: 0"),
        (["ends_later:verify"], "the verifier raises SystemExit: 0"),
    ],
)
def test_what_cannot_be_checked_is_one_line(words: list[str], message: str, inside: Path) -> None:
    (inside / "ends.py").write_text("raise SystemExit(0)")
    (inside / "ends_later.py").write_text("def verify(tree, p, q, generator): raise SystemExit(0)")
    done = CliRunner().invoke(app, ["check-verifier", *words])
    assert done.exit_code == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
