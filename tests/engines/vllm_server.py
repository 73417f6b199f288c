"""vLLM's server on the loopback with SmolLM2 on the CPU, and requests to it."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_gen.models.gguf import SMOLLM2, resolved
from data_gen.texts.prompts import Prompt
from tests.engines.loop import CONTEXT, TOKENS, Answer
from tests.engines.wrong import COUNT

FOLDER, PYTHON = Path("runs/vllm"), ".venv-vllm/bin/python"
SERVER = {
    **{
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
    **{"OMP_NUM_THREADS": "2", "KMP_BLOCKTIME": "0"},
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""},
}
OPTIONS = f"--served-model-name smol --dtype float32 --enforce-eager --max-model-len {CONTEXT}"


@contextmanager
def server(
    port: int,
    speculative: dict[str, Any] | None,
    additional: dict[str, Any] | None = None,
    more: str = "",
) -> Iterator[str]:
    """A server of the loopback, once it answers; its address."""
    command = [
        *f"{PYTHON} -m vllm.entrypoints.openai.api_server {OPTIONS} --port {port} {more}".split()
    ]
    command += ["--model", resolved(SMOLLM2, "target")]
    if speculative:
        command += [
            "--per-request-spec-decode-metrics",
            "detailed",
            "--speculative-config",
            json.dumps(speculative),
        ]
    if additional:
        command += ["--additional-config", json.dumps(additional)]
    address, log = f"http://127.0.0.1:{port}", FOLDER / f"server-{port}.log"
    assert not alive(address), f"{address}: something serves there already"
    environment = {
        **os.environ,
        **SERVER,
        "PYTHONPATH": str(Path.cwd()),
        COUNT: str(FOLDER / "wrong.txt"),
    }
    with (
        log.open("w") as said,
        subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process,
    ):
        try:
            while not alive(address):
                if process.poll() is not None:
                    raise SystemExit(f"{log}: the server ended: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield address
        finally:
            process.terminate()


def alive(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
    except OSError:
        return False
    return True


def custom(name: str, most: int) -> dict[str, Any]:
    """A class of ours as vLLM's drafter of up to so many tokens."""
    return {"method": "custom_class", "model": name, "num_speculative_tokens": most}


def post(address: str, way: str, body: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
    """The server's answer; URLError where it refuses, TimeoutError, which aborts the request, where
    it takes longer."""
    data = json.dumps({"model": "smol", "return_token_ids": True, **body}).encode()
    request = urllib.request.Request(
        f"{address}/v1/{way}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def ask(
    address: str, prompt: Prompt, temperature: float, tokens: int = TOKENS, to_the_end: bool = False
) -> Answer:
    """The answer to one prompt; of so many tokens in any case if `to_the_end`."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt.text}],
        "temperature": temperature,
    }
    body |= {"max_tokens": tokens, "ignore_eos": to_the_end, "seed": 1}
    begin = time.perf_counter()
    found = post(address, "chat/completions", body)
    seconds = time.perf_counter() - begin
    told = ((found.get("metrics") or {}).get("speculative_decoding")) or {}
    steps = zip(
        told.get("per_step_drafted") or (), told.get("per_step_accepted") or (), strict=True
    )
    ids = found["prompt_token_ids"], found["choices"][0]["token_ids"]
    return Answer(*ids, seconds, prompt.kind, prompt.source, list(steps))


def ask_all(
    address: str,
    prompts: Sequence[Prompt],
    at_once: int,
    temperature: float = 0.0,
    others: Sequence[Prompt] = (),
    **how: Any,
) -> list[Answer]:
    """All answers, so many at once; some `others` are asked before them, so that they do not begin
    together, and the rest after them, so that the last ones are not alone."""
    with ThreadPoolExecutor(at_once) as pool:
        for prompt in others[:at_once]:
            pool.submit(ask, address, prompt, temperature, **how)
        wanted = [pool.submit(ask, address, prompt, temperature, **how) for prompt in prompts]
        for prompt in others[at_once:]:
            pool.submit(ask, address, prompt, temperature, **how)
        answers = [each.result() for each in wanted]
        pool.shutdown(cancel_futures=True)
    return answers
