"""A run's own traces as a log: texts of one sampling setting, with the labels of the draft's chains.

So whatever is asked of an engine's log can be asked of a pair's traces: batches of requests, other projects' rules.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from data_gen.models.sampling import Sampling
from data_gen.texts.logs import LoggedText
from selector.actions import ActionSpace
from selector.schema import InputError, check_shard, read_manifest, survival_column

DRAFTER = "draft"
COLUMNS = ("prompt", "kind", "source", "temperature", "top_p", "tokens", "start", "roots")


def read_trace_log(folder: Path, sampling: Sampling) -> list[LoggedText]:
    """The texts of a trace store that were sampled so, of all splits.

    Raises:
        InputError: it is no trace store, a file is damaged, or it holds no such texts.
    """
    manifest = read_manifest(folder)
    verifier, depth = manifest["depends"]["verifiers"][0], ActionSpace.default().depth
    wanted, texts = (round(sampling.temperature, 6), round(sampling.top_p, 6)), []
    for name, listed in sorted(manifest["shards"].items()):
        check_shard(folder, name, listed)
        column = survival_column(verifier)
        for number, row in enumerate(pq.read_table(folder / name, columns=[*COLUMNS, column]).to_pylist()):
            if (round(row["temperature"], 6), round(row["top_p"], 6)) != wanted or not row["roots"]:
                continue
            survivals_RD = np.array(row[column], np.float32).reshape(row["roots"], -1)[:, :depth]
            place, start = f"{folder / name}:{number}", row["start"] + 1
            facts = row["prompt"], row["source"], row["kind"], row["tokens"], start
            texts.append(LoggedText(*facts, {DRAFTER: survivals_RD}, place))
    if not texts:
        raise InputError(f"{folder}: no texts of temperature {sampling.temperature:g}, top-p {sampling.top_p:g} there")
    return texts
