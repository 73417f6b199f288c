"""The loop with a real engine (`make engine-vllm`): vLLM on the CPU serves SmolLM2, its log and its
step times train selectors, and these decide inside it.

Methods answer some held-out prompts each in random order: a machine may be a third faster an hour
later. Two servers that do the same may differ by some percent as long as they run, so drafters take
turns in one server where they can, vLLM's n-grams and the selectors among them, and all servers
start anew for every round and number of requests. A round has a third of the prompts, and intervals
are over rounds. Every part is kept in `runs/vllm/`, and the same command goes on there.

Legend: N drafted tokens, V vocabulary, D width of a hidden state.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loop import (
    PLAIN,
    Answer,
    log_ratios,
    made_once,
    promised,
    prompts,
    row,
    show,
    train,
    with_prompt,
    write_log,
)
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server import (
    ENVIRONMENT,
    FOLDER,
    LONGEST,
    PORT,
    PYTHON,
    Method,
    Station,
    ask_all,
    custom,
    respond,
    server,
    serving,
)

from data_gen.engines.drafter import CachedDrafter
from data_gen.engines.text import NAME, TextSelector
from data_gen.models.gguf import SMOLLM2, resolved
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.prepack import named_weights
from data_gen.models.sampling import Sampling, probabilities
from data_gen.texts.prompts import Prompt
from data_gen.timing import usual
from pipelines.config import SHIPPED
from pipelines.terminal import console
from selector.actions import EMPTY
from selector.decision import STATIC
from selector.files import atomically
from selector.runtime.selector import load_selector
from selector.schema import TEXT

PROPOSER = "data_gen.engines.vllm.Proposer"
SILENT = "turns.Silent"  # beside this script
# requests whose steps are recorded, and how often the prompts are asked: 100 steps of each number
# must draft nothing. Of one request a third of the prompts gives enough.
AT_ONCE = {1: 1, 4: 1, 8: 2}
TIMED, TIMES = 48, 2  # new tokens of an answer that times plain steps; how often
FIXED = 5  # tokens that vLLM's own draft model drafts while it writes an ordinary log
DRAFT = str(SHIPPED.absolute())
SAMPLED = 0.7  # the temperature beside 0
SGLANG = Path(".venv-vllm/sglang")
LOOKUP = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
NGRAMS = [{**LOOKUP, "num_speculative_tokens": n} for n in (2, 4, 8)]
NGRAM = "n-gram, tuned"
TWIN = "n-gram, a server of its own"  # says what taking turns changes
SUFFIX = "suffix decoding"
MODEL = "draft model, tuned"
COPIES = "copies"
OURS = "selector"
SERVED = "selector, of vLLM's own log"
PARTS = 3  # of the held-out prompts, a part in each round
PASSES = 1  # over the held-out prompts
TUNING = 24  # prompts that choose the lengths of vLLM's drafters

Methods = dict[tuple[str, int], Method]  # by name and the number of requests at once


class Scene(NamedTuple):
    temperature: float
    at_once: int
    by_kind: bool = False  # requests of one kind at a time
    methods: tuple[str, ...] = (PLAIN, NGRAM, OURS)

    def __str__(self) -> str:
        kinds = ", by kind" if self.by_kind else ""
        return f"{self.at_once}{kinds}, T = {self.temperature:g}"

    def groups(self, held_out: Sequence[Prompt], number: int) -> list[list[Prompt]]:
        """The prompts of a round that a method answers before the next one has its turn."""
        if self.by_kind:
            by_kind: dict[str, list[Prompt]] = {}
            for prompt in sorted(held_out, key=lambda prompt: prompt.kind):
                by_kind.setdefault(prompt.kind, []).append(prompt)
            groups = list(by_kind.values())
        else:
            size = 2 if self.at_once == 1 else 16
            begins = range(0, len(held_out), size)
            groups = [list(held_out[begin : begin + size]) for begin in begins]
        return groups[number % PARTS :: PARTS]


WIDE = (PLAIN, NGRAM, MODEL, COPIES, OURS)
ALL = (OURS, COPIES, SERVED, MODEL, SUFFIX, TWIN)
SCENES = [
    Scene(0.0, 1, methods=(*WIDE, SERVED, SUFFIX)),  # SUFFIX once: it knows what it has answered
    Scene(0.0, 4, methods=(PLAIN, NGRAM, COPIES, OURS, SERVED)),
    Scene(0.0, 8, methods=(*WIDE, SERVED, TWIN)),
    Scene(0.0, 8, by_kind=True),
    Scene(SAMPLED, 1),
    Scene(SAMPLED, 4),
    Scene(SAMPLED, 8),
]


def recorded(training: Sequence[Prompt], temperature: float, steps: Path) -> list[Answer]:
    """A server's answers while drafts of all lengths take turns. Its plug-in records the `steps`,
    and those of a server without a drafter are added. All servers start anew for each part of the
    prompts, as in the comparison."""
    options = {"steps": str(steps.absolute()), "temperature": temperature, "draft": DRAFT}
    copying = {"steps": os.devnull, "temperature": temperature}
    methods = {
        "recording": Method(custom(PROPOSER), {NAME: options}),
        "silent": Method(custom(SILENT), {NAME: copying}),
        "plain": Method(),
    }
    # what a step takes without a drafter, over what it takes beside one that drafts nothing
    quotients: dict[int, list[float]] = {at_once: [] for at_once in AT_ONCE}
    all_answers: list[Answer] = []
    for part in range(PARTS):
        prompts_of_part = training[part::PARTS]
        with serving(methods, part) as stations:
            for at_once, times in AT_ONCE.items():
                asked = prompts_of_part if at_once > 1 else prompts_of_part[::3]
                for _ in range(times):
                    answers = []
                    for half in (asked[::2], asked[1::2]):
                        answers += stations["recording"].ask_all(half, at_once, temperature)
                        beside = plain_step(stations["silent"], half[:at_once], temperature)
                        plain = plain_step(stations["plain"], half[:at_once], temperature)
                        quotients[at_once].append(plain / beside)
        all_answers += answers
    add_plain_steps(steps, quotients)
    return all_answers


def add_plain_steps(steps: Path, quotients: dict[int, list[float]]) -> None:
    """Add to a record what a step takes without a drafter, by requests at once: its undrafted steps
    times the median of the quotients, which were measured in turns, since within minutes a machine
    changes more than a drafter costs."""
    recorded_steps = [json.loads(line) for line in steps.read_text().splitlines()]
    with steps.open("a") as file:
        for at_once, measured_quotients in quotients.items():
            undrafted = []
            for step in recorded_steps:
                if step["batch"] == at_once and step["verified"] == 1:
                    undrafted.append(step["seconds"])
            seconds = statistics.median(measured_quotients) * usual(undrafted)
            step = {"batch": at_once, "context": 100, "verified": 1, "passes": 0, "drafter": False}
            file.write(json.dumps({**step, "seconds": seconds}) + "\n")


def plain_step(station: Station, asked: Sequence[Prompt], temperature: float) -> float:
    """What a step of so many requests takes in seconds: how much longer longer answers take. The
    prompts' passes are in both."""
    seconds = []
    for tokens in TIMES * (4, 4 + TIMED):
        answers = station.ask_all(asked, len(asked), temperature, tokens=tokens, to_the_end=True)
        seconds.append(max(answer.seconds for answer in answers))
    return (sum(seconds[1::2]) - sum(seconds[::2])) / (TIMES * TIMED)


