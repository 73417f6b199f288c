"""Writes the generated files: the reference of all config keys, their JSON schema, and the picture of a delayed tree.

`make docs` runs this script; a test fails if a page differs from what it writes.
"""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path

from pydantic import BaseModel

from pipelines.config import Config, section_of

DOCS = Path(__file__).parent

CONFIGURATION = """# Configuration

This page lists every key of a run's YAML file. It is generated from the schema (`make docs`). On the command line
`section.key=value` overrides a key, for example `espalier demo train.epochs=4 "verifiers=[specinfer,traversal]"`. An
unknown key is an error that names the nearest known one.

Editors with a YAML language server complete and check the keys where a file begins with this line, whose path is
relative to the file: `# yaml-language-server: $schema=../docs/config.schema.json`.
"""


def configuration(model: type[BaseModel] = Config, section: str = "", default: BaseModel | None = None) -> str:
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
            "required" if default is None and field.is_required() else f"`{_escaped(json.dumps(value, default=str))}`"
        )
        lines.append(f"| `{prefix}{key}` | {shown} | {_escaped(field.description or '')} |\n")
    title = f"\n## {f'`{section}`' if section else 'The run'}\n\n{inspect.getdoc(model)}\n"
    table = ["\n| key | default | meaning |\n|---|---|---|\n", *lines] if lines else []
    return "".join([title if section else CONFIGURATION + title, *table, *inner])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#222}.small{font-size:12px;fill:#666}line{stroke:#888;stroke-width:2}"
    "circle{stroke:#fff;stroke-width:2}.box{fill:#eef3fb;stroke:#4a78b5}"
)
ROOT_, TRUNK, BRANCH = "#222", "#4a78b5", "#d9822b"


def picture() -> str:
    """A tree `(3, 2, 3)` and the parts of a decoding step, as SVG."""
    trunk = [(40 + 60 * depth, 110) for depth in range(3)]  # the root and two tokens
    branches = [[(220 + 60 * depth, 110 + 70 * side) for depth in range(3)] for side in (-1, 0, 1)]
    edges = [*itertools.pairwise(trunk)]
    for branch in branches:
        edges += [(trunk[-1], branch[0]), *itertools.pairwise(branch)]
    parts = [f"<line x1='{a}' y1='{b}' x2='{c}' y2='{d}'/>" for (a, b), (c, d) in edges]
    nodes = [(trunk[0], ROOT_), *((at, TRUNK) for at in trunk[1:]), *((at, BRANCH) for row in branches for at in row)]
    parts += [f"<circle cx='{x}' cy='{y}' r='11' fill='{colour}'/>" for (x, y), colour in nodes]
    parts += [
        _text(40, 150, "root"),
        _text(130, 150, "trunk, L1 = 2"),
        _text(280, 20, "K = 3 branches of L2 = 3"),
        _text(190, 222, "(K, L1, L2) = (3, 2, 3)"),
    ]
    steps = [
        ("selector", "chooses (K, L1, L2), or nothing"),
        ("draft", "proposes the tree"),
        ("target", "one pass over all nodes"),
        ("verifier", "accepts a prefix, adds a token"),
    ]
    for number, (who, what) in enumerate(steps):
        y = 14 + 54 * number
        parts.append(f"<rect class='box' x='430' y='{y}' width='290' height='40' rx='6'/>")
        parts += [_text(446, y + 25, who, "start"), _text(520, y + 25, what, "start", "small")]
        if number:
            parts.append(f"<line x1='575' y1='{y - 14}' x2='575' y2='{y}'/>")
    title = "A delayed tree, and one step of speculative decoding with it"
    return (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 740 236' role='img' aria-label='" + title + "'>"
        f"<title>{title}</title><style>{STYLE}</style><rect width='740' height='236' fill='#fff'/>"
        + "\n".join(parts)
        + "</svg>\n"
    )


def _text(x: int, y: int, words: str, anchor: str = "middle", kind: str = "") -> str:
    return f"<text x='{x}' y='{y}' text-anchor='{anchor}' class='{kind}'>{words}</text>"


def schema() -> str:
    """The JSON schema of a run's YAML file, by which editors complete and check its keys."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


PAGES = {
    "configuration.md": configuration,
    "config.schema.json": schema,
    "delayed-tree.svg": picture,
}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
