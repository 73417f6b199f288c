"""The loop with a real engine (`make engine-vllm`): vLLM on the CPU serves SmolLM2, its log and its
step times train selectors, and these decide inside it.

Methods are compared in companies of a few servers, which answer some held-out prompts each in
random order: a machine may be a third faster an hour later. Servers start anew for every round,
since two that do the same may differ by some percent as long as they run; a round has a third of
the prompts, and intervals are over rounds. Six servers would fill the memory. Every part is kept in
`runs/vllm/`, and the same command goes on there.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_gen.engines.drafter import CachedDrafter
from data_gen.engines.text import NAME, TextSelector
from data_gen.models.gguf import SMOLLM2, resolved
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling, probabilities
from data_gen.texts.prompts import Prompt
from pipelines.config import SHIPPED
from pipelines.run import console
from tests.engines.loop import (
    PLAIN,
    TUNING,
    WRONG,
    Answer,
    kept,
    prompts,
    row,
    show,
    train,
    write_log,
)
from tests.engines.vllm_server import FOLDER, PYTHON, SERVER, ask_all, custom, server

FEW = [(0.25, 0), (0.5, 0)]  # as `WRONG`, where only some of several requests draft
# new tokens of an answer that times steps; how often; drafted tokens
PORT, TIMED, TIMES, LONGEST = 8711, 24, 4, 20
DRAFT, SAMPLED, SGLANG = str(SHIPPED.absolute()), 0.7, Path(".venv-vllm/sglang")
NGRAMS = [
    {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": n}
    for n in (2, 4, 8)
]
NGRAM, SUFFIX, MODEL, COPIES, OURS = (
    "n-gram, tuned",
    "suffix decoding",
    "draft model, tuned",
    "copies",
    "selector",
)
TWIN = "n-gram, a second server"  # says how far apart two servers are that do the same
COMPANIES = (PLAIN, NGRAM, COPIES, OURS), (PLAIN, NGRAM, SUFFIX, MODEL), (PLAIN, NGRAM, TWIN)
PARTS = 3  # of the held-out prompts, a part in each round


class Scene(NamedTuple):
    temperature: float
    at_once: int
    by_kind: bool = False  # requests of one kind at a time
    methods: tuple[str, ...] = (PLAIN, NGRAM, OURS)

    def __str__(self) -> str:
        return f"{self.at_once}{', by kind' * self.by_kind}, T = {self.temperature:g}"

    def groups(self, held_out: Sequence[Prompt], again: int) -> list[list[Prompt]]:
        """The prompts of a round that a method answers before the next one has its turn."""
        size, kinds = 2 if self.at_once == 1 else 16, sorted({each.kind for each in held_out})
        found = [list(held_out[begin : begin + size]) for begin in range(0, len(held_out), size)]
        if self.by_kind:
            found = [[own for own in held_out if own.kind == kind] for kind in kinds]
        return found[again % PARTS :: PARTS]


WIDE = PLAIN, NGRAM, MODEL, COPIES, OURS
# suffix decoding knows texts that it has answered
SCENES = [Scene(0.0, 1, methods=(*WIDE, SUFFIX))]
SCENES += [
    Scene(0.0, 4, methods=COMPANIES[0]),
    Scene(0.0, 8, methods=(*WIDE, TWIN)),
    Scene(0.0, 8, True),
]
SCENES += [Scene(SAMPLED, 1), Scene(SAMPLED, 8)]


def step_times(asked: Sequence[Prompt], heat: float) -> pd.DataFrame:
    """Seconds of a step by requests, mean verified tokens and draft passes: how much longer longer
    answers take."""
    rows, file, most = [], FOLDER / "wrong.txt", 2 * max(count for count, _ in WRONG)
    file.write_text("0 0")
    with server(PORT, custom("tests.engines.wrong.WrongTokens", most), {"draft": DRAFT}) as address:
        ask_all(address, asked[:2], 2, heat)
        for _, batch, (count, passes) in product(range(TIMES), (1, 4, 8), [*WRONG, *FEW]):
            if batch == 1 and count % 1:
                continue
            file.write_text(f"{count} {passes}")
            size = asked[:batch], batch, heat
            turns = [
                ask_all(address, *size, tokens=tokens, to_the_end=True) for tokens in (4, 4 + TIMED)
            ]
            short, long = (max(each.seconds for each in turn) for turn in turns)
            seconds = (long - short) / TIMED  # the prompts' passes are in both
            rows.append(
                {
                    "batch": batch,
                    "context": 100,
                    "verified": count + 1,
                    "passes": passes,
                    "seconds": seconds,
                }
            )
    columns = list(rows[0])
    return pd.DataFrame(rows).groupby(columns[:-1], as_index=False)["seconds"].median()


def tuned(
    drafters: Sequence[dict[str, Any]], asked: Sequence[Prompt], heat: float
) -> dict[str, Any]:
    """The drafter with which vLLM answers one request at a time most quickly."""
    found = []
    for own in drafters:
        with server(PORT, own) as address:
            ask_all(address, asked[:1], 1)
            found.append(sum(each.seconds for each in ask_all(address, asked, 1, heat)))
    return drafters[found.index(min(found))]


def draft_as_checkpoint() -> str:
    """The draft that comes with Espalier, with the target's tables; tokens that it cannot say have
    the logit 0."""
    folder = FOLDER / "draft"
    if not folder.exists():
        pair = ModelPair.load(SMOLLM2, DRAFT, "cpu")
        head, draft = pair.draft.get_output_embeddings(), pair.draft
        whole = AutoModelForCausalLM.from_config(draft.config)
        table_VD = torch.zeros_like(whole.get_output_embeddings().weight)
        table_VD[head.said_R] = head.weight.detach()
        whole.load_state_dict({**draft.state_dict(), "lm_head.weight": table_VD}, strict=False)
        whole.save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolved(SMOLLM2, "target")).save_pretrained(folder)
    return str(folder.absolute())


def law(answers: Sequence[Answer], selector: TextSelector) -> str:
    """How many drafted tokens the engine accepted in sampled texts of one request at a time, and
    how many the target's probabilities say. The drafts are the selector's, which decides again
    along each text."""
    target, sampling = ModelPair.load(SMOLLM2, DRAFT, "cpu").target, Sampling(SAMPLED, 1.0)
    drafted = accepted = expected = variance = 0.0
    for own in answers:
        end, steps, known = (
            1,
            iter(own.steps),
            selector.text([*own.prompt, own.tokens[0]], len(own.prompt)),
        )
        cached = CachedModel(target)
        cached.fill(own.prompt)
        while end < len(own.tokens):
            (draft,) = selector.drafts([known], [LONGEST])
            fed, count = [own.tokens[end - 1], *draft[:-1]], 0
            causal = torch.ones(len(fed), len(fed), dtype=torch.bool).tril_()
            passed = cached.forward(torch.tensor(fed), torch.arange(len(fed)), causal)
            cached.keep([0])
            if draft:
                said, count = next(steps)
                assert said == len(draft), "the selector decides as in the engine"
                probs_NV = probabilities(passed.logits_WV, sampling)
                # P(accepted >= n)
                survivals_N = probs_NV[torch.arange(len(draft)), draft].double().cumprod(0)
                mean, square = (
                    survivals_N.sum(),
                    (2 * torch.arange(len(draft)).double() + 1) @ survivals_N,
                )
                drafted, accepted = drafted + len(draft), accepted + count
                expected, variance = expected + float(mean), variance + float(square - mean**2)
            known.committed(own.tokens[end : end + count + 1])
            cached.fill(own.tokens[end : end + count])
            end += count + 1
    z = (accepted - expected) / math.sqrt(variance)
    return (
        f"T = {SAMPLED}: {drafted:.0f} tokens drafted, {accepted:.0f} accepted, {expected:.1f} "
        f"expected, z = {z:+.2f}"
    )


def settings_are_accepted() -> None:
    """By the engines' own checks; CalledProcessError where they are not."""
    for name, more in (("vllm", ""), ("sglang", f":{SGLANG}")):
        if name == "sglang" and not SGLANG.exists():
            console.print(f"{SGLANG} does not exist: SGLang does not check its settings")
            continue
        environment = {
            **os.environ,
            **SERVER,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONPATH": f"{Path.cwd()}{more}",
        }
        command = [
            PYTHON,
            "-m",
            "tests.engines.arguments",
            name,
            resolved(SMOLLM2, "target"),
            DRAFT,
        ]
        subprocess.run(command, env=environment, check=True)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings_are_accepted()
    training, held_out = prompts()
    raw = {heat: FOLDER / f"answers-{heat:g}.json" for heat in (0.0, SAMPLED)}
    if not all(path.exists() for path in raw.values()):
        with server(PORT, NGRAMS[0]) as address:
            for heat, path in raw.items():
                path.write_text(json.dumps(ask_all(address, training, 8, heat)))
    timings = {heat: FOLDER / f"timings-{heat:g}.csv" for heat in raw}
    for heat, path in timings.items():
        if not path.exists():
            step_times(training, heat).to_csv(path, index=False)
        console.print(path.read_text())
    drafter, logs = (
        CachedDrafter.load(DRAFT, SMOLLM2),
        {heat: FOLDER / f"log-{heat:g}.jsonl" for heat in raw},
    )
    for heat, path in raw.items():
        if not logs[heat].exists():
            write_log(logs[heat], [Answer(*each) for each in json.loads(path.read_text())], drafter)
    copies = train(logs[0.0], timings[0.0], "vllm-copies", "logs.drafter=none")
    both = dict[float, Path]()
    for heat, log in logs.items():
        both[heat] = train(
            log, timings[heat], f"vllm-{heat:g}", f"sampling=[{{temperature: {heat}}}]"
        )
    checkpoint = {"method": "draft_model", "model": draft_as_checkpoint()}
    models = [{**checkpoint, "num_speculative_tokens": n} for n in (2, 4)]
    methods: dict[str, tuple[Any, ...]] = {PLAIN: (None,)}
    if not subprocess.run(
        [PYTHON, "-c", "import arctic_inference.suffix_decoding"], capture_output=True
    ).returncode:
        methods[SUFFIX] = ({"method": "suffix"},)
    else:
        console.print(
            "suffix decoding is left out: arctic-inference is not installed in .venv-vllm"
        )
    few = training[:TUNING]
    methods[MODEL] = (kept(FOLDER / "model.json", lambda: tuned(models, few, 0.0)),)
    proposer = custom("data_gen.engines.vllm.Proposer", LONGEST)
    methods[COPIES] = proposer, {NAME: {"selector": str(copies), "temperature": 0.0}}
    for company in COMPANIES:
        cells: list[Any] = []
        for heat in logs:
            ngram = kept(FOLDER / f"ngram-{heat:g}.json", partial(tuned, NGRAMS, few, heat))
            methods |= {NGRAM: (ngram,), TWIN: (ngram,)}
            methods[OURS] = (
                proposer,
                {NAME: {"selector": str(both[heat]), "temperature": heat, "draft": DRAFT}},
            )
            scenes = [scene for scene in SCENES if scene.temperature == heat]
            cells += measured(scenes, company, methods, held_out, training)
        show(cells)
    sampled = [*chain(*answered(Scene(SAMPLED, 1), COMPANIES[0])[OURS])]
    console.print(law(sampled, TextSelector(both[SAMPLED], SAMPLED, chains=drafter.chains)))


