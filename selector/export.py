"""Trained module -> artefact directory.

    selector.pt    TorchScript: features in, action index and scores out; standardisation and times inside
    config.json    feature schema, action table, verifier, pair, versions, metrics, run id, checksums
    latency.json   the latency profile it was tuned for
    README.md      how to call it
    SHA256SUMS     of all of the above

Legend: B roots, R calibration roots, L context lengths, A actions.
"""

# No postponed annotations here: TorchScript reads the annotations of a module's attributes as objects.

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selector.actions import Action, ActionSpace
from selector.data import Roots
from selector.latency import LatencyProfile, interpolated
from selector.module import SelectorModule
from selector.network import SelectorNetwork
from selector.runtime import CHECKSUMS, FORMAT, Selector, load_selector, torchscript
from selector.schema import HIDDEN_STATES, SCALAR_NAMES, SCALARS, SCALARS_KEY, SCHEMA_VERSION, sha256

CALIBRATION_ROOTS = 256


class DeployedSelector(nn.Module):
    """What an engine runs: the network and the decision rule.

    For a regressor the scores are `E - g T` with the times of `seconds_LA`; the calibration predictions let a reader
    find g anew for another machine's times.
    """

    gain: Tensor
    lengths_L: Tensor
    seconds_LA: Tensor

    def __init__(
        self,
        network: SelectorNetwork,
        gain: Tensor,
        times: tuple[Tensor, Tensor],
        calibration: tuple[Tensor, Tensor],
    ) -> None:
        super().__init__()
        self.network = network
        self.length_at = SCALAR_NAMES.index("context_length")
        self.register_buffer("gain", gain.clone())  # 0 for a policy: its scores are logits
        self.register_buffer("lengths_L", times[0])
        self.register_buffer("seconds_LA", times[1])
        self.register_buffer("calibration_RA", calibration[0])
        self.register_buffer("calibration_length_R", calibration[1])

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
        scores = self.network(hidden_states, scalars)
        scores = scores - self.gain * interpolated(self.seconds_LA, self.lengths_L, scalars[:, self.length_at])
        best = scores.argmax(-1)
        if single:
            return best[0], scores[0]
        return best, scores


@torch.no_grad()
def deployed(module: SelectorModule, train: Roots, profile: LatencyProfile, verifier: str) -> DeployedSelector:
    """The trained module with its decision rule, calibrated on evenly spaced training roots."""
    module.eval()
    rows = train.rows(torch.linspace(0, len(train) - 1, min(CALIBRATION_ROOTS, len(train))).long())
    calibration = (module.outputs(rows).half(), rows.features()[SCALARS_KEY][:, SCALAR_NAMES.index("context_length")])
    if not module.predicts_efficiency:
        calibration = (calibration[0][:0], calibration[1][:0])
    times = profile.table(ActionSpace.default().actions, verifier, selector=True)
    return DeployedSelector(module.network, module.gain, times, calibration).eval()


def write_artefact(
    folder: Path,
    module: SelectorModule,
    train: Roots,
    profile: LatencyProfile,
    verifier: str,
    fallback: Action,
    facts: dict[str, Any],
    check: Callable[[Selector], None] = lambda _: None,
) -> Selector:
    """Write the directory under a temporary name, read it back and check it, then rename it over an earlier one.

    Args:
        fallback: the action for a root without features.
        facts: further entries of `config.json`, among them `pair` (names and fingerprint) and `metrics`.
        check: called with the selector as read back; what it raises leaves an earlier artefact as it was.

    Returns:
        the selector as an engine would load it.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with torchscript():
        torch.jit.script(deployed(module, train, profile, verifier)).save(str(partial / "selector.pt"))
    (partial / "latency.json").write_text(json.dumps(profile.to_json(), indent=1) + "\n")
    config = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "objective": module.hparams["objective"],
        "verifier": verifier,
        "features": {
            "hidden_states": dict(zip(HIDDEN_STATES, module.hparams["hidden_widths"], strict=True)),
            "scalars": [asdict(scalar) for scalar in SCALARS],
        },
        "actions": [list(action) for action in ActionSpace.default()],
        "fallback": list(fallback),
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
    scalars = "\n".join(
        f"| {i} | `{s['name']}` | {s['unit']} | {s['meaning']} |" for i, s in enumerate(config["features"]["scalars"])
    )
    return f"""# Selector for speculative decoding

Chooses a delayed tree `(K, L1, L2)` at every decoding step, for the verifier `{config["verifier"]}` and the pair
`{config["pair"]["target"]}` / `{config["pair"]["draft"]}`.

```python
from selector.runtime import load_selector

selector = load_selector("this/directory")        # needs torch alone; checks every file's checksum
action = selector.select(features)                # Action(K, L1, L2)
scores = selector.scores(features)                # float32 [{len(config["actions"])}], in the order of selector.actions
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
"""
