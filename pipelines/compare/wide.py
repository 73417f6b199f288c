"""The verifiers on wide trees: what `compare` measures where the labelled trees are wide ones.

For every verifier, sampling setting and number K of branches from the root: tokens per step of the
deepest tree, the mean over all positions of all texts, and their ratio to the rival's on the same
positions. For every verifier and machine: the fastest static tree on the training texts, replayed
on the held-out ones. Errors are one standard error over sources.

The time of verification is a CPU's, and no latency profile of another machine has it. So it is
charged as it was measured here: in seconds, and by equation 11 as the same share of a plain step.

Legend: X texts, R roots, A actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from pipelines.config import Config
from pipelines.data.recorded import samplings_of
from pipelines.evaluate.replays import replay
from pipelines.evaluate.table import EFFICIENCY, Figure, Table, quotient, show_grids
from pipelines.terminal import watched
from selector.actions import GREEDY, IID, WIDE_DEPTH, Action
from selector.decision import Setting
from selector.latency import LatencyProfile, Verification
from selector.train.data import Texts, Timed
from selector.train.replay import jackknifed, ratio_of_speeds
from selector.train.tuning import StaticTable

NAMES = {IID: "i.i.d.", GREEDY: "distinct first tokens"}  # of styles
CONTEXT = 200  # tokens before the plain step to which verification is compared
CHARGED = ", verification charged"


def with_verification(
    profiles: Mapping[str, LatencyProfile], here: str, ideal: str
) -> dict[str, LatencyProfile]:
    """The latency profiles by machine, and those of others also with the times of verification of
    the one that is called `here`."""
    measured = profiles[here]
    with_charges = dict(profiles)
    for name, profile in profiles.items():
        if name == here:
            continue
        scale = 1.0
        if name == ideal:
            scale = profile.target.at(CONTEXT, 1) / measured.target.at(CONTEXT, 1)
        verify = {}
        for verifier, times in measured.verify.items():
            verify[verifier] = Verification(*(scale * seconds for seconds in times))
        with_charges[name + CHARGED] = replace(profile, verify=verify)
    return with_charges


def figures_of(
    config: Config,
    splits: Mapping[str, Texts],
    profiles: Mapping[str, LatencyProfile],
    rival: str,
) -> Iterator[Figure]:
    """Tokens per step, and speeds of the fastest trees, both over those of the verifier `rival`."""
    for sampling in watched(samplings_of(config), "comparing wide trees"):
        texts = {split: split_texts.of_sampling(sampling) for split, split_texts in splits.items()}
        for style in NAMES:
            yield from _tokens_per_step(config, list(texts.values()), style, rival)
        for machine, profile in profiles.items():
            yield from _best_trees(config, texts, machine, profile, rival)


def _tokens_per_step(
    config: Config, texts: Sequence[Texts], style: str, rival: str
) -> Iterator[Figure]:
    source_names = np.concatenate([split_texts.source_X for split_texts in texts])
    source_X = torch.from_numpy(np.unique(source_names, return_inverse=True)[1])
    space = texts[0].space
    sampling_name = str(texts[0].samplings[int(texts[0].sampling_X[0])])
    sums_XA = {}
    for verifier in config.verifiers:
        sums_XA[verifier] = torch.cat([_sums(split_texts, verifier) for split_texts in texts])
    positions_X = torch.cat([split_texts.size_X for split_texts in texts]).double()
    widths = [K for grid in space.grids for K in grid.widths]
    for K, verifier in product(widths, config.verifiers):
        a = space.index(Action(K, 0, WIDE_DEPTH, style))
        columns = {
            "setting": sampling_name,
            "method": f"{verifier}, {NAMES[style]}",
            "K": K,
            "depth": WIDE_DEPTH,
            "statistic": EFFICIENCY,
        }
        pairs = {
            "": positions_X,
            f"{rival}, {NAMES[style]}": sums_XA[rival][:, a],
        }
        for over, other_X in pairs.items():
            columns_X2 = torch.stack([sums_XA[verifier][:, a], other_X], dim=-1)
            ratio = jackknifed(columns_X2, source_X, quotient)
            yield Figure.of_ratio(ratio, **columns, rival=over)


def _sums(texts: Texts, verifier: str) -> Tensor:
    """Tokens per step of every tree, summed over a text's positions, float64 [X, A]."""
    survivals_RS = texts.labels(verifier, slice(None), texts.space).double()
    sums_XS = torch.zeros(len(texts), survivals_RS.shape[1], dtype=torch.float64)
    sums_XS.index_add_(0, texts.text_R, survivals_RS)
    return texts.size_X.unsqueeze(-1) + sums_XS @ texts.space.sums_SA.double()


def _best_trees(
    config: Config,
    texts: Mapping[str, Texts],
    machine: str,
    profile: LatencyProfile,
    rival: str,
) -> Iterator[Figure]:
    """The speed of each verifier's fastest tree of each style over that of the rival's."""
    statics = {}
    held_out = {}
    for verifier in config.verifiers:
        statics[verifier] = StaticTable.of(Timed(texts["train"], verifier, profile))
        held_out[verifier] = Timed(texts["test"], verifier, profile)
    trees = texts["test"].space.trees
    sampling = held_out[rival].sampling
    for style, name in NAMES.items():
        is_of_style_A = torch.tensor([tree.K == 1 or tree.style == style for tree in trees])
        best = {}
        replays = {}
        for verifier, timed in held_out.items():
            best[verifier] = trees[statics[verifier].best(is_of_style_A)]
            replays[verifier] = replay(timed, Setting(sampling, best[verifier]))
        for verifier, tree in best.items():
            yield Figure.of_ratio(
                ratio_of_speeds(replays[verifier], replays[rival], texts["test"].source_number_X),
                setting=str(sampling),
                method=f"{verifier}, {name}",
                rival=f"{rival}, {name}",
                clock=machine,
                K=tree.K,
                depth=tree.L1 + tree.L2,
            )


def show(figures: Table) -> None:
    """Print tokens per step by K, and the fastest trees by machine, for each sampling setting."""
    cells = []
    for figure in figures.figures:
        if figure.statistic == EFFICIENCY:
            measure = "ratio to the rival's" if figure.rival else "tokens per step"
            title = f"{figure.setting}, trees of depth {figure.depth}: {measure}"
            cells.append((title, figure.method, f"K={figure.K}", figure.text(3)))
        else:
            title = f"{figure.setting}, the fastest tree: speed over {figure.rival}'s"
            text = f"{figure.text(3)} ({figure.K}, 0, {figure.depth})"
            cells.append((title, figure.method, figure.clock, text))
    show_grids(cells)