def rounds_of() -> list[dict[str, Any]]:
    file = FOLDER / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def answered(scene: Scene, company: Sequence[str]) -> dict[str, list[list[Answer]]]:
    """By method the answers of each round of a scene in this company."""
    found: dict[str, dict[int, list[Answer]]] = {}
    for each in rounds_of():
        if (each["scene"], each["company"]) == (str(scene), list(company)):
            own = found.setdefault(each["method"], {}).setdefault(each["round"], [])
            own += [Answer(*answer) for answer in each["answers"]]
    return {name: list(rounds.values()) for name, rounds in found.items()}


def compared(
    scene: Scene,
    addresses: dict[str, str],
    again: int,
    held_out: Sequence[Prompt],
    training: Sequence[Prompt],
) -> list[dict[str, Any]]:
    """The answers of all methods to each group of prompts, in random order."""
    found, order = [], random.Random(f"{scene} {again}")
    for group in scene.groups(held_out, again):
        kinds = {each.kind for each in group}
        alike = [each for each in training if each.kind in kinds] if scene.by_kind else training
        others = [*alike, *training][: 3 * scene.at_once * (scene.at_once > 1)]
        for name in order.sample(list(addresses), len(addresses)):
            answers = ask_all(addresses[name], group, scene.at_once, scene.temperature, others)
            found.append({"scene": str(scene), "round": again, "method": name, "answers": answers})
    return found


