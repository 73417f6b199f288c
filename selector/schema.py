"""The contract between data generation, training and engines: a selector's features, and the
contents of a trace.

Scalars are found by their names. One that changes its meaning gets another name, so that nothing
that was trained with the old one is used with the new one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Of all files of runs and artefacts. Raise it when the same inputs give other contents or another
# layout.
FORMAT = 29


class InputError(ValueError):
    """A user's mistake in a config, a file or a model. The message is one line that names it; the
    exit code is 2."""


@dataclass(frozen=True)
class Scalar:
    """One scalar feature. One that is not `learned` only selects step times and settings: a
    regressor does not see it."""

    name: str
    unit: str
    meaning: str
    learned: bool = True


# of the running means over the committed text: about the last 2, 5, 20 and 100 tokens
DECAYS = (0.5, 0.8, 0.95, 0.99)
LONGEST_MATCH = 32  # tokens at which matches and runs are cut
LONGEST_LOOKUP = 16  # tokens at which lookups are cut
AFTER_MATCH_LENGTHS = (1, 2, 4, 8, 16)  # tokens after the match
PRECEDENT_LENGTHS = (1, 2, 3, 4)  # tokens at the text's end
MOST_SEEN = 32  # times that such tokens count as seen
LONGEST_COUNTED = 8  # tokens in the statistics by token
MOST_COUNTED = 500  # times in the statistics by token


def _means(name: str, unit: str, meaning: str) -> tuple[Scalar, ...]:
    means = []
    for decay in DECAYS:
        words = f"{meaning}, mean over the text so far, weights {decay:g}^age"
        means.append(Scalar(f"{name}_mean_{decay:g}", unit, words))
    return tuple(means)


# `root` is the last committed token, `prev` the one before it. `p` and `q` are the target's and the
# draft's distributions after temperature and nucleus filtering; entropies are at temperature 1,
# because they would be 0 at temperature 0. A model's distributions are known from the last prompt
# token on, because engines do not compute logits of the whole prompt. The *match* is the
# longest suffix of the text that occurs before, where it occurred last; a lookup copies the tokens
# after it. Every scalar that the network sees is bounded, so that long texts
# stay in the range of the training data.
TEXT_SCALARS = (  # known from token ids alone
    Scalar("context_length", "tokens", "committed tokens, the root token included", learned=False),
    Scalar(
        "batch", "requests", "number of requests that the engine decodes together", learned=False
    ),
    Scalar("temperature", "1", "of the target's sampling"),
    Scalar("top_p", "1", "nucleus threshold; 1 keeps everything"),
    Scalar(
        "match",
        "tokens",
        f"length of the text's longest suffix that occurs before; {LONGEST_MATCH} at most",
    ),
    *_means("copied", "1", "1 where a lookup predicted the text's token, 0 elsewhere"),
    Scalar(
        "copied",
        "tokens",
        f"latest tokens in a row that a lookup predicted; {LONGEST_MATCH} at most",
    ),
    Scalar(
        "match_steady",
        "tokens",
        f"latest tokens in a row where the match moved by one; {LONGEST_MATCH} at most",
    ),
    Scalar("match_in_prompt", "1", "1 where the match ends in the prompt, 0 elsewhere"),
    Scalar(
        "after_match_predicted",
        "tokens",
        f"predicted tokens in a row right after the match; {LONGEST_LOOKUP} at most",
    ),
    *(
        Scalar(f"after_match_copied_{n}", "1", f"share of predicted ones in the first {n} after it")
        for n in AFTER_MATCH_LENGTHS
    ),
    Scalar("second_match", "tokens", f"length of the match's own match; {LONGEST_MATCH} at most"),
    Scalar(
        "second_agrees",
        "tokens",
        f"common tokens right after these two matches; {LONGEST_LOOKUP} at most",
    ),
    Scalar(
        "third_agrees",
        "tokens",
        "common tokens right after these two and the second one's own match",
    ),
)
# over training roots with the same key: tokens of a drafted chain, tokens of a lookup
MEANS = ("accepted", "copied")
KEYS = {  # keys of training roots, from token ids alone
    "last": "the last token",
    "two": "the last two tokens",
    "match": "the last token, whether a lookup predicted it, and the match's length up to 3",
    "next": "the last token and the first one of a lookup",
    "copy": "the first token of a lookup",
}


def _by_key() -> Iterator[Scalar]:
    for key, meaning in KEYS.items():
        for mean, drafts in zip(MEANS, ("of the drafter's chain", "of a lookup"), strict=True):
            words = (
                f"accepted tokens {drafts}, mean over training roots with the same key: {meaning}"
            )
            yield Scalar(f"{key}_{mean}", "tokens", f"{words}; {LONGEST_COUNTED} at most each")
        yield Scalar(
            f"{key}_known",
            "times",
            f"number of training roots with that key; {MOST_COUNTED} at most",
        )


TOKEN_SCALARS = tuple(_by_key())  # known from token ids and a table of the artefact
# known after the drafter has run over the committed text; a hit: its first token was the text's
DRAFTER_SCALARS = (
    *_means("hit", "1", "1 where the drafter's first token was the text's, 0 elsewhere"),
    Scalar("hits", "tokens", f"latest hits in a row; {LONGEST_MATCH} at most"),
    *(
        Scalar(
            f"hit_after_{count}",
            "1",
            f"share of hits right after the last {count} tokens, where they occur before",
        )
        for count in PRECEDENT_LENGTHS
    ),
    Scalar(
        "seen_after",
        "times",
        f"number of hits and misses that followed the last token; {MOST_SEEN} at most",
    ),
)
DRAFT_SCALARS = (  # known after the draft's forward pass over the root
    Scalar("draft_entropy_prev", "nats", "of the draft after prev, at temperature 1"),
    Scalar("draft_entropy_root", "nats", "of the draft after root, at temperature 1"),
    *_means("accepted", "1", "min(1, q/p) of the text's own tokens"),
    *_means("draft_entropy", "nats", "the draft's entropy at temperature 1"),
    Scalar("agreed", "tokens", f"latest tokens in a row with q >= p; {LONGEST_MATCH} at most"),
)

# feature levels
TEXT = "text"
DRAFTER = "drafter"
EARLY = "early"
LIGHT = "light"
FULL = "full"
LEVELS = (TEXT, DRAFTER, EARLY, LIGHT, FULL)
# levels of a pair's selector; `full` has the scalars of `light`, and hidden states
FEATURES = (EARLY, LIGHT, FULL)
MATCH = "match"  # the feature of the lookup rule: the length of the match alone


@dataclass(frozen=True)
class Schema:
    """The scalars of one kind of selector."""

    name: str
    levels: tuple[str, str]  # the level with fewer scalars first
    scalars: tuple[Scalar, ...]  # of the second level; those of the first level come first
    first: int  # number of scalars of the first level

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(scalar.name for scalar in self.scalars)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with every name and unit."""
        names_and_units = [(scalar.name, scalar.unit) for scalar in self.scalars]
        return hashlib.sha256(repr(names_and_units).encode()).hexdigest()[:16]

    def index(self, name: str) -> int:
        """The position of a scalar; ValueError where there is none of this name."""
        return self.names.index(name)