def tuned(
    drafters: Sequence[Method], asked: Sequence[Prompt], temperature: float
) -> dict[str, Any]:
    """By the number of requests at once, the drafter with which vLLM answers most quickly."""
    fastest: dict[str, Any] = {}
    with serving(dict(enumerate(drafters))) as stations:
        for station in stations.values():
            station.ask_all(asked[:8], 8)
        for at_once in AT_ONCE:
            others = asked[:at_once] if at_once > 1 else ()
            least = math.inf
            for number, station in stations.items():
                answers = station.ask_all(asked, at_once, temperature, others)
                seconds = sum(answer.seconds for answer in answers)
                if seconds < least:
                    least = seconds
                    fastest[str(at_once)] = drafters[number].speculative
    return fastest


def draft_as_checkpoint() -> str:
    """The draft that comes with Espalier, with the target's tables; tokens that it cannot say have
    the logit 0."""
    folder = FOLDER / "draft"
    if not folder.exists():
        draft = ModelPair.load(SMOLLM2, DRAFT, "cpu").draft
        head = draft.get_output_embeddings()
        checkpoint = AutoModelForCausalLM.from_config(draft.config)
        table_VD = torch.zeros_like(checkpoint.get_output_embeddings().weight)
        table_VD[head.vocabulary_R] = head.weight.detach()
        weights = {"lm_head.weight": table_VD}
        for name, weight in named_weights(draft):
            if not name.startswith("lm_head."):
                weights[name] = weight
        checkpoint.load_state_dict(weights)
        checkpoint.save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolved(SMOLLM2, "target")).save_pretrained(folder)
    return str(folder.absolute())


