"""vLLM's server on the loopback with SmolLM2 on the CPU, and requests to it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loop import CONTEXT, TOKENS, Answer

from data_gen.models.gguf import SMOLLM2, resolved
from data_gen.texts.prompts import Prompt

FOLDER = Path("runs/vllm")
PYTHON = ".venv-vllm/bin/python"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "OMP_NUM_THREADS": "2",
    "KMP_BLOCKTIME": "0",
    "HF_HUB_OFFLINE": "1",
    # of the plug-ins
    "PYTHONPATH": f"{Path.cwd()}:{Path(__file__).parent.absolute()}",
}
PORT = 8711  # of the first server
LONGEST = 20  # drafted tokens
OPTIONS = f"--served-model-name smol --dtype float32 --enforce-eager --max-model-len {CONTEXT}"


@contextmanager
def server(
    port: int,
    speculative: dict[str, Any] | None,
    additional: dict[str, Any] | None = None,
    more: str = "",
) -> Iterator[str]:
    """A server of the loopback, once it answers; its address."""
    line = f"{PYTHON} -m vllm.entrypoints.openai.api_server {OPTIONS} --port {port} {more}"
    command = [*line.split(), "--model", resolved(SMOLLM2, "target")]
    if speculative:
        command += ["--per-request-spec-decode-metrics", "detailed"]
        command += ["--speculative-config", json.dumps(speculative)]
    if additional:
        command += ["--additional-config", json.dumps(additional)]
    address = f"http://127.0.0.1:{port}"
    assert not alive(address), f"{address}: something serves there already"
    environment = {**os.environ, **ENVIRONMENT}
    log = FOLDER / f"server-{port}.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
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


def custom(name: str, most: int = LONGEST) -> dict[str, Any]:
    """A class of ours as vLLM's drafter of up to so many tokens."""
    return {"method": "custom_class", "model": name, "num_speculative_tokens": most}


class Method(NamedTuple):
    """What `server` is given; without a drafter if `speculative` is None."""

    speculative: dict[str, Any] | None = None
    additional: dict[str, Any] | None = None
    alone: bool = False  # it takes no turns with others in a server

    @property
    def in_turns(self) -> bool:
        return self.speculative is not None and not self.alone


class Station(NamedTuple):
    """A server that answers with one method, perhaps one of several whose drafters take turns."""

    address: str
    turn: Path | None = None  # the file that says whose turn it is
    name: str = ""

    def ask_all(self, *arguments: Any, **further: Any) -> list[Answer]:
        """All answers; arguments as those of the function."""
        if self.turn is not None:
            self.turn.write_text(self.name)
        return ask_all(self.address, *arguments, **further)


Key = TypeVar("Key")


@contextmanager
def serving(methods: Mapping[Key, Method], seed: int = 0) -> Iterator[dict[Key, Station]]:
    """Where each method answers: those that can take turns in one server (`Turns`), equal ones at
    the same place. Two servers start at a time, in random order."""
    in_turns = [method for method in methods.values() if method.in_turns]
    servers: list[Method] = []
    for method in methods.values():
        if not method.in_turns and method not in servers:
            servers.append(method)
    turn = (FOLDER / "turn").absolute()
    drafters = {}
    for method in in_turns:
        drafters[str(in_turns.index(method))] = method[:2]
    turns = Method(custom("turns.Turns"), {"turn": str(turn), "drafters": drafters})
    if in_turns:
        turn.write_text("0")
        servers.append(turns)
    random.Random(seed).shuffle(servers)
    with ExitStack() as stack, ThreadPoolExecutor(2) as starting:
        contexts = [
            server(PORT + offset, method.speculative, method.additional)
            for offset, method in enumerate(servers)
        ]
        addresses = list(starting.map(stack.enter_context, contexts))
        stations: dict[Key, Station] = {}
        for key, method in methods.items():
            if method.in_turns:
                address = addresses[servers.index(turns)]
                stations[key] = Station(address, turn, str(in_turns.index(method)))
            else:
                stations[key] = Station(addresses[servers.index(method)])
        yield stations


def post(address: str, path: str, body: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
    """The server's answer; URLError where it refuses, TimeoutError, which aborts the request, where
    it takes longer."""
    data = json.dumps({"model": "smol", "return_token_ids": True, **body}).encode()
    request = urllib.request.Request(
        f"{address}/v1/{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def respond(
    address: str, prompt: Prompt, temperature: float, tokens: int = TOKENS, to_the_end: bool = False
) -> dict[str, Any]:
    """The server's response to one prompt, which is a line of a log; of so many tokens in any case
    if `to_the_end`."""
    body = {
        "messages": [{"role": "user", "content": prompt.text}],
        "temperature": temperature,
        "max_tokens": tokens,
        "ignore_eos": to_the_end,
        "seed": 1,
    }
    return post(address, "chat/completions", body)


def ask(address: str, prompt: Prompt, *arguments: Any, **further: Any) -> Answer:
    """The answer to one prompt; arguments as those of `respond`."""
    begin = time.perf_counter()
    response = respond(address, prompt, *arguments, **further)
    seconds = time.perf_counter() - begin
    metrics = response.get("metrics") or {}
    counts = metrics.get("speculative_decoding") or {}
    drafted = counts.get("per_step_drafted") or ()
    accepted = counts.get("per_step_accepted") or ()
    return Answer(
        response["prompt_token_ids"],
        response["choices"][0]["token_ids"],
        seconds,
        prompt.kind,
        prompt.source,
        list(zip(drafted, accepted, strict=True)),
    )


def ask_all(
    address: str,
    prompts: Sequence[Prompt],
    at_once: int,
    temperature: float = 0.0,
    others: Sequence[Prompt] = (),
    tokens: int = TOKENS,
    to_the_end: bool = False,
) -> list[Answer]:
    """All answers, so many at once; some `others` are asked before them, so that they do not begin
    together, and the rest after them, so that the last ones are not alone."""
    ask_one = partial(ask, temperature=temperature, tokens=tokens, to_the_end=to_the_end)
    with ThreadPoolExecutor(at_once) as pool:
        for prompt in others[:at_once]:
            pool.submit(ask_one, address, prompt)
        asked = [pool.submit(ask_one, address, prompt) for prompt in prompts]
        for prompt in others[at_once:]:
            pool.submit(ask_one, address, prompt)
        answers = [answer.result() for answer in asked]
        pool.shutdown(cancel_futures=True)
    return answers
