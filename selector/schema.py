"""The contract between data generation, training and engines: what a selector sees, and what a trace holds.

Bump `SCHEMA_VERSION` when a name, a unit or a shape changes; every reader refuses other versions.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 5


class InputError(ValueError):
    """What a user got wrong: a config, a file, a model. One line that names it; the command line exits with 2."""


@dataclass(frozen=True)
class Scalar:
    """One scalar feature."""

    name: str
    unit: str
    meaning: str


DECAYS = (0.5, 0.8, 0.95, 0.99)  # of the running means over the committed text: the last two tokens, five, 20, 100
LONGEST_MATCH = 32  # tokens; longer matches, and longer runs, count as this many
LONGEST_LOOKUP = 16  # tokens
SOURCE_LENGTHS = (1, 2, 4, 8, 16)  # tokens that a lookup would copy
PRECEDENT_LENGTHS = (1, 2, 3, 4)  # tokens at the text's end


def _means(name: str, unit: str, meaning: str) -> tuple[Scalar, ...]:
    """Running means of one number over the committed text."""
    return tuple(
        Scalar(f"{name}_mean_{decay:g}", unit, f"{meaning}, mean over the text so far, weights {decay:g}^age")
        for decay in DECAYS
    )


# `root` is the last committed token, `prev` the one before it. `p` and `q` are the target's and the draft's
# distributions after a token, after temperature and nucleus filtering; entropies are those at temperature 1, for at
# temperature 0 nothing would be left of them. The history begins with the last prompt token: no engine computes logits
# of the whole prompt. Means are running ones over the text so far, with weights decay^age. The *source* is the place
# that a lookup would copy from.
EARLY_SCALARS = (  # known before any pass of the draft
    Scalar("target_entropy_prev", "nats", "of the target after prev, at temperature 1"),
    *_means("target_entropy", "nats", "the target's entropy at temperature 1"),
    *_means("copied", "1", "1 where a lookup foretold the text's token, 0 elsewhere"),
    Scalar("copied", "tokens", f"how many of the latest tokens in a row a lookup foretold; {LONGEST_MATCH} at most"),
    Scalar(
        "match", "tokens", f"length of the longest end of the text that stands in it before; {LONGEST_MATCH} at most"
    ),
    *(
        Scalar(
            f"source_entropy_{count}",
            "nats",
            f"of the target before each of the first {count} tokens that a lookup would copy, when the text was there; "
            "mean of those that are known, or target_entropy_mean_0.8",
        )
        for count in SOURCE_LENGTHS
    ),
    Scalar("source_known", "1", f"share of the first {LONGEST_LOOKUP} that it is known of: those after the prompt"),
    Scalar(
        "source_foretold", "tokens", "how many of these in a row, from the first on, a lookup foretold at that time"
    ),
    Scalar("source_steady", "tokens", f"for how many tokens the source has moved along; {LONGEST_MATCH} at most"),
    Scalar("source_distance", "tokens", "from the source's end to the root; 0 without a match"),
    *(
        scalar
        for count in PRECEDENT_LENGTHS
        for scalar in (
            Scalar(f"seen_{count}", "times", f"how often the last {count} tokens stand in the text before"),
            Scalar(f"agree_{count}", "1", "of these, the share that the token that a lookup would copy first followed"),
        )
    ),
    Scalar("context_length", "tokens", "committed tokens, the root token included"),
    Scalar("temperature", "1", "of the target's sampling"),
    Scalar("top_p", "1", "nucleus threshold; 1 keeps everything"),
)
DRAFT_SCALARS = (  # known once the draft has passed the root token
    Scalar("draft_entropy_prev", "nats", "of the draft after prev, at temperature 1"),
    Scalar("draft_entropy_root", "nats", "of the draft after root, at temperature 1"),
    *_means("accepted", "1", "min(1, q/p) of the text's own tokens"),
    *_means("draft_entropy", "nats", "the draft's entropy at temperature 1"),
    Scalar("agreed", "tokens", f"how many of the latest tokens in a row have q >= p; {LONGEST_MATCH} at most"),
)
SCALARS = (*EARLY_SCALARS, *DRAFT_SCALARS)
COUNTS = tuple(f for f, scalar in enumerate(SCALARS) if scalar.unit in ("tokens", "times"))
SCALAR_NAMES = tuple(scalar.name for scalar in SCALARS)
LENGTH_AT = SCALAR_NAMES.index("context_length")
SCALARS_KEY = "scalars"  # in a feature dictionary: one float vector in the order of SCALARS

# Last hidden states (DDTE, appendix E): float vectors of the models' widths. Only selectors with `full` features read
# them. The target has not passed the root token.
HIDDEN_STATES = ("target_hidden_prev", "draft_hidden_prev", "draft_hidden_root")

# What a selector sees: the scalars that no pass of the draft is needed for; all scalars; hidden states, too. It may be
# asked with the first and then again with more.
EARLY, LIGHT, FULL = FEATURES = ("early", "light", "full")
MATCH = "match"  # what the rule for lookups sees: a dictionary with the length of the match alone
LOOKUP_COLUMN = "lookup.right"  # trace column: how many tokens of a lookup the text goes on with, by root


def scalars_of(sees: str) -> tuple[Scalar, ...]:
    """The scalars that a selector sees, a beginning of `SCALARS`."""
    return EARLY_SCALARS if sees == EARLY else SCALARS


def survival_column(verifier: str) -> str:
    """Trace column of a verifier's labels: `P(tau >= t | text)`, `ActionSpace.survivals` of every root in turn."""
    return f"{verifier}.survivals"


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