class Acceptance:
    """How many drafted tokens were accepted, and how many the target's probabilities say."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self.expected = 0.0
        self.variance = 0.0

    def add(self, survivals_N: torch.Tensor, accepted: int) -> None:
        """Add a step whose first n drafted tokens are accepted with P(accepted >= n)."""
        odd_N = 2 * torch.arange(len(survivals_N)).double() + 1
        mean = float(survivals_N.sum())
        self.drafted += len(survivals_N)
        self.accepted += accepted
        self.expected += mean
        self.variance += float(odd_N @ survivals_N) - mean**2

    def __str__(self) -> str:
        z = (self.accepted - self.expected) / math.sqrt(self.variance)
        return (
            f"{self.drafted} tokens drafted, {self.accepted} accepted, {self.expected:.1f} "
            f"expected, z = {z:+.2f}"
        )


def law(answers: Sequence[Answer], selector: TextSelector) -> Acceptance:
    """The acceptance of sampled texts of one request at a time. The drafts are the selector's,
    which decides again along each text."""
    target = ModelPair.load(SMOLLM2, DRAFT, "cpu").target
    acceptance = Acceptance()
    for answer in answers:
        tokens = answer.tokens
        steps = iter(answer.steps)
        text = selector.text([*answer.prompt, tokens[0]], len(answer.prompt))
        cached = CachedModel(target)
        cached.fill(answer.prompt)
        end = 1
        while end < len(tokens):
            (draft,) = selector.drafts([text], [LONGEST])
            fed = [tokens[end - 1], *draft[:-1]]
            causal = torch.ones(len(fed), len(fed), dtype=torch.bool).tril_()
            output = cached.forward(torch.tensor(fed), torch.arange(len(fed)), causal)
            cached.keep([0])
            accepted = 0
            if draft:
                drafted, accepted = next(steps)
                assert drafted == len(draft), "the selector decides as in the engine"
                probs_NV = probabilities(output.logits_WV, Sampling(SAMPLED))
                probs_N = probs_NV[torch.arange(len(draft)), draft]
                acceptance.add(probs_N.double().cumprod(0), accepted)
            text.committed(tokens[end : end + accepted + 1])
            cached.fill(tokens[end : end + accepted])
            end += accepted + 1
    return acceptance


def settings_are_accepted() -> None:
    """By the engines' own checks; CalledProcessError where they are not."""
    engines = {"vllm": str(Path.cwd())}
    if SGLANG.exists():
        engines["sglang"] = f"{Path.cwd()}:{SGLANG}"
    else:
        console.print(f"{SGLANG} does not exist: SGLang does not check its settings")
    script = str(Path(__file__).with_name("arguments.py"))
    for engine, modules in engines.items():
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": modules}
        command = [PYTHON, script, engine, resolved(SMOLLM2, "target"), DRAFT]
        subprocess.run(command, env={**os.environ, **ENVIRONMENT, **quiet}, check=True)


def trained(
    names: set[str],
    training: Sequence[Prompt],
    held_out: Sequence[Prompt],
    drafter: CachedDrafter,
    heats: Sequence[float],
) -> dict[tuple[str, float], Path]:
    """By method, of these names, and temperature the folders of the selectors that the server's
    answers and step times train: of copies and drafts, of copies alone, and of what vLLM itself
    writes. Replay is of a plain server's answers to the held-out prompts, but with the last one."""
    logs: dict[float, Path] = {}
    timings: dict[float, Path] = {}
    tests: dict[float, Path] = {}
    for heat in heats:
        logs[heat] = FOLDER / f"log-{heat:g}.jsonl"
        timings[heat] = FOLDER / f"steps-{heat:g}.jsonl"
        tests[heat] = FOLDER / f"held-out-{heat:g}.jsonl"
        if not tests[heat].exists():
            with server(PORT, None) as address:
                answers = ask_all(address, held_out, max(AT_ONCE), heat)
            write_log(tests[heat], answers, drafter)
        if not logs[heat].exists():
            timings[heat].unlink(missing_ok=True)
            write_log(logs[heat], recorded(training, heat, timings[heat]), drafter)
    selectors: dict[tuple[str, float], Path] = {}
    for heat, log in logs.items():
        sampling = f"sampling=[{{temperature: {heat}}}]"
        selectors[OURS, heat] = train(
            log, timings[heat], f"vllm-{heat:g}", sampling, held_out=tests[heat]
        )
    if COPIES in names:
        folder = train(
            logs[0.0], timings[0.0], "vllm-copies", "logs.drafter=none", held_out=tests[0.0]
        )
        selectors[COPIES, 0.0] = folder
    if SERVED in names:
        served_log = FOLDER / "log-served.jsonl"
        if not served_log.exists():
            write_ordinary_log(served_log, training)
        selectors[SERVED, 0.0] = train(served_log, timings[0.0], "vllm-served")
    return selectors