# A pair's selector decides before or after the draft's forward pass over the root. A log's
# selector, for an engine's drafter, decides from token ids alone, or from the drafter's hits as
# well.
PAIR = Schema("pair", (EARLY, LIGHT), (*TEXT_SCALARS, *DRAFT_SCALARS), len(TEXT_SCALARS))
ID_SCALARS = (*TEXT_SCALARS, *TOKEN_SCALARS)
LOG = Schema("log", (TEXT, DRAFTER), (*ID_SCALARS, *DRAFTER_SCALARS), len(ID_SCALARS))
SCHEMAS = {schema.name: schema for schema in (PAIR, LOG)}
SCALARS_KEY = "scalars"  # in a feature dictionary: one float vector in the order of the schema
# Last hidden states (DDTE, appendix E) of `full` features. The target's forward pass over the root
# comes only later.
HIDDEN_STATES = ("target_hidden_prev", "draft_hidden_prev", "draft_hidden_root")
# trace column: by root, the number of a lookup's tokens that agree with the text
LOOKUP_COLUMN = "lookup.right"
# trace column: the draft's ranks of the text's tokens after the first root, each after the tokens
# before it, 0 for its most likely one; 255 from 255 on, and where the draft cannot write the token
RANK_COLUMN = "draft_rank"


def survival_column(verifier: str) -> str:
    """Trace column of a verifier's labels: `P(tau >= t | text)` of every root, ordered as in
    `ActionSpace.survivals`."""
    return f"{verifier}.survivals"


def sha256(path: Path) -> str:
    """The checksum of a file; InputError where it cannot be read, or only once."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path}: a pipe, no file: write what it gives to a file first")
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
