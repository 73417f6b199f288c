"""The trained network and its decisions in one scriptable module, which engines run.

Legend: B roots, S settings, T tables of step times, L context lengths, A actions, D hidden width,
F scalars.
"""

# Annotations are not postponed, because TorchScript reads those of a module's attributes as
# objects.

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from selector.actions import ActionSpace
from selector.decision import NETWORK, NEVER, Setting, of_batch
from selector.latency import LatencyProfile
from selector.sampling import FAR
from selector.schema import EARLY, HIDDEN_STATES, LOG, TEXT
from selector.tables import interpolated_at
from selector.train.module import SelectorModule

NO_LIMIT = 1 << 30  # longer than any text
ANY_LEVEL = -1.0
FARTHER = 1e3  # added to the distance of a setting that does not cover the asked sampling


class DeployedSelector(nn.Module):
    """The network in evaluation mode, and the decision of the nearest setting, with one machine's
    times.

    Far from the setting's temperature or top-p (`Sampling.covers`), and on longer texts than those
    of its training, the lookup rule and the static tree of that setting decide. Raises InputError
    where the profile has no times for a setting.
    """

    settings_S3: Tensor  # `Setting.key`
    lengths_L: Tensor  # measured context lengths
    # seconds of a step: for each setting of one that is decided before the draft's forward pass
    # over the root, then of one that is decided after it
    seconds_TLA: Tensor
    speed_S: Tensor
    rho_S: Tensor
    longest_S: Tensor  # the tokens of a text up to which the network decides
    allowed_SA: Tensor  # actions that it may choose
    # 1 where the setting uses the draft's distributions, or a drafter's hits; else 0
    late_S: Tensor
    least_SN: Tensor  # the shortest match for each lookup of the rule
    lookup_SN: Tensor  # their positions; both in the order of matches
    static_S: Tensor  # position of the static tree
    level_S: Tensor  # position of the setting's level in `LOG.levels`, or `ANY_LEVEL`
    sums_SA: Tensor
    hidden_widths: list[int]
    hidden_names: list[str]

    def __init__(
        self,
        module: SelectorModule,
        profile: LatencyProfile,
        settings: Sequence[Setting],
        verifier: str,
    ) -> None:
        super().__init__()
        self.network = module.network
        self.regressor = module.is_regressor
        self.hidden_widths = list(module.hparams["hidden_widths"])
        self.hidden_names = list(HIDDEN_STATES[: len(self.hidden_widths)])
        self.scalars = len(module.schema.scalars)
        self.early = module.schema.first
        index = module.schema.index
        self.sampling_at = [index("temperature"), index("top_p")]
        self.length_at = index("context_length")
        self.match_at = index("match")
        self.batch_at = index("batch")
        self.never = NEVER
        self.doubling = of_batch(2)
        self.any_level = ANY_LEVEL
        self.far = list(FAR[:2])
        self.farther = FARTHER
        space = module.space
        self.actions = len(space)
        tables = []
        for setting in settings:
            times = profile.at_batch(setting.batch)
            first_levels = [level for level in setting.feature_levels if level in (TEXT, EARLY)]
            for levels in (first_levels, setting.feature_levels):
                # every setting has the same lengths
                lengths_L, seconds_LA = times.table(
                    space.actions, verifier, levels, setting.sampling
                )
                tables.append(seconds_LA)
        self.register_buffer("lengths_L", lengths_L)
        self.register_buffer("seconds_TLA", torch.stack(tables))
        rules = [setting.rule for setting in settings if setting.rule is not None]
        self.lengths = max([len(rule.lengths) for rule in rules], default=0)
        rows = [_row(setting, space, self.lengths) for setting in settings]
        for name in rows[0]:
            self.register_buffer(name, torch.stack([row[name] for row in rows]))
        self.register_buffer("sums_SA", space.sums_SA.clone())
        self.eval()

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The position of the chosen action, int64 [] or [B], and scores, float32 [A] or [B, A]. An
        error where the scalars are of another width or dtype, or not finite.

        `features` are float32 [F] and [D], or [B, F] and [B, D], or the scalars of the schema's
        first level alone.
        """
        scalars = features["scalars"]
        count, dtype = scalars.size(-1), scalars.dtype
        if dtype != torch.float32 or (count != self.early and count != self.scalars):
            raise ValueError(
                f"scalars are {dtype} [{count}]; float32 [{self.scalars}] or [{self.early}] is "
                "needed"
            )
        if not bool(scalars.sum().isfinite()):
            raise ValueError("scalars are not finite")
        single = scalars.dim() == 1
        if single:
            scalars = scalars.unsqueeze(0)
        passed_B1 = scalars.new_ones((scalars.size(0), 1))
        states: list[Tensor] = []
        if scalars.size(-1) < self.scalars:
            passed_B1 = torch.zeros_like(passed_B1)
            scalars = nn.functional.pad(scalars, [0, self.scalars - scalars.size(-1)])
            states = [scalars.new_zeros((scalars.size(0), width)) for width in self.hidden_widths]
        else:
            for name in self.hidden_names:
                states.append(features[name].unsqueeze(0) if single else features[name])
        best, scores = self.decide(scalars, states, passed_B1)
        if single:
            return best[0], scores[0]
        return best, scores

    def decide(
        self, scalars_BF: Tensor, states: list[Tensor], passed_B1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, for a batch padded with zeros; `passed_B1` is float32, 1 where all scalars
        are known."""
        batch_B1 = self.doubling * scalars_BF[:, self.batch_at].clamp(min=1).log2().unsqueeze(-1)
        asked_B3 = torch.cat([scalars_BF[:, self.sampling_at], batch_B1], dim=-1)
        distance_BS3 = (asked_B3.unsqueeze(1) - self.settings_S3).abs()
        other_top_p_BS = (distance_BS3[:, :, 1] > self.far[1] + 1e-6) & (asked_B3[:, :1] > 0)
        beyond_BS = (distance_BS3[:, :, 0] > self.far[0] + 1e-6) | other_top_p_BS
        of_other_level_BS = (self.level_S != self.any_level) & (self.level_S != passed_B1)
        distance_BS = distance_BS3.sum(-1) + self.farther * beyond_BS
        at_B = distance_BS.masked_fill(of_other_level_BS, float("inf")).argmin(-1)
        beyond_B1 = beyond_BS.gather(-1, at_B.unsqueeze(-1))
        passed_B1 = passed_B1 * self.late_S[at_B].unsqueeze(-1)
        scores = self.network(scalars_BF, states, passed_B1)
        length_B = scalars_BF[:, self.length_at]
        decides_B1 = (length_B <= self.longest_S[at_B]).unsqueeze(-1)
        by_rule_B = self.static_S[at_B]
        for length in range(self.lengths):
            copies_B = scalars_BF[:, self.match_at] >= self.least_SN[at_B, length]
            by_rule_B = torch.where(copies_B, self.lookup_SN[at_B, length], by_rule_B)
        by_rule_BA = nn.functional.one_hot(by_rule_B, self.actions) > 0
        allowed_BA = torch.where(decides_B1 & ~beyond_B1, self.allowed_SA[at_B], by_rule_BA)
        if self.regressor:
            table_B = 2 * at_B + passed_B1[:, 0].long()
            seconds_BA = interpolated_at(self.seconds_TLA, self.lengths_L, table_B, length_B)
            speed_B1, rho_B1 = self.speed_S[at_B].unsqueeze(-1), self.rho_S[at_B].unsqueeze(-1)
            efficiency_BA = 1 + scores.exp() @ self.sums_SA
            scores = net_tokens(efficiency_BA, seconds_BA, speed_B1, rho_B1, allowed_BA)
        else:
            scores = scores.masked_fill(~allowed_BA, self.never)
        return scores.argmax(-1), scores


