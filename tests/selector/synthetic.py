"""Texts whose best tree follows from a feature, for tests of training, tuning and export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.decision import Setting
from selector.latency import UNCUT, LatencyProfile, Verification
from selector.sampling import Sampling
from selector.schema import EARLY, FULL, HIDDEN_STATES, LIGHT, PAIR
from selector.tables import Table
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.tuning import replay_setting

WIDTHS = [6, 4, 4]
SPACE = ActionSpace.of_pairs()
EASY, HARD = 0.95, 0.3  # how likely a drafted token is accepted
TELLS = PAIR.index("draft_entropy_root")  # below 0.5 where the text is easy
# the least match where the text repeats itself, and how far it goes on with it there
REPEATED, CONTINUED = 4, 11


def profile(draft: float = 1e-3, target: float = 5e-3) -> LatencyProfile:
    lengths = [10, 100]
    return LatencyProfile(
        device="test machine",
        pair="0123456789abcdef",
        draft=Table(lengths, [1, 4], [[draft, 2 * draft], [1.5 * draft, 3 * draft]]),
        target=Table(lengths, [1, 33], [[target, 2 * target], [1.5 * target, 3 * target]]),
        verify={"traversal": Verification(3e-5, 1e-4)},
        decide={EARLY: 5e-5, LIGHT: 1e-4, FULL: 3e-4},
        nucleus=2e-5,
    )


def survivals_of(accepted_R: Tensor) -> Tensor:
    """Of trees whose tokens are accepted with probability a each, and one of K siblings with 1 -
    (1 - a)^K."""
    survivals_RS = torch.ones(len(accepted_R), SPACE.tree_survivals)
    depth_D = torch.arange(1, SPACE.depth + 1)
    survivals_RS[:, : SPACE.depth] = accepted_R.unsqueeze(-1) ** depth_D
    branches = survivals_RS[:, SPACE.depth :].unflatten(
        1, (-1, SPACE.max_K - 1, SPACE.max_L1 + 1, SPACE.max_L2)
    )
    below_J = torch.arange(SPACE.max_L2)
    for K in range(2, SPACE.max_K + 1):
        one_R1 = 1 - (1 - accepted_R.unsqueeze(-1)) ** K
        for L1 in range(SPACE.max_L1 + 1):
            branches[:, :, K - 2, L1] = (
                accepted_R.unsqueeze(-1) ** (L1 + below_J) * one_R1
            ).unsqueeze(1)
    return survivals_RS


def texts(
    count: int = 12,
    roots: int = 20,
    seed: int = 0,
    level: str = LIGHT,
    sampling: Sampling = UNCUT,
    is_informative: bool = True,
    repeats: float = 0.0,
) -> Texts:
    """Texts of which half the roots are easy, at random. One feature tells: a scalar, or of `full`
    features the first entry of the draft's hidden state, which is then well above 0, and elsewhere
    well below it. Unless it is not `is_informative`. Two texts make a source.

    At a share of `repeats` of the roots, at random, a lookup has some tokens right, and the match
    there tells.
    """
    generator = torch.Generator().manual_seed(seed)
    size_X = torch.full((count,), roots)
    R = count * roots
    easy_R = torch.rand(R, generator=generator) < 0.5
    number_R = torch.arange(R) % roots
    length_R = 20 + number_R + 30 * (torch.arange(R) // roots % 4)
    # what else is drawn is the same with more scalars
    own_generator = torch.Generator().manual_seed(1000 + seed)
    scalars_RF = torch.rand(R, len(PAIR.names), generator=own_generator)
    hidden = {
        name: torch.randn(R, width, generator=generator)
        for name, width in zip(HIDDEN_STATES, WIDTHS, strict=True)
    }
    if is_informative and level == FULL:
        last = hidden[HIDDEN_STATES[-1]]
        last[:, 0] = (3 + last[:, 0].abs()) * torch.where(easy_R, 1, -1)
    elif is_informative:
        scalars_RF[:, TELLS] = scalars_RF[:, TELLS] / 2 + 0.5 * ~easy_R
    columns = {
        "context_length": length_R,
        "batch": 1.0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    for name, values in columns.items():
        scalars_RF[:, PAIR.index(name)] = values if isinstance(values, Tensor) else float(values)
    repeats_R = torch.rand(R, generator=generator) < repeats
    if repeats:
        match_R = torch.randint(REPEATED, (R,), generator=generator) + REPEATED * repeats_R
        scalars_RF[:, PAIR.index("match")] = match_R.float()
    scalars_RF[number_R == 0] = 0
    known_R = number_R > 0
    return Texts(
        samplings=[sampling],
        size_X=size_X,
        sampling_X=torch.zeros(count, dtype=torch.int64),
        kind_X=["code" if x % 2 else "prose" for x in range(count)],
        source_X=[f"source {x // 2}" for x in range(count)],
        prompt_X=[f"prompt {x}" for x in range(count)],
        scalars_RF=scalars_RF,
        length_R=length_R,
        survivals={"traversal": survivals_of(torch.where(easy_R, EASY, HARD)).half()},
        lookup_R=(CONTINUED * repeats_R).to(torch.uint8),
        drafted_R=torch.full((R,), SPACE.depth, dtype=torch.uint8),
        hidden={name: rows[known_R].half() for name, rows in hidden.items()}
        if level == FULL
        else {},
        hidden_R=torch.where(known_R & (level == FULL), known_R.cumsum(0) - 1, -1),
    )


def timed(data: Texts, own: LatencyProfile | None = None) -> Timed:
    return Timed(data, "traversal", own or profile())


def static_setting(data: Timed) -> Setting:
    """The setting of a chain of three, with its speed."""
    setting = Setting(data.sampling, Action(1, 3, 0))
    return replace(setting, speed=replay_setting(data, {}, setting).speed)


def module(objective: str = "regressor", level: str = LIGHT, seed: int = 0) -> SelectorModule:
    """As training begins, in evaluation mode."""
    torch.manual_seed(seed)
    widths = WIDTHS if level == FULL else []
    made = SelectorModule(objective, level, widths, network={"width": 8, "hidden": [24, 12]})
    data = texts(level=level, repeats=0.1)
    made.begin_at(data, "traversal", (~data.unknown_R).nonzero()[:, 0])
    return made.eval()


def opinionated(objective: str = "regressor", level: str = LIGHT, seed: int = 0) -> SelectorModule:
    """One whose choices vary from root to root, though it has learnt nothing."""
    made = module(objective, level, seed)
    with torch.no_grad():
        last = list(made.network.modules())[-1]
        if objective == "regressor":
            last.weight.mul_(25.0)
            # lookups are few, and would hardly ever be the best
            last.bias[SPACE.tree_survivals :] += 0.5
        else:
            last.weight.mul_(16.0)
            data, trees = texts(level=level, repeats=0.1), len(SPACE.trees)
            scores_RA = torch.cat([made.scores(data, asked) for asked in (EARLY, level)])
            last.bias[trees:] += (
                scores_RA[:, :trees].amax(-1) - scores_RA[:, trees:].amax(-1)
            ).median()
    return made


def setting_row(setting: Setting, efficiency_A: Tensor) -> dict:
    """As an artefact has it."""
    return {**setting.row(), "mean_efficiency": efficiency_A.tolist()}


def joined(parts: Sequence[Texts]) -> Texts:
    """Texts of several sampling settings as one split; light features alone."""
    lists, tensors = (
        ("samplings", "kind_X", "source_X", "prompt_X"),
        ("size_X", "scalars_RF", "length_R", "lookup_R", "drafted_R"),
    )
    made = {name: [value for part in parts for value in getattr(part, name)] for name in lists}
    made |= {
        name: torch.cat([getattr(part, name) for part in parts]) for name in (*tensors, "hidden_R")
    }
    return replace(
        parts[0],
        sampling_X=torch.cat(
            [torch.full((len(part),), made["samplings"].index(part.samplings[0])) for part in parts]
        ),
        survivals={"traversal": torch.cat([part.survivals["traversal"] for part in parts])},
        hidden={},
        **made,
    )
