"""Trained module -> artefact directory.

    selector.pt    TorchScript: features in, action index and scores out; standardisation, times and prices inside
    config.json    feature schema, action table, verifier, modes, pair, versions, metrics, run id, checksums
    latency.json   the latency profile it was tuned for
    README.md      how to call it
    SHA256SUMS     of all of the above

Legend: B roots, S sampling settings, L context lengths, A actions, D hidden width, F scalars.
"""

# No postponed annotations here: TorchScript reads the annotations of a module's attributes as objects.

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selector.actions import Action, ActionSpace
from selector.artefact import CHECKSUMS, FORMAT
from selector.decision import NEVER, Mode, net_tokens
from selector.files import atomically
from selector.latency import LatencyProfile, interpolated_at
from selector.module import SelectorModule
from selector.runtime import (
    LENGTH_AT,
    MATCH_AT,
    SETTING_AT,
    DecisionTables,
    Selector,
    decision_tables,
    load_selector,
    torchscript,
)
from selector.schema import EARLY_SCALARS, HIDDEN_STATES, SCALARS, SCHEMA_VERSION, sha256

SPACE = ActionSpace.with_lookups()


class DeployedSelector(nn.Module):
    """What an engine runs: the network and the decision, by the nearest sampling setting.

    Args:
        regressor: whether the network gives survivals; a policy's logits otherwise.
        hidden_widths: of the hidden states that it reads, in schema order.
    """

    settings_S2: Tensor
    lengths_L: Tensor
    early_SLA: Tensor
    late_SLA: Tensor
    speed_S: Tensor
    rho_S: Tensor
    allowed_SA: Tensor
    late_S: Tensor
    least_S: Tensor
    copied_SA: Tensor
    sums_SA: Tensor
    hidden_widths: list[int]
    hidden_names: list[str]

    def __init__(self, network: nn.Module, regressor: bool, hidden_widths: list[int], tables: DecisionTables) -> None:
        super().__init__()
        self.network, self.regressor, self.hidden_widths = network, regressor, list(hidden_widths)
        self.hidden_names = list(HIDDEN_STATES[: len(hidden_widths)])
        self.scalars = len(SCALARS)
        self.length_at, self.setting_at, self.match_at, self.never = LENGTH_AT, list(SETTING_AT), MATCH_AT, NEVER
        for name, tensor in tables._asdict().items():
            self.register_buffer(name, tensor)
        self.register_buffer("sums_SA", SPACE.sums_SA.clone())

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Args:
            features: the schema's names to float32 [F] and [D], or [B, F] and [B, D]; or the early scalars alone, where
                the draft has not passed the root. Then the answer is for what is known so far.

        Returns:
            action index, int64 [] or [B]; scores, float32 [A] or [B, A].
        """
        scalars = features["scalars"]
        single = scalars.dim() == 1
        if single:
            scalars = scalars.unsqueeze(0)
        distance_BS = (scalars[:, self.setting_at].unsqueeze(1) - self.settings_S2).abs().sum(-1)
        at_B = distance_BS.argmin(-1)
        passed_B1 = self.late_S[at_B].unsqueeze(-1)
        states: list[Tensor] = []
        if scalars.size(-1) < self.scalars:
            passed_B1 = torch.zeros_like(passed_B1)
            padding = scalars.new_zeros((scalars.size(0), self.scalars - scalars.size(-1)))
            scalars = torch.cat([scalars, padding], dim=-1)
            states = [scalars.new_zeros((scalars.size(0), width)) for width in self.hidden_widths]
        else:
            for name in self.hidden_names:
                states.append(features[name].unsqueeze(0) if single else features[name])
        scores = self.network(scalars, states, passed_B1)
        copies_B1 = (scalars[:, self.match_at] >= self.least_S[at_B]).unsqueeze(-1)
        allowed_BA = torch.where(copies_B1, self.copied_SA[at_B], self.allowed_SA[at_B])
        if self.regressor:
            length_B = scalars[:, self.length_at]
            early_BA = interpolated_at(self.early_SLA, self.lengths_L, at_B, length_B)
            late_BA = interpolated_at(self.late_SLA, self.lengths_L, at_B, length_B)
            seconds_BA = torch.where(passed_B1 > 0, late_BA, early_BA)
            speed_B1, rho_B1 = self.speed_S[at_B].unsqueeze(-1), self.rho_S[at_B].unsqueeze(-1)
            efficiency_BA = 1 + scores.exp() @ self.sums_SA
            scores = net_tokens(efficiency_BA, seconds_BA, speed_B1, rho_B1, allowed_BA)
        else:
            scores = scores.masked_fill(~allowed_BA, self.never)
        best = scores.argmax(-1)
        if single:
            return best[0], scores[0]
        return best, scores


def deployed(module: SelectorModule, profile: LatencyProfile, modes: Sequence[Mode], verifier: str) -> DeployedSelector:
    """The trained module with its decisions."""
    tables = decision_tables(profile, modes, verifier)
    widths = module.hparams["hidden_widths"]
    return DeployedSelector(module.network, module.is_regressor, widths, tables).eval()


def write_artefact(
    folder: Path,
    module: SelectorModule,
    profile: LatencyProfile,
    verifier: str,
    fallback: Action,
    modes: Sequence[dict[str, Any]],
    facts: dict[str, Any],
    check: Callable[[Selector], None] = lambda _: None,
) -> Selector:
    """Write the directory under a temporary name, read it back and check it, then rename it over an earlier one.

    Args:
        fallback: the action for a root without features.
        modes: `Mode.row` of each sampling setting, with its static trees' `mean_efficiency`.
        facts: further entries of `config.json`, among them `pair` (names and fingerprint) and `metrics`.
        check: called with the selector as read back; what it raises leaves an earlier artefact as it was.

    Returns:
        the selector as an engine would load it.
    """
    made = deployed(module, profile, [Mode.of(mode) for mode in modes], verifier)
    with atomically(folder) as partial:
        partial.mkdir()
        (partial / "selector.pt").write_bytes(_scripted(made))
        (partial / "latency.json").write_text(json.dumps(profile.to_json(), indent=1) + "\n")
        config = {
            **_config(module, verifier, fallback, modes),
            "checksums": {name: sha256(partial / name) for name in ("selector.pt", "latency.json")},
            **facts,
        }
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (partial / "README.md").write_text(_readme(config))
        names = sorted(path.name for path in partial.iterdir())
        (partial / CHECKSUMS).write_text("".join(f"{sha256(partial / name)}  {name}\n" for name in names))
        check(load_selector(partial))
    return load_selector(folder)


def _scripted(made: DeployedSelector) -> bytes:
    """The file's bytes: libtorch itself would end the process where the disk is full."""
    buffer = io.BytesIO()
    with torchscript():
        torch.jit.save(torch.jit.script(made), buffer)
    return buffer.getvalue()


