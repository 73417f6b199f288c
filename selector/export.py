"""Trained module -> artefact directory.

    selector.pt    TorchScript: features in, action index and scores out; standardisation and times inside
                   a regressor's `further`: what is known at a drafted token in, the best further action out
    config.json    feature schema, action table, verifier, pair, versions, metrics, run id, checksums
    latency.json   the latency profile it was tuned for
    README.md      how to call it
    SHA256SUMS     of all of the above

Legend: B roots, R calibration roots, S sampling settings, L context lengths, A actions, O options (every action with
each verifier), I increments, D hidden width, F scalars.
"""

# No postponed annotations here: TorchScript reads the annotations of a module's attributes as objects.

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selector.actions import Action, ActionSpace
from selector.data import Roots
from selector.latency import LatencyProfile, interpolated_at
from selector.module import SelectorModule
from selector.network import IncrementNetwork, SelectorNetwork
from selector.runtime import (
    CHECKSUMS,
    FORMAT,
    HEAD,
    DecisionTables,
    Mode,
    Selector,
    decision_tables,
    load_selector,
    torchscript,
)
from selector.schema import (
    HIDDEN_STATES,
    JOINT,
    SCALAR_NAMES,
    SCALARS,
    SCALARS_KEY,
    SCHEMA_VERSION,
    TRUNK_SCALARS,
    TRUNK_STATE,
    sha256,
)

CALIBRATION_ROOTS = 256