def prompt_seconds(asked: Sequence[Prompt]) -> float:
    """What a server's pass over one of these prompts takes on average beyond a step."""
    with server(PORT, None) as address:
        ask_all(address, asked[:2], 1)
        answers = ask_all(address, asked[2:], 1, tokens=1)
        step = plain_step(Station(address), asked[:1], 0.0)
    return statistics.fmean(answer.seconds for answer in answers) - step


def compared_with_replay(folder: Path, scene: Scene, prompt: float) -> dict[str, str]:
    """A line of the table that compares a selector's served speed over plain decoding with the
    replayed one of the same prompts."""
    turns = answered(scene)
    plain = [answer.seconds for turn in turns[PLAIN] for answer in turn]
    replayed = 1.0  # where it is served without a drafter
    if drafts_with(folder, scene.temperature, scene.at_once):
        replayed = promised(folder, scene.at_once)
    # a server that answers several requests has a share of these seconds for each
    expected = with_prompt(replayed, prompt, statistics.fmean(plain) / scene.at_once)
    served = math.exp(statistics.fmean(log_ratios(turns[OURS], turns[PLAIN])))
    return {
        "at once": str(scene),
        "replayed": f"{replayed:.2f}",
        "with prompts": f"{expected:.2f}",
        "served": f"{served:.2f}",
        "served over it": f"{served / expected:.2f}",
    }


def write_ordinary_log(path: Path, asked: Sequence[Prompt]) -> None:
    """The responses of a server with vLLM's own draft model, which drafts as much in every step."""
    lines = []
    with server(PORT, draft_model(FIXED)) as address:
        for prompt in asked:
            response = respond(address, prompt, 0.0)
            lines.append({**response, "kind": prompt.kind, "source": prompt.source})
    with atomically(path) as partial:
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))


def draft_model(tokens: int) -> dict[str, Any]:
    """vLLM's own draft model with so many tokens a step."""
    model = draft_as_checkpoint()
    return {"method": "draft_model", "model": model, "num_speculative_tokens": tokens}


def methods_of(
    names: set[str], few: Sequence[Prompt], selectors: dict[tuple[str, float], Path], heat: float
) -> Methods:
    """The methods of these names at a temperature, with what `server` is given of each."""
    ngrams = [Method(drafter) for drafter in NGRAMS]
    ngram_of = made_once(FOLDER / f"ngram-{heat:g}.json", partial(tuned, ngrams, few, heat))
    suffix = [PYTHON, "-c", "import arctic_inference.suffix_decoding"]
    has_suffix = subprocess.run(suffix, capture_output=True).returncode == 0
    if not has_suffix:
        console.print(f"{SUFFIX} is left out: arctic-inference is not installed in .venv-vllm")
    methods: Methods = {}
    for at_once in AT_ONCE:
        methods[PLAIN, at_once] = Method()
        methods[NGRAM, at_once] = Method(ngram_of[str(at_once)])
        methods[TWIN, at_once] = Method(ngram_of[str(at_once)], alone=True)
        if has_suffix:
            methods[SUFFIX, at_once] = Method({"method": "suffix"}, alone=True)
        for (name, trained_at), folder in selectors.items():
            if trained_at == heat:
                methods[name, at_once] = deciding(name, folder, heat, at_once)
    if MODEL in names:
        models = [Method(draft_model(tokens), alone=True) for tokens in (2, 4)]
        model_of = made_once(FOLDER / "model.json", partial(tuned, models, few, 0.0))
        for at_once in AT_ONCE:
            methods[MODEL, at_once] = Method(model_of[str(at_once)], alone=True)
    return methods


def deciding(name: str, folder: Path, temperature: float, at_once: int) -> Method:
    """A selector's server for so many requests; one without a drafter where it says so."""
    if not drafts_with(folder, temperature, at_once):
        return Method()
    options = {"selector": str(folder), "temperature": temperature}
    if name != COPIES:
        options["draft"] = DRAFT
    return Method(custom(PROPOSER), {NAME: options})


def drafts_with(folder: Path, temperature: float, at_once: int) -> bool:
    """Whether a selector drafts anything for so many requests."""
    setting = load_selector(folder).at(temperature, batch=at_once, level=TEXT).setting
    return setting.decider != STATIC or setting.action != EMPTY


