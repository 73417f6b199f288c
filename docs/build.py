"""Writes the generated files: the reference of all config keys and their JSON schema, the map of the code, and the
picture of a delayed tree.

`make docs` runs this script; a test fails if a page differs from what it writes.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path

from pipelines.config import Config, parts

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PACKAGES = ("selector", "data_gen", "pipelines")

CONFIGURATION = """# Configuration

This page lists every key of a run's YAML file. It is generated from the schema (`make docs`). On the command line
`section.key=value` overrides a key, for example `espalier demo train.epochs=4 "verifiers=[specinfer,traversal]"`. An
unknown key is an error that names the nearest known one.

Editors with a YAML language server complete and check the keys where a file begins with this line, whose path is
relative to the file: `# yaml-language-server: $schema=../docs/config.schema.json`.
"""

MAP = """# Map of the code

This page is generated from the code (`make docs`). It lists the imports between rooms, which are folders, and then one
line for each module, from its docstring. Imports go from `pipelines` to `data_gen` to `selector`. `selector` knows
nothing of language models, and `data_gen` nothing of stages. There are no import circles, and no stage imports a study
(`tests/test_arrows.py`).

The axes in a tensor's name are explained at the top of its file: `target_probs_NV` has one row per node and one column
per token of the vocabulary.

Three walks through the code:

- *A trace row, from a text to a training tensor*: `pipelines/data/stage.py`, `data_gen/texts/labelled.py` (one row
  per text), `data_gen/texts/written.py` (the text and both models' rows along it), `data_gen/text_labels/labels.py`,
  `data_gen/text_labels/branch_walks.py`, `data_gen/traces.py` (Parquet); then `data_gen/texts/recorded.py`,
  `data_gen/features/recorded.py` (the features), `selector/train/data.py` and `selector/train/module.py`.
- *A decision, from training to the engine*: `pipelines/train/packaging.py`, `selector/export/write.py` (the artefact),
  `selector/runtime/selector.py`, `selector/runtime/tuned.py`, `selector/runtime/one_root.py`.
- *The law of a verifier*: `data_gen/verification/base.py` (`law`, and the walk over the tree), then the verifier's own
  file.
"""


def configuration() -> str:
    """The reference of all keys."""
    lines = [CONFIGURATION]
    for part in parts():
        title = f"`{part.name}`" if part.name else "The run"
        lines.append(f"\n## {title}\n\n{part.meaning}\n")
        if part.keys:
            lines.append("\n| key | default | meaning |\n|---|---|---|\n")
        for key in part.keys:
            default = key.default if key.default == "required" else f"`{_escaped(key.default)}`"
            lines.append(f"| `{key.name}` | {default} | {_escaped(key.meaning)} |\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def code_map() -> str:
    """The imports between rooms, then one line per module."""
    lines = [MAP, "\n| room | imports |\n|---|---|\n"]
    for room in rooms():
        imported = ", ".join(f"`{each}`" for each in imports(room))
        lines.append(f"| `{room}` | {imported} |\n")
    for room in rooms():
        lines.append(f"\n## {room}/\n\n{_summary(ROOT / room / '__init__.py')}\n\n")
        lines += [f"- `{path.name}`: {_summary(path)}\n" for path in sorted((ROOT / room).glob("[!_]*.py"))]
    return "".join(lines)


def rooms() -> list[str]:
    """All folders of the product, package by package."""
    return [
        folder.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")})
    ]


def imports(room: str) -> list[str]:
    """The rooms of the same package, and the other packages, that a room's modules import."""
    known, package, found = set(rooms()), room.split("/")[0], set()
    for path in (ROOT / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                name = node.module.replace(".", "/")
                other = name if name in known else name.rpartition("/")[0]
                found.add(other if other.split("/")[0] == package else other.split("/")[0])
    return sorted(found - {room})


def _summary(path: Path) -> str:
    """The first sentence of a module's docstring."""
    paragraph = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<!\bal)(?<=[.?]) (?=[A-Z])", paragraph)[0]


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
    "map.md": code_map,
    "delayed-tree.svg": picture,
}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
