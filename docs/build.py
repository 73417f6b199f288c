"""What is generated of these pages: the reference of all keys, the map of the code, and the picture of a delayed tree.

`make docs` writes them; a test fails where they are not what this script makes of the code.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

from pipelines.config.reference import parts

DOCS = Path(__file__).parent
ROOT = DOCS.parent

CONFIGURATION = """# Configuration

Every key of a run's YAML file, generated from the schema (`make docs`). On the command line a key is overridden as
`section.key=value`, for example `espalier demo train.epochs=4 "verifiers=[specinfer,traversal]"`. An unknown key is an
error that names the nearest known one.
"""

MAP = """# Map of the code

One line per module, from its docstring (`make docs`). Arrows run `pipelines -> data_gen -> selector`: `selector` knows
nothing of language models, and `data_gen` nothing of stages. No module imports itself by way of others, and nothing in
the product imports `pipelines.studies` (`tests/test_arrows.py`).

Names of tensors end in their axes, which the top of each file explains: `target_probs_NV` has one row per node and one
column per token of the vocabulary.

Four walks through it:

- *A trace row, from decoding to a training tensor*: `pipelines/data/stage.py`, `data_gen/texts/labelled.py` (the row of
  a text), `data_gen/texts/written.py` (the text, and both models' rows along it), `data_gen/features/root.py`,
  `data_gen/text_labels/labels.py` (with `branch_walks.py` and `verification/`), `data_gen/traces.py` (Parquet); then
  `selector/train/data.py` and `selector/train/module.py`.
- *A decision, from export to engine*: `pipelines/export/packaging.py`, `selector/export/write.py` (the artefact); in
  the engine `selector/runtime/selector.py` and `selector/decision.py`.
- *From a log to a decision*: `pipelines/logs/stage.py`, `data_gen/texts/logs.py` (the file), `pipelines/logs/texts.py`
  and `data_gen/features/text.py` (features), `pipelines/logs/judging.py` (prices), `selector/train/mixed.py` (batches).
- *The law of a verifier*: `data_gen/verification/base.py` (`law`, and the walk over the tree), the file of the
  verifier, and `data_gen/verification/profile.py` (arithmetic on rows).
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
    """One line per module, room by room."""
    lines = [MAP]
    for package in ("selector", "data_gen", "pipelines"):
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            lines.append(f"\n## {'/'.join(folder.relative_to(ROOT).parts)}/\n\n{_summary(folder / '__init__.py')}\n\n")
            lines += [f"- `{path.name}`: {_summary(path)}\n" for path in sorted(folder.glob("[!_]*.py"))]
    return "".join(lines)


def _summary(path: Path) -> str:
    """The first sentence of a module's docstring; of a paragraph with several, the first one."""
    paragraph = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<!\bal)(?<=[.?]) (?=[A-Z])", paragraph)[0]


STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#222}.small{font-size:12px;fill:#666}line{stroke:#888;stroke-width:2}"
    "circle{stroke:#fff;stroke-width:2}.box{fill:#eef3fb;stroke:#4a78b5}"
)
ROOT_, TRUNK, BRANCH = "#222", "#4a78b5", "#d9822b"


def picture() -> str:
    """A tree `(3, 2, 3)`, and what happens to it in a step, as SVG."""
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


PAGES = {"configuration.md": configuration, "map.md": code_map, "delayed-tree.svg": picture}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