def measured(
    scenes: Sequence[Scene],
    company: Sequence[str],
    methods: dict[str, tuple[Any, ...]],
    held_out: Sequence[Prompt],
    training: Sequence[Prompt],
) -> list[Any]:
    """The lines of the table, once a company has answered all scenes that compare two drafters or
    more: every prompt twice of greedy requests to the first company, else once."""
    own = {
        scene: [name for name in company if name in scene.methods and name in methods]
        for scene in scenes
    }
    own = {scene: names for scene, names in own.items() if names[2:]}
    times = 2 if company == COMPANIES[0] and scenes[0].temperature == 0 else 1
    for again in range(times * PARTS):
        done = {(each["scene"], each["round"], *each["company"]) for each in rounds_of()}
        todo = [scene for scene in own if (str(scene), again, *company) not in done]
        names = sorted({name for scene in todo for name in own[scene]})
        with ExitStack() as stack, ThreadPoolExecutor(2) as starting:
            order = random.Random(again).sample(names, len(names))
            begun = starting.map(
                stack.enter_context, [server(PORT + n, *methods[x]) for n, x in enumerate(order)]
            )
            at = dict(zip(order, begun, strict=True))
            for address in at.values():
                ask_all(address, training[:24], 8)
            for scene in todo:
                found = compared(
                    scene, {name: at[name] for name in own[scene]}, again, held_out, training
                )
                with (FOLDER / "rounds.jsonl").open("a") as file:
                    file.writelines(
                        json.dumps({"company": company, **each}) + "\n" for each in found
                    )
    told = {scene: answered(scene, company) for scene in own}
    return [
        row(str(scene), name, turns, scene.at_once, NGRAM)
        for scene, turns in told.items()
        for name in turns
    ]


if __name__ == "__main__":
    main()
