"""What `quick` found under one sampling setting: in words, as a table and for `quick.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from data_gen.models.sampling import Sampling
from pipelines.quick.candidates import Candidate, best_of
from pipelines.run import table
from selector.train.potential import Potential

NOTICEABLE = 1.02  # times plain decoding: the few steps that are timed do not tell less apart


@dataclass(frozen=True)
class Answer:
    """What was found from some texts under one sampling setting."""

    sampling: Sampling
    texts: int
    candidates: list[Candidate]
    potential: Potential

    @property
    def best(self) -> Candidate:
        return best_of(self.candidates)

    def verdict(self) -> str:
        best, ratio = self.best, self.best.judged.ratio
        said = f"{self.sampling}: speculation"
        if best.is_plain or ratio.value <= NOTICEABLE:
            return f"{said} does not pay here: decode without a draft"
        how = f"{ratio.value:.2f} ±{ratio.error:.2f} times plain decoding with {best.verifier}, {best}"
        return f"{said} {'pays' if best.judged.pays else 'may pay'}: {how}"

    def rows(self) -> list[dict[str, str]]:
        """The candidates as the cells of a table."""
        return [
            {
                "verifier": each.verifier,
                "tree or copy": str(each),
                "tokens a step": f"{each.efficiency:.2f}",
                "speed": f"{each.judged.ratio.value:.2f} ±{each.judged.ratio.error:.2f}",
            }
            for each in self.candidates
        ]

    def table(self) -> Table:
        return table(self.rows(), f"{self.sampling}: speed over plain decoding, replayed on {self.texts} texts")

    def selector(self) -> dict[str, str]:
        """What a quick model gains, as the cells of a table."""
        return {"gain": str(self.potential.gain), "over": f"the {self.potential.over}"}

    def to_json(self) -> dict[str, Any]:
        """Ratios are to plain decoding, but the gain of a selector is to the best tree or rule."""
        rows = [
            {
                "verifier": each.verifier,
                "choice": str(each),
                "copies": each.mode.rule is not None,
                "block_efficiency": each.efficiency,
                **asdict(each.judged.ratio),
            }
            for each in self.candidates
        ]
        promise, selector = rows[self.candidates.index(self.best)], asdict(self.potential.gain)
        found = {"texts": self.texts, "promise": promise, "selector": selector, "candidates": rows}
        return asdict(self.sampling) | found