def net_tokens(
    efficiency_BA: Tensor,
    seconds_BA: Tensor,
    speed_B1: Tensor,
    rho_B1: Tensor,
    allowed_BA: Tensor,
    never: float = NEVER,
) -> Tensor:
    """As `selector.decision.net_tokens`, for a batch; `NEVER` for actions that may not be
    chosen."""
    ratio_BA = (efficiency_BA / seconds_BA).masked_fill(~allowed_BA, 0.0)
    price_B1 = speed_B1 ** (1 - rho_B1) * ratio_BA.amax(-1, keepdim=True) ** rho_B1
    return (efficiency_BA - price_B1 * seconds_BA).masked_fill(~allowed_BA, never)


def _row(setting: Setting, space: ActionSpace, lengths: int) -> dict[str, Tensor]:
    # a setting's entries in the buffers of `DeployedSelector`, for rules of so many lengths
    static = space.index(setting.action)
    least_N = torch.full((lengths,), float("inf"))
    lookup_N = torch.full((lengths,), static)
    if setting.rule is not None:
        for number, (least, lookup) in enumerate(setting.rule.lookups.items()):
            least_N[number] = least
            lookup_N[number] = space.index(lookup)
    longest = 0
    if setting.decider == NETWORK:
        longest = setting.longest or NO_LIMIT
    allowed_A = torch.zeros(len(space), dtype=torch.bool)
    allowed_A[torch.from_numpy(setting.positions(space))] = True
    level = float(LOG.levels.index(setting.level)) if setting.level else ANY_LEVEL
    return {
        "settings_S3": torch.tensor(setting.key),
        "speed_S": torch.tensor(setting.speed),
        "rho_S": torch.tensor(setting.rho),
        "longest_S": torch.tensor(float(longest)),
        "allowed_SA": allowed_A,
        "late_S": torch.tensor(float(setting.sees_all)),
        "least_SN": least_N,
        "lookup_SN": lookup_N,
        "static_S": torch.tensor(static),
        "level_S": torch.tensor(level),
    }


def load_script(folder: Path) -> torch.jit.ScriptModule:
    """The TorchScript of an artefact directory."""
    with torchscript():
        return torch.jit.load(str(folder / "selector.pt"), map_location="cpu").eval()


@contextmanager
def torchscript() -> Iterator[None]:
    """Suppresses the warnings that TorchScript is deprecated, or not supported by this Python."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".?torch\.jit\.", category=DeprecationWarning)
        yield
