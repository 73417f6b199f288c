"""What ends a stage on its way where a library holds the loop: what was there stays, and the same
command goes on."""

from __future__ import annotations

import resource
import signal
from functools import partial
from pathlib import Path

import torch

from tests.pipelines.runs import SMALL, at_call, contents, espalier, evaluation_of, outcome

INTERRUPTED = "espalier: interrupted; the same command goes on"
CTRL_C = partial(signal.raise_signal, signal.SIGINT)


def full_disk() -> None:
    """From now on no file grows beyond 30,000 bytes, the nearest thing for a process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))


def trained() -> dict[Path, bytes]:
    return {path: content for path, content in contents().items() if "training" in path.parts}


def test_a_training_that_is_stopped_leaves_the_earlier_one(copy: Path) -> None:
    """By Ctrl-C, which Lightning would take for the end; by a full disk, when it would record its
    own end, too."""
    before = trained()
    batch, again = (
        "pipelines.train.fitting.StopBetweenBatches.on_train_batch_start",
        [*SMALL, "train.epochs=3"],
    )
    code, output = outcome(copy, "train", *again, prepare=partial(at_call, batch, 4, CTRL_C))
    assert code == 130 and INTERRUPTED in output and "Traceback" not in output, output
    code, output = outcome(
        copy,
        "train",
        *again,
        prepare=partial(at_call, "pytorch_lightning.Trainer.save_checkpoint", 1, full_disk),
    )
    line = output.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in output and output.count("espalier: ") == 1, output
    assert line.startswith("espalier: sqlite:///mlruns/mlflow.db: ") and line.endswith(
        "the same command then goes on"
    )
    assert trained() == before
    assert "train: reusing" in espalier(copy, "train", *SMALL)


def test_an_evaluation_goes_on_after_ctrl_c(copy: Path) -> None:
    """What was decoded is kept, and is not decoded again."""
    longer = [*SMALL, "evaluate.prompts=4"]
    decode = "pipelines.evaluate.stage._decode_all"  # the first call warms up
    code, output = outcome(copy, "evaluate", *longer, prepare=partial(at_call, decode, 3, CTRL_C))
    assert code == 130 and INTERRUPTED in output and "Traceback" not in output, output
    (part,) = (copy / "runs/demo/parts/evaluate").glob("*.pt")
    rows = torch.load(part, weights_only=False)
    for row in rows:
        row["tokens"] += 10**9
    torch.save(rows, part)
    espalier(copy, "evaluate", *longer)
    for entry in evaluation_of(copy)["methods"]:
        assert entry["prompts"] == 4
        assert (entry["tokens"] > 10**9) == (entry["temperature"] == rows[0]["temperature"])
