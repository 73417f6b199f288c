"""What fewer loops cost the target: averages of its weights before and after the training against loops.

    .venv/bin/python -m pipelines.studies.averages 7a478d3

That commit has the embedded target as it was before. An average of both weights stands for less of this training, so
the rows show how much loss every share of loops costs (`pipelines.pair.shipping` measures both).
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from pipelines.config.sections import SHIPPED
from pipelines.pair.shipping import code_loss, loop_share
from pipelines.run import console

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
HEADS = "share of the weights after | loss on held-out code, nats a token | greedy tokens inside loops"


def main(commit: str) -> None:
    console.print(f"\n| {HEADS} |\n{'|---' * 3}|", soft_wrap=True, highlight=False)
    with TemporaryDirectory() as folder:
        target, average = SHIPPED / "target", Path(folder, "average")
        asked = ["git", "archive", commit, "target"]
        packed = subprocess.run(asked, cwd=SHIPPED, check=True, stdout=subprocess.PIPE)
        with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        for share in SHARES:
            write_average(Path(folder, "target"), target, share, average)
            loss, loops = code_loss(average), loop_share(average)
            console.print(f"| {share:g} | {loss:.3f} | {loops:.0%} |", soft_wrap=True, highlight=False)


def write_average(before: Path, after: Path, share: float, folder: Path) -> None:
    """Write the model whose weights are `1 - share` of one model's and `share` of another's, in float32."""
    one, other = (LlamaForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (before, after))
    theirs = other.state_dict()
    one.load_state_dict({name: weight.lerp(theirs[name], share) for name, weight in one.state_dict().items()})
    one.save_pretrained(folder)
    AutoTokenizer.from_pretrained(after).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
