"""The programs of `docs/examples` print what they say they print; `...` stands for what differs
from machine to machine."""

from __future__ import annotations

import doctest
import json
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_gen.models.gguf import SMOLLM2
from data_gen.models.pair import ModelPair
from pipelines.latency.timings import read_timings
from tests.checks import ROOT, python

EXAMPLES = ROOT / "docs" / "examples"
MARK = "# It prints:\n"
STEP = 2e-3  # seconds
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files of the checkout that the programs read."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "pipelines").symlink_to(ROOT / "pipelines")
    return folder


@cache
def output(name: str, folder: Path) -> str:
    return python(EXAMPLES / name, folder=folder).stdout


def test_vllm_drafts_with_the_draft_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that the loop gives to vLLM has the draft's logits, whose layers may be
    prepacked."""
    monkeypatch.syspath_prepend(EXAMPLES / "engines")
    loop = import_module("vllm_loop")
    monkeypatch.setattr(loop, "FOLDER", tmp_path)
    checkpoint = AutoModelForCausalLM.from_pretrained(loop.draft_as_checkpoint())
    draft = ModelPair.load(SMOLLM2, loop.DRAFT, "cpu").draft
    tokens = torch.tensor([[1, 4093, 198, 28, 260, 1042]])
    said_R = draft.get_output_embeddings().vocabulary_R
    expected_TR = draft(tokens).logits[0, :, said_R]
    assert torch.allclose(checkpoint(tokens).logits[0, :, said_R], expected_TR, atol=1e-2)


class Streaming(BaseHTTPRequestHandler):
    """A server's answers, a token every `STEP` seconds at least."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and len(asked["prompt"]) in (16, 40)
        self.send_response(200)
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            time.sleep(STEP)
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


def test_the_steps_of_a_server_are_timed(tmp_path: Path) -> None:
    """Rows are added to the file, which `--timings` reads."""
    file = tmp_path / "times.csv"
    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        sizes = ["--batches", "1", "3", "--contexts", "16", "40"]
        for drafts in ([], ["--drafted", "5"], ["--drafted", "5", "--passes", "5"]):
            python(EXAMPLES / "engines/step_times.py", url, "model", file, *sizes, *drafts)
        server.shutdown()
    rows = read_timings(file)
    shapes = [(b, c, v, p) for v, p in ((1, 0), (6, 0), (6, 5)) for b in (1, 3) for c in (80, 104)]
    assert [tuple(row[:4]) for row in rows.itertuples(index=False)] == shapes
    assert rows["seconds"].min() >= STEP


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_prints_what_it_says(path: Path, folder: Path) -> None:
    if path.stem == "own_engine":
        output("replay_a_log.py", folder)  # trains its selector
    _, mark, comment = path.read_text().partition(MARK)
    lines = [line.removeprefix("#").removeprefix(" ") for line in comment.splitlines()]
    expected = "\n".join(lines).strip("\n") + "\n"
    printed = output(path.name, folder).strip("\n") + "\n"
    assert mark and doctest.OutputChecker().check_output(expected, printed, OPTIONS), printed