def main(asked: Sequence[str]) -> None:
    """All methods, or plain decoding, n-grams and those asked for."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings_are_accepted()
    training, held_out = prompts()
    drafter = CachedDrafter.load(DRAFT, SMOLLM2)
    names = {PLAIN, NGRAM, *(asked or ALL)}
    heats = [0.0, SAMPLED]
    selectors = trained(names, training, held_out, drafter, heats)
    few = training[:TUNING]
    methods = {heat: methods_of(names, few, selectors, heat) for heat in heats}
    for number in range(PASSES * PARTS):
        for at_once in AT_ONCE:
            answer_once(at_once, number, names, methods, held_out, training)
        show(table())
    if OURS not in names:
        return
    prompt = made_once(FOLDER / "prompt.json", partial(prompt_seconds, held_out))
    rows = []
    for scene in SCENES:
        if not scene.by_kind:
            rows.append(compared_with_replay(selectors[OURS, scene.temperature], scene, prompt))
    show(rows)
    folder = selectors[OURS, SAMPLED]
    options = {"selector": str(folder), "temperature": SAMPLED, "draft": DRAFT}
    always = {NAME: {**options, "way_out": False}}  # so that its decisions can be taken again
    with server(PORT, custom(PROPOSER), always) as address:
        answers = ask_all(address, held_out, 1, SAMPLED)
    selector = TextSelector(folder, SAMPLED, chains=drafter.chains, way_out=False)
    console.print(f"T = {SAMPLED}: {law(answers, selector)}")


def rounds_of() -> list[dict[str, Any]]:
    """What was answered so far."""
    file = FOLDER / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def answered(scene: Scene) -> dict[str, list[list[Answer]]]:
    """By method the answers of each round of a scene."""
    by_round: dict[str, dict[int, list[Answer]]] = {}
    for entry in rounds_of():
        if entry["scene"] == str(scene):
            answers = by_round.setdefault(entry["method"], {}).setdefault(entry["round"], [])
            answers += [Answer(*fields) for fields in entry["answers"]]
    return {method: list(rounds.values()) for method, rounds in by_round.items()}


def table() -> list[dict[str, str]]:
    """Its lines, of the rounds so far."""
    rows = []
    for scene in SCENES:
        turns = answered(scene)
        rows += [row(str(scene), name, turns, scene.at_once, NGRAM) for name in turns]
    return rows


def compared(
    scene: Scene,
    stations: dict[str, Station],
    number: int,
    held_out: Sequence[Prompt],
    training: Sequence[Prompt],
) -> list[dict[str, Any]]:
    """The answers of all methods to each group of prompts of a round, in random order."""
    entries = []
    order = random.Random(f"{scene} {number}")
    for group in scene.groups(held_out, number):
        others: list[Prompt] = []
        if scene.at_once > 1:
            kinds = {prompt.kind for prompt in group}
            alike = [prompt for prompt in training if prompt.kind in kinds or not scene.by_kind]
            others = [*alike, *training][: 3 * scene.at_once]
        for name in order.sample(list(stations), len(stations)):
            answers = stations[name].ask_all(group, scene.at_once, scene.temperature, others)
            entry = {"scene": str(scene), "round": number, "method": name, "answers": answers}
            entries.append(entry)
    return entries


def answer_once(
    at_once: int,
    number: int,
    names: set[str],
    methods: dict[float, Methods],
    held_out: Sequence[Prompt],
    training: Sequence[Prompt],
) -> None:
    """A round of the scenes with so many requests, with servers that start for it; nothing if it
    was answered before. SystemExit where only some of the methods have answered it."""
    scenes = [scene for scene in SCENES if scene.at_once == at_once]
    serve: dict[tuple[Scene, str], Method] = {}
    for scene in scenes:
        for name in scene.methods:
            method = methods[scene.temperature].get((name, at_once))
            if name in names and method is not None:
                serve[scene, name] = method
    before = {
        (entry["scene"], entry["method"]) for entry in rounds_of() if entry["round"] == number
    }
    asked = {(str(scene), name) for scene, name in serve}
    if asked <= before:
        return
    if asked & before:
        raise SystemExit(f"{FOLDER}/rounds.jsonl: its rounds are of fewer methods: move it away")
    with serving(serve, number) as stations:
        for station in stations.values():
            station.ask_all(training[:8], 8)
        entries = []
        for scene in scenes:
            of_scene = {name: station for (at, name), station in stations.items() if at == scene}
            entries += compared(scene, of_scene, number, held_out, training)
    with (FOLDER / "rounds.jsonl").open("a") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
