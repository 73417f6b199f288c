"""Writes the artefact directory of a trained module; its files are listed in the model card, `card.j2`."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from jinja2 import StrictUndefined, Template

from selector.actions import Action
from selector.decision import Mode
from selector.export.deployed import DeployedSelector, config_of
from selector.files import atomically, json_text
from selector.latency import LatencyProfile
from selector.runtime.artefact import CHECKSUMS
from selector.runtime.selector import Selector, load_selector
from selector.runtime.tokens import FILE, TokenStatistics
from selector.schema import LOG, sha256
from selector.train.module import SelectorModule

CARD = Template(
    Path(__file__).with_name("card.j2").read_text(),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)


def write_artefact(
    folder: Path,
    module: SelectorModule,
    profile: LatencyProfile,
    verifier: str,
    fallback: Action,
    modes: Sequence[dict[str, Any]],
    facts: dict[str, Any],
    check: Callable[[Path], None] = lambda _: None,
    tokens: TokenStatistics | None = None,
) -> Selector:
    """Writes the directory under a temporary name, checks it, renames it over an earlier one, and loads the selector.

    Args:
        modes: `Mode.row` of each sampling setting; further entries are kept in `config.json`.
        facts: further entries of `config.json`, among them `pair` (names and fingerprint) and `metrics`.
        check: called with the temporary directory; if it raises, an earlier directory is unchanged.
        tokens: statistics by token, for a log's selector.
    """
    config = config_of(module, verifier, fallback, [Mode.of(mode) for mode in modes])
    made = DeployedSelector(module, profile, config.modes, verifier)
    with atomically(folder) as partial:
        partial.mkdir()
        (partial / "selector.pt").write_bytes(_scripted(made))
        (partial / "model.safetensors").write_bytes(safetensors.torch.save(made.state_dict()))
        if tokens is not None:
            (partial / FILE).write_bytes(safetensors.numpy.save(tokens.to_tensors()))
        (partial / "latency.json").write_text(json_text(profile.to_json(), indent=1) + "\n")
        versions = {name: version(name) for name in ("torch", "pytorch-lightning")}
        config = replace(config, pair=facts["pair"], facts={"modes": list(modes), "versions": versions, **facts})
        (partial / "config.json").write_text(json_text(config.to_json(), indent=1) + "\n")
        page = CARD.render(config=config, of_log=config.schema == LOG)
        (partial / "README.md").write_text(page)
        names = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
        (partial / CHECKSUMS).write_text("".join(f"{sha256(partial / name)}  {name}\n" for name in names))
        check(partial)
    return load_selector(folder)


def load_script(folder: Path) -> torch.jit.ScriptModule:
    """The TorchScript of an artefact directory."""
    with torchscript():
        return torch.jit.load(str(folder / "selector.pt"), map_location="cpu").eval()


@contextmanager
def torchscript() -> Iterator[None]:
    """Suppresses the warning that TorchScript is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".?torch\.jit\.\w+.? is deprecated", category=DeprecationWarning)
        yield


def _scripted(made: DeployedSelector) -> bytes:
    """The file's bytes, because libtorch ends the process when it writes to a full disk."""
    buffer = io.BytesIO()
    with torchscript():
        torch.jit.save(torch.jit.script(made), buffer)
    return buffer.getvalue()
