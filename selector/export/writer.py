"""Writes the artefact directory; the model card (`card.j2`) lists its files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from jinja2 import StrictUndefined, Template

from selector.actions import Action
from selector.decision import Setting
from selector.export.torchscript import DeployedSelector, torchscript
from selector.files import atomically, json_text
from selector.latency import LatencyProfile
from selector.runtime.artefact import CHECKSUMS, ArtefactConfig
from selector.runtime.selector import Selector, load_selector
from selector.runtime.tokens import FILE, TokenStatistics
from selector.schema import HIDDEN_STATES, LOG, sha256
from selector.train.module import SelectorModule

CARD = Template(
    Path(__file__).with_name("card.j2").read_text(),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
    autoescape=True,  # names come from users
)


def config_of(
    module: SelectorModule, verifier: str, fallback: Action, settings: Sequence[Setting]
) -> ArtefactConfig:
    """The contents of `config.json` for a trained module, without the pair and the figures."""
    widths = module.hparams["hidden_widths"]
    hidden_states: dict[str, int] = {}
    if widths:
        hidden_states = dict(zip(HIDDEN_STATES, widths, strict=True))
    return ArtefactConfig(
        schema=module.schema,
        ranges=module.ranges,
        objective=module.hparams["objective"],
        feature_level=module.hparams["level"],
        verifier=verifier,
        hidden_states=hidden_states,
        space=module.space,
        fallback=fallback,
        settings=tuple(settings),
    )


def write_artefact(
    folder: Path,
    module: SelectorModule,
    profile: LatencyProfile,
    verifier: str,
    fallback: Action,
    settings: Sequence[dict[str, Any]],
    facts: dict[str, Any],
    check: Callable[[Path], None] = lambda _: None,
    tokens: TokenStatistics | None = None,
) -> Selector:
    """Writes the directory under a temporary name, checks it, renames it over an earlier one, and
    loads the selector.

    Args:
        settings: `Setting.row` of each setting; further entries are kept in `config.json`.
        facts: further entries of `config.json`, among them `pair` (names and fingerprint) and
            `metrics`.
        check: called with the temporary directory; if it raises, an earlier directory is unchanged.
        tokens: statistics by token, for a log's selector.
    """
    config = config_of(module, verifier, fallback, [Setting.of(setting) for setting in settings])
    deployed = DeployedSelector(module, profile, config.settings, verifier)
    with atomically(folder) as partial:
        partial.mkdir()
        scripted = io.BytesIO()  # libtorch ends the process when it writes to a full disk
        with torchscript():
            torch.jit.save(torch.jit.script(deployed), scripted)
        (partial / "selector.pt").write_bytes(scripted.getvalue())
        (partial / "model.safetensors").write_bytes(safetensors.torch.save(deployed.state_dict()))
        if tokens is not None:
            (partial / FILE).write_bytes(safetensors.numpy.save(tokens.to_tensors()))
        (partial / "latency.json").write_text(json_text(profile.to_json()))
        versions = {name: version(name) for name in ("torch", "pytorch-lightning")}
        all_facts: dict[str, Any] = {"settings": list(settings), "versions": versions, **facts}
        config = replace(config, pair=facts["pair"], facts=all_facts)
        (partial / "config.json").write_text(json_text(config.to_json()))
        (partial / "README.md").write_text(CARD.render(config=config, of_log=config.schema == LOG))
        files = [path for path in partial.rglob("*") if path.is_file()]
        names = sorted(path.relative_to(partial).as_posix() for path in files)
        lines = [f"{sha256(partial / name)}  {name}\n" for name in names]
        (partial / CHECKSUMS).write_text("".join(lines))
        check(partial)
    return load_selector(folder)
