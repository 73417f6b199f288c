"""The run's recorded texts: what they depend on, how they are read, and whether they agree with
decoding.

Legend: N decoded steps, R roots, S survivals, J accepted lengths + 1.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from torch import Tensor

from data_gen.traces import differences, read_manifest, read_rows, space_of
from pipelines.config import Config
from pipelines.pair.source import source_of
from pipelines.run import verify
from selector.actions import RANKED, STYLES, ActionSpace
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.schema import FORMAT, InputError
from selector.train.data import Texts, Timed, to_texts
from selector.train.replay import outcomes

FEWEST = 10  # decoded steps that are compared with their labels, which are averages of few draws
ROUNDING = 2.0**-11  # labels are stored in half precision, whose numbers below 1 lie so far apart


def traces_folder(config: Config) -> Path:
    return config.folder / "traces"


def load_traces(config: Config) -> dict[str, Texts]:
    """The texts of every split; InputError unless they were made with this config and pair."""
    folder = traces_folder(config)
    verify(config, "data")
    source = source_of(config)
    recorded = read_manifest(folder)["depends"]
    changes = differences(recorded, {"format": FORMAT, **source.depends()})
    if changes:
        raise InputError(f"{folder}: made from other inputs ({changes}): run the data stage")
    return source.texts(folder)


def samplings_of(config: Config) -> list[Sampling]:
    return [sampling_setting.build() for sampling_setting in config.sampling]


def timed(
    texts: Texts, sampling: Sampling, verifier: str, profile: LatencyProfile, batch: int = 1
) -> Timed:
    """The texts of one sampling setting with a verifier's labels and a machine's times for a batch
    size."""
    return Timed(texts.of_sampling(sampling), verifier, profile.at_batch(batch), batch=batch)


def realised(config: Config) -> list[dict[str, Any]]:
    """What decoding accepted, compared with the labels of the same steps, by verifier and style of
    the trees."""
    grouped_steps = _decoded_steps(traces_folder(config))
    rows = []
    for verifier, style in product(config.verifiers, (*STYLES, RANKED)):
        steps = grouped_steps.get((verifier, style), [])
        if len(steps) < FEWEST:
            continue
        steps_N3 = torch.stack(steps)
        tokens, expected, _ = steps_N3.mean(0).tolist()
        rows.append(
            {
                "verifier": verifier,
                "branches": style,
                "steps": len(steps_N3),
                "expected": expected,
                "realised": tokens,
                "z": z_of(steps_N3),
            }
        )
    return rows


def _decoded_steps(folder: Path) -> dict[tuple[str, str], list[Tensor]]:
    """The steps of the training texts that decoding wrote, as `against_labels` gives them, by
    verifier and style."""
    grouped_steps: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)
    decoded = read_rows(folder, "train").filter(pc.field("step_verifier").is_valid())
    if decoded.num_rows == 0:
        return grouped_steps
    space = space_of(decoded)
    verifiers = pc.unique(decoded["step_verifier"]).to_pylist()
    texts = to_texts(decoded, verifiers, torch.zeros(0, 0), space, lookups=())
    first_X = texts.size_X.cumsum(0) - texts.size_X
    for row, first in zip(decoded.to_pylist(), first_X.tolist(), strict=True):
        verifier = row["step_verifier"]
        root_N = torch.tensor(row["step_root"], dtype=torch.int64)
        action_N = torch.tensor(row["step_action"], dtype=torch.int64)
        accepted_N = torch.tensor(row["step_accepted"], dtype=torch.int64)
        survivals_NS = texts.labels(verifier, first + root_N, space)
        steps_N3 = against_labels(survivals_NS, action_N, accepted_N + 1, space)
        for action, step_3 in zip(action_N.tolist(), steps_N3, strict=True):
            grouped_steps[verifier, space.actions[action].style_name].append(step_3)
    return grouped_steps


def against_labels(
    survivals_NS: Tensor, action_N: Tensor, tokens_N: Tensor, space: ActionSpace
) -> Tensor:
    """The tokens of decoded steps, and their mean and variance by the labels of their roots,
    float64 [N, 3]."""
    law_NJ = outcomes(survivals_NS, action_N, space)
    n_J = torch.arange(1, law_NJ.shape[-1] + 1, dtype=torch.float64)
    mean_N = law_NJ @ n_J
    most_N = torch.tensor([space.actions[action].depth + 1 for action in action_N.tolist()])
    # few siblings' noise
    impossible_N = mean_N - mean_N.clamp(min=torch.ones_like(mean_N), max=most_N.double())
    variance_N = (law_NJ @ n_J**2 - mean_N**2).clamp(min=0) + impossible_N**2 + ROUNDING
    return torch.stack([tokens_N.double(), mean_N, variance_N], dim=-1)


def z_of(steps_N3: Tensor) -> float:
    """Tokens of steps minus their means by the labels, over the standard deviation of this sum.

    Whatever came before, a step's tokens have the law that the labels of its root give, so the sum
    is a martingale and its variance is the sum of the variances: with dozens of steps `z` is nearly
    normal, and |z| > 3 happens by chance once in 370 cases. The labels' own variance for branching
    trees is left out, except where a mean is beyond what its tree can yield.
    """
    tokens, mean, variance = steps_N3.sum(0).tolist()
    return (tokens - mean) / variance**0.5
