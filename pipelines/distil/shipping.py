"""`python -m pipelines.distil.shipping CONFIG` puts a run's draft in the place of the one that comes with Espalier."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from data_gen.models.distilled import WEIGHTS
from pipelines.config import Config, load_config
from pipelines.config.sections import SHIPPED
from pipelines.distil.stage import folder_of
from pipelines.run import read_json, read_record, require, write_json
from selector.files import atomically
from selector.schema import sha256

LICENCE = "Apache-2.0; derived from SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), whose layers the draft began as"


def ship(config: Config, place: Path = SHIPPED) -> dict[str, Any]:
    """Copy the draft of a finished `distil` stage, with what is said of it."""
    require(config, "distil", {})
    record, about = read_record(config, "distil"), read_json(folder_of(config) / "manifest.json", "distil")
    made = {
        "licence": LICENCE,
        "weights": sha256(folder_of(config) / "draft" / WEIGHTS),
        "draft": about["draft"],
        "config": record["provenance"]["config"]["distil"],
        "seed": config.seed,
        "commit": record["provenance"]["commit"],
        "packages": record["provenance"]["packages"],
    }
    with atomically(place) as partial:
        shutil.copytree(folder_of(config) / "draft", partial)
        write_json(partial / "provenance.json", made)
    return made


if __name__ == "__main__":
    ship(load_config(Path(sys.argv[1]), sys.argv[2:]))