class DeployedSelector(nn.Module):
    """What an engine runs: the network and the decision rule.

    For a regressor the scores are `E - g T`: of the nearest sampling setting's `option_SA`, every action with its
    verifier, at the times of `seconds_SLA`. The calibration predictions let a reader find g anew for another machine's
    times.
    """

    gain: Tensor
    settings_S2: Tensor
    lengths_L: Tensor
    seconds_SLA: Tensor
    option_SA: Tensor

    def __init__(
        self,
        network: IncrementNetwork | SelectorNetwork,
        trunk: nn.ModuleList,
        head: tuple[Tensor, Tensor, Tensor],
        base: float,
        gain: Tensor,
        tables: DecisionTables,
        calibration: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        super().__init__()
        self.network, self.trunk = network, trunk
        for name, tensor in zip(HEAD, head, strict=True):
            self.register_buffer(name, tensor.detach().clone())
        self.base = base  # the extra token, which a regressor's gains leave out
        self.length_at = SCALAR_NAMES.index("context_length")
        self.setting_at = [SCALAR_NAMES.index("temperature"), SCALAR_NAMES.index("top_p")]
        self.register_buffer("gain", gain.clone())  # 0 for a policy: its scores are logits
        for name, tensor in tables._asdict().items():
            self.register_buffer(name, tensor)
        self.register_buffer("calibration_RO", calibration[0])
        self.register_buffer("calibration_length_R", calibration[1][:, self.length_at])
        self.register_buffer("calibration_setting_R", self.nearest(calibration[1]))
        self.register_buffer("calibration_weight_R", calibration[2])

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Args:
            features: the schema's names to float32 [D] and [F], or [B, D] and [B, F].

        Returns:
            action index, int64 [] or [B]; scores, float32 [A] or [B, A].
        """
        scalars = features["scalars"]
        single = scalars.dim() == 1
        if single:
            scalars = scalars.unsqueeze(0)
        hidden_states = [
            features["target_hidden_prev"],
            features["draft_hidden_prev"],
            features["draft_hidden_root"],
        ]
        if single:
            hidden_states = [state.unsqueeze(0) for state in hidden_states]
        at = self.nearest(scalars)
        scores = self.base + self.network(hidden_states, scalars).gather(-1, self.option_SA[at])
        scores = scores - self.gain * interpolated_at(self.seconds_SLA, self.lengths_L, at, scalars[:, self.length_at])
        best = scores.argmax(-1)
        if single:
            return best[0], scores[0]
        return best, scores

    def nearest(self, scalars_BF: Tensor) -> Tensor:
        """The position of each root's sampling setting, int64 [B]."""
        return (scalars_BF[:, self.setting_at].unsqueeze(1) - self.settings_S2).abs().sum(-1).argmin(-1)

    @torch.jit.export
    def efficiency(self, features: dict[str, Tensor], needed_I: Tensor, sums_AI: Tensor) -> Tensor:
        """A regressor's predicted block efficiencies of some options at one root, float32 [A]; a policy's logits.

        Args:
            features: as in `forward`.
            needed_I, sums_AI: the increments that these options need, by index, and the matrix between both.
        """
        hidden_states = [
            features["target_hidden_prev"].unsqueeze(0),
            features["draft_hidden_prev"].unsqueeze(0),
            features["draft_hidden_root"].unsqueeze(0),
        ]
        return self.base + self.network.some(hidden_states, features["scalars"].unsqueeze(0), needed_I, sums_AI)

    @torch.jit.export
    def further(
        self, hidden_D: Tensor, scalars_F: Tensor, weight_IH: Tensor, bias_I: Tensor, sums_AI: Tensor, cost_A: Tensor
    ) -> int:
        """Which further action gains most over its cost, at a token of a trunk that is being drafted.

        Args:
            hidden_D: `TRUNK_STATE`, float32.
            scalars_F: `TRUNK_SCALARS`, float32.
            weight_IH, bias_I, sums_AI: of the last layer and the matrix behind it, what the actions in question need.
            cost_A: of these actions, in tokens.

        Returns:
            a position in `cost_A`.
        """
        state_H = torch.cat([hidden_D, scalars_F])
        for layer in self.trunk:
            state_H = layer(state_H)
        increments_I = nn.functional.softplus(torch.addmv(bias_I, weight_IH, state_H))
        return int(torch.addmv(cost_A, sums_AI, increments_I, beta=-1.0).argmax())


@torch.no_grad()
def deployed(
    module: SelectorModule, train: Roots, profile: LatencyProfile, modes: Sequence[Mode], verifiers: Sequence[str]
) -> DeployedSelector:
    """The trained module with its decision rule, calibrated on evenly spaced training roots."""
    module.eval()
    rows = train.rows(torch.linspace(0, len(train) - 1, min(CALIBRATION_ROOTS, len(train))).long())
    calibration = (module.options(rows).half(), rows.features()[SCALARS_KEY], rows.weight_B)
    if not module.predicts_efficiency:
        calibration = (calibration[0][:0], calibration[1][:0], calibration[2][:0])
    return untuned(module, decision_tables(profile, modes, verifiers, module.predicts_efficiency), calibration)


def untuned(
    module: SelectorModule, tables: DecisionTables, calibration: tuple[Tensor, Tensor, Tensor]
) -> DeployedSelector:
    """What is deployed of a module, with the given tables; `calibration` is options, scalars and weights of roots."""
    regressor = module.predicts_efficiency
    trunk, head = nn.ModuleList(), (torch.zeros(0),) * 3  # a policy decides at the root alone
    if regressor:
        trunk, head = module.trunk.folded(), (module.trunk.head.weight, module.trunk.head.bias, module.trunk.sums_IO)
    return DeployedSelector(module.network, trunk, head, float(regressor), module.gain, tables, calibration).eval()


def write_artefact(
    folder: Path,
    module: SelectorModule,
    train: Roots,
    profile: LatencyProfile,
    verifiers: Sequence[str],
    fallback: Action,
    modes: list[dict[str, Any]],
    facts: dict[str, Any],
    check: Callable[[Selector], None] = lambda _: None,
) -> Selector:
    """Write the directory under a temporary name, read it back and check it, then rename it over an earlier one.

    Args:
        verifiers: one, or several of which every action has its own.
        fallback: the action for a root without features.
        modes: for each sampling setting, where decisions are worth their cost (`selector.modes`).
        facts: further entries of `config.json`, among them `pair` (names and fingerprint) and `metrics`.
        check: called with the selector as read back; what it raises leaves an earlier artefact as it was.

    Returns:
        the selector as an engine would load it.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with torchscript():
        made = deployed(module, train, profile, [Mode.of(mode) for mode in modes], verifiers)
        torch.jit.script(made).save(str(partial / "selector.pt"))
    (partial / "latency.json").write_text(json.dumps(profile.to_json(), indent=1) + "\n")
    config = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "objective": module.hparams["objective"],
        "verifier": verifiers[0] if len(verifiers) == 1 else JOINT,
        "verifiers": list(verifiers),
        "features": {
            "hidden_states": dict(zip(HIDDEN_STATES, module.hparams["hidden_widths"], strict=True)),
            "scalars": [asdict(scalar) for scalar in SCALARS],
        },
        "trunk_features": {
            "hidden_state": {TRUNK_STATE: module.hparams["hidden_widths"][-1]},
            "scalars": [asdict(scalar) for scalar in TRUNK_SCALARS],
        },
        "actions": [list(action) for action in ActionSpace.default()],
        "fallback": list(fallback),
        "modes": modes,
        "versions": {name: version(name) for name in ("torch", "pytorch-lightning")},
        "checksums": {name: sha256(partial / name) for name in ("selector.pt", "latency.json")},
        **facts,
    }
    (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (partial / "README.md").write_text(_readme(config))
    names = sorted(path.name for path in partial.iterdir())
    (partial / CHECKSUMS).write_text("".join(f"{sha256(partial / name)}  {name}\n" for name in names))
    check(load_selector(partial))
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    return load_selector(folder)


def _readme(config: dict[str, Any]) -> str:
    hidden = "\n".join(f"| `{name}` | float32 [{d}] |" for name, d in config["features"]["hidden_states"].items())
    scalars = _scalar_rows(config["features"]["scalars"])
    return f"""# Selector for speculative decoding

Chooses a delayed tree `(K, L1, L2)` at every decoding step, for the pair `{config["pair"]["target"]}` /
`{config["pair"]["draft"]}` and the verifier `{config["verifier"]}`{_own_verifiers(config["verifiers"])}.

```python
from selector.runtime import load_selector

selector = load_selector("this/directory")        # needs torch alone; checks every file's checksum
action = selector.select(features)                # Action(K, L1, L2)
scores = selector.scores(features)                # float32 [{len(config["actions"])}], in the order of selector.actions
tuned = selector.at(temperature=1.0, top_p=1.0)   # as it pays under one sampling setting
```

`selector.pt` is TorchScript: `forward(features) -> (action index, scores)`, one root or a batch; the action table is
in `config.json`. On another machine pass its own profile: `load_selector(directory, latency="latency.json")`.

| feature | shape |
|---|---|
{hidden}
| `scalars` | float32 [{len(config["features"]["scalars"])}] |

| scalar | name | unit | meaning |
|---|---|---|---|
{scalars}

`prev` is the token before the last committed one, `root` the last committed one. At a root without a previous token
pass `None`: the answer is the static action `{tuple(config["fallback"])}`.

Under a sampling setting where it pays, `tuned.on_trunk`, the selector decides again whenever a trunk token has been
drawn, from the `tuned.first` on (0 is the root): `tuned.decide(draft_hidden_parent, scalars, drafted, length)` is the
action from there on, whose trunk holds at least what is drafted. Its scalars:

| scalar | name | unit | meaning |
|---|---|---|---|
{_scalar_rows(config["trunk_features"]["scalars"])}
"""


def _own_verifiers(names: list[str]) -> str:
    if len(names) == 1:
        return ""
    return f": every action has its own of {', '.join(names)}, in `selector.at(..).verifiers`"


def _scalar_rows(scalars: list[dict[str, str]]) -> str:
    return "\n".join(f"| {i} | `{s['name']}` | {s['unit']} | {s['meaning']} |" for i, s in enumerate(scalars))
