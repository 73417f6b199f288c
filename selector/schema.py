"""The contract between data generation, training and engines: what a selector sees, and what a trace holds.

Bump `SCHEMA_VERSION` when a name, a unit or a shape changes; every reader refuses other versions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
JOINT = "joint"  # in place of a verifier: for every tree, the one of several that is fastest with it


class InputError(ValueError):
    """What a user got wrong: a config, a file, a model. One line that names it; the command line exits with 2."""


@dataclass(frozen=True)
class Scalar:
    """One scalar feature."""

    name: str
    unit: str
    meaning: str


# Known at a root before any pass.
CONTEXT = (
    Scalar("context_length", "tokens", "committed tokens, the root token included"),
    Scalar("temperature", "1", "of the target's sampling"),
    Scalar("top_p", "1", "nucleus threshold; 1 keeps everything"),
)

# `prev` is the token before the root token, `root` the last committed one (DDTE, appendix E). Distributions are taken
# after temperature and nucleus filtering; divergences floor probabilities at 1e-10, so that they are finite.
SCALARS = (
    Scalar("target_entropy_prev", "nats", "H(p_prev)"),
    Scalar("draft_entropy_prev", "nats", "H(q_prev)"),
    Scalar("draft_entropy_root", "nats", "H(q_root)"),
    Scalar("kl_target_draft_prev", "nats", "KL(p_prev || q_prev)"),
    Scalar("kl_draft_target_prev", "nats", "KL(q_prev || p_prev)"),
    Scalar("l1_prev", "1", "|p_prev - q_prev|_1"),
    *CONTEXT,
    Scalar("draft_pass_seconds", "s", "estimated time of one draft pass at this length"),
    Scalar("target_pass_seconds", "s", "estimated time of one target pass over one token at this length"),
)
SCALAR_NAMES = tuple(scalar.name for scalar in SCALARS)
LATENCY_SCALARS = ("draft_pass_seconds", "target_pass_seconds")  # of a machine, not of a trace
TRACE_SCALARS = tuple(name for name in SCALAR_NAMES if name not in LATENCY_SCALARS)

# What is known while a trunk is drafted, at a token that has been drawn and not passed yet: all of it the draft's own.
# At the root nothing has been drawn, and the first three are 0.
TRUNK_SCALARS = (
    Scalar("drafted", "tokens", "drafted so far, this token included"),
    Scalar("token_logprob", "nats", "log of the newest token's probability under the draft"),
    Scalar("path_logprob", "nats", "sum of the log-probabilities along the drafted path"),
    *CONTEXT,
)
TRUNK_STATE = "draft_hidden_parent"  # the draft's last hidden state where the token was drawn; at the root, the root's

# Last hidden states: float vectors of the models' widths.
HIDDEN_STATES = ("target_hidden_prev", "draft_hidden_prev", "draft_hidden_root")
SCALARS_KEY = "scalars"  # in a feature dictionary: one float vector in the order of SCALARS


def label_columns(verifier: str) -> dict[str, str]:
    """Trace columns of a verifier's labels; each holds one value per action, in `ActionSpace` order.

    `mean`: E[tau + 1], averaged over the samples. `error`: its standard error. `half`: the mean over the first half of
    the samples, for cross-fitting. `realised`: tau + 1 of one verification, drawn on the first sample's tree.
    `trunk`: of every sample in turn, E[tau + 1] given its own trunk, samples x actions.
    """
    return {kind: f"{verifier}.{kind}" for kind in ("mean", "error", "half", "realised", "trunk")}


# Trace columns of the trunks of a root's samples, samples x trunk tokens (without the last one, which nothing follows).
TRUNK_COLUMNS = {
    "hidden": "trunk.hidden",  # TRUNK_STATE, samples x tokens x width
    "token_entropy": "trunk.token_entropy",  # H of the draft's distribution that it was drawn from, in nats
    "token_logprob": "trunk.token_logprob",
    "accept": "trunk.accept",  # min(1, p/q) of the token
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a trace store: `depends` (what its rows follow from) and `shards` (rows, bytes, sha256).

    Raises:
        InputError: it is missing or damaged.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        if not {"depends", "shards"} <= set(manifest):
            raise KeyError("shards")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: run the data stage first") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: remove {folder} and run the data stage again") from error
    return manifest


def check_shard(folder: Path, name: str, listed: dict[str, Any]) -> None:
    """InputError unless the file is there with the listed checksum."""
    path = folder / name
    if not path.exists():
        raise InputError(f"{path} is missing: run the data stage again")
    if sha256(path) != listed["sha256"]:
        raise InputError(f"{path} is damaged (truncated or changed): remove it and run the data stage again")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