def _config(module: SelectorModule, verifier: str, fallback: Action, modes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `config.json` says of the network and of how it decides."""
    widths = module.hparams["hidden_widths"]
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "objective": module.hparams["objective"],
        "sees": module.hparams["sees"],
        "verifier": verifier,
        "features": {
            "early": len(EARLY_SCALARS),
            "scalars": [asdict(scalar) for scalar in SCALARS],
            "hidden_states": dict(zip(HIDDEN_STATES, widths, strict=True)) if widths else {},
        },
        "actions": [list(action) for action in SPACE],
        "fallback": list(fallback),
        "modes": list(modes),
        "versions": {name: version(name) for name in ("torch", "pytorch-lightning")},
    }


def _readme(config: dict[str, Any]) -> str:
    features = config["features"]
    hidden = "".join(f"\n| `{name}` | float32 [{width}] |" for name, width in features["hidden_states"].items())
    scalars = "\n".join(
        f"| {i} | `{s['name']}` | {s['unit']} | {s['meaning']} |" for i, s in enumerate(features["scalars"])
    )
    return f"""# Selector for speculative decoding

Chooses at every decoding step what to draft, for the pair `{config["pair"]["target"]}` / `{config["pair"]["draft"]}`
and the verifier `{config["verifier"]}`: a delayed tree `(K, L1, L2)` of the draft model's, or a lookup `(length,)`,
what followed the longest earlier match of the text's end.

```python
from selector.runtime import load_selector

selector = load_selector("this/directory")        # checks every file's checksum
action = selector.select(features)                # Action(K, L1, L2) or Lookup(length)
scores = selector.scores(features)                # float32 [{len(config["actions"])}], in the order of selector.actions
tuned = selector.at(temperature=1.0, top_p=1.0)   # one sampling setting, one root at a time: the fastest way
```

`selector.pt` is TorchScript: `forward(features) -> (action index, scores)`, one root or a batch; the action table is
in `config.json`. On another machine pass its own profile: `load_selector(directory, latency="latency.json")`.

| feature | shape |
|---|---|
| `scalars` | float32 [{len(features["scalars"])}] |{hidden}

| scalar | name | unit | meaning |
|---|---|---|---|
{scalars}

`root` is the last committed token, `prev` the one before it; `p` and `q` are the target's and the draft's distributions
after a token. The first {features["early"]} scalars are known before the draft has passed the root token, and may be
given alone: where the answer is a lookup, or to draft nothing, no pass of the draft is needed. At a text's first root
pass `None`: the answer is the static action `{tuple(config["fallback"])}`.
"""
