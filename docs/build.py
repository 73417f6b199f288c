"""Writes the generated files: the reference of all config keys, and their JSON schema.

`make docs` runs this script; a test fails if a page differs from what it writes.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from pydantic import BaseModel

from pipelines.config import Config, section_of

DOCS = Path(__file__).parent

CONFIGURATION = """# Configuration

This page lists every key of a run's YAML file. It is generated from the schema (`make docs`). On
the command line `section.key=value` overrides a key, for example
`espalier demo train.epochs=4 "verifiers=[specinfer,traversal]"`. An unknown key is an error that
names the nearest known one.

Editors with a YAML language server complete and check the keys where a file begins with this line,
whose path is relative to the file:
`# yaml-language-server: $schema=../docs/config.schema.json`.
"""


def configuration(
    model: type[BaseModel] = Config, section: str = "", default: BaseModel | None = None
) -> str:
    """The reference of the keys of a section, then those of the sections in it.

    Args:
        default: the section where the file does not mention it; None where it must be mentioned.
    """
    prefix = f"{section}." if section else ""
    lines, inner = [], []
    for key, field in model.model_fields.items():
        if own := section_of(field):
            whole = field.default if isinstance(field.default, BaseModel) else None
            inner.append(configuration(own, prefix + key, whole))
            continue
        value = field.default if default is None else getattr(default, key)
        shown = (
            "required"
            if default is None and field.is_required()
            else f"`{_escaped(json.dumps(value, default=str))}`"
        )
        description = _escaped(" ".join((field.description or "").split()))
        lines.append(f"| `{prefix}{key}` | {shown} | {description} |\n")
    title = f"\n## {f'`{section}`' if section else 'The run'}\n\n{inspect.getdoc(model)}\n"
    table = ["\n| key | default | meaning |\n|---|---|---|\n", *lines] if lines else []
    return "".join([title if section else CONFIGURATION + title, *table, *inner])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def schema() -> str:
    """The JSON schema of a run's YAML file, by which editors complete and check its keys."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


PAGES = {"configuration.md": configuration, "config.schema.json": schema}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
