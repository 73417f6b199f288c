"""Sections of the config that studies read: the audit of verifiers, and the timing of verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from data_gen.text_labels.labels import labelled_verifier
from data_gen.verification import STYLES, VERIFIERS, get_verifier
from pipelines.config.sections import ActionField, SamplingSetting, Section, distinct, in_space

EIGHT_SETTINGS = (
    *(SamplingSetting(temperature=t) for t in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)),
    *(SamplingSetting(top_p=p) for p in (0.9, 0.99)),
)


MIN_ROOTS = 8
LABELLED = tuple(name for name in VERIFIERS if name not in ("khisti", "greedy_block"))  # those whose labels are cheap


def check_labelled(verifiers: tuple[str, ...]) -> None:
    """ValueError unless all of these verifiers exist and have labels along a text."""
    for name in verifiers:
        if name not in VERIFIERS:
            raise ValueError(f"verifiers: unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
        try:
            labelled_verifier(name)
        except ValueError as error:
            raise ValueError(f"verifiers: {error}") from error


class Quick(Section):
    """The two-minute answer: does speculation pay here, with which verifier and tree; does a selector?"""

    texts: int = Field(24, ge=4, description="of the first of the run's sampling settings")
    verifiers: tuple[str, ...] = Field(LABELLED, min_length=1, description="verifiers to compare")

    @model_validator(mode="after")
    def _verifiers_exist(self) -> Quick:
        check_labelled(self.verifiers)
        return self


class Audit(Section):
    """The comparison of verifiers, without any training."""

    sampling: tuple[SamplingSetting, ...] = Field(EIGHT_SETTINGS, min_length=1, description="settings to compare in")
    roots: int = Field(1200, ge=8, description="over all sampling settings")
    verifiers: tuple[str, ...] = Field(LABELLED, min_length=1, description="verifiers to compare")
    styled: tuple[str, ...] = Field(
        (
            "khisti:iid",
            "greedy_block:iid",
            "specinfer:without_replacement",
            "traversal:without_replacement",
            "greedy:greedy",
        ),
        description="verifier:style, on further trees whose branches are drawn so",
    )
    draft_temperatures: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.7, 1.4), description="of the draft, as multiples of the target's"
    )
    topologies: tuple[Path, ...] = Field((), description="JSON files of child-rank paths, as sparse trees are written")
    acceptance_roots: int = Field(160, ge=0, description="roots at which the acceptance of every rule is computed")
    tree: ActionField = Field((4, 0, 8), description="the tree on which verifiers, styles and temperatures compare")
    bootstrap: int = Field(2000, ge=100, description="resamples of the sources")

    @field_validator("sampling")
    @classmethod
    def _distinct(cls, value: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
        return distinct(value)

    @field_validator("tree")
    @classmethod
    def _tree_in_space(cls, value: tuple[int, int, int]) -> tuple[int, int, int]:
        K, L1, L2 = in_space(value)
        return K, L1, L2

    @model_validator(mode="after")
    def _verifiers_exist(self) -> Audit:
        check_labelled(self.verifiers)
        for name in self.styled:
            verifier, separator, style = name.partition(":")
            if not separator or style not in STYLES:
                raise ValueError(f"styled: {name!r} is not verifier:style; styles are {', '.join(STYLES)}")
            get_verifier(verifier, style)  # its ValueError says what is wrong
            if verifier == "spechub" and self.tree[0] > 2:
                raise ValueError(f"styled: spechub verifies pairs; tree has K = {self.tree[0]}")
        if self.roots < MIN_ROOTS * len(self.sampling):
            raise ValueError(f"roots: fewer than {MIN_ROOTS} for each of {len(self.sampling)} sampling settings")
        if "traversal" not in self.verifiers:
            raise ValueError("verifiers: traversal, which the others are compared with, is not among them")
        return self


class Bench(Section):
    """Timing of the verifiers alone, on random rows."""

    vocabularies: tuple[Annotated[int, Field(ge=16)], ...] = Field(
        (2048, 151936), min_length=1, description="sizes of the vocabulary"
    )
    repeats: int = Field(40, ge=2, description="of every timing")
