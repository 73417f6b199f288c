"""What a log of an engine's own steps is worth, measured with a log that knows all positions.

    .venv/bin/python docs/examples/logs/sparse.py --timings h100.csv cnn.jsonl gsm8k.jsonl

The logs say of every position how many tokens of a draft that begins there are accepted
(docs/logs.md). Of each text those steps are kept that an engine would have made, with one length,
or lengths that it chose. `espalier logs` is run on what is left, and says what the selector gains.
What it truly gains comes from replay of the same held-out texts by the whole logs.

Columns: the speed of the selector over the lookup rule, as claimed with one error and as it is; its
true speed over plain decoding; and the share that it has of what a selector of the whole logs gains
over their lookup rule. Further arguments (`train.epochs=4`) are those of `espalier logs`.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from data_gen.texts.log_labels import VERIFIER
from data_gen.texts.logs import LoggedText, drafter_of, read_all
from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces, samplings_of, timed
from pipelines.evaluate.gains import LEVELS, measured, selector_at
from pipelines.evaluate.methods import COPYING, PLAIN
from pipelines.evaluate.table import ALL, Figure, Table
from pipelines.evaluate.verdict import Evaluation
from pipelines.latency.stage import load_profile
from pipelines.train.result import load_module, load_result
from selector.sampling import Sampling

WHOLE = "whole"
LONGEST = 5
Draw = Callable[[int], int]  # the length of a step, after what the last one had accepted


def fixed(length: int) -> Draw:
    return lambda _: length


def one_in_ten() -> Draw:
    """A fixed length, and any up to it in one step of ten."""
    return lambda _: random.randint(1, LONGEST) if random.random() < 0.1 else LONGEST


def by_batch_size() -> Draw:
    """A table of lengths by the number of requests, as for vLLM: that changes every 30 steps."""
    length = LONGEST

    def draw(_: int) -> int:
        nonlocal length
        if random.random() < 1 / 30:
            length = random.choice((LONGEST, 3, 1))
        return length

    return draw


def adaptive() -> Draw:
    """One token more than lately accepted, as SGLang's adaptive steps."""
    mean = 2.0

    def draw(accepted: int) -> int:
        nonlocal mean
        mean = 0.8 * mean + 0.2 * accepted
        return max(1, min(LONGEST, round(mean) + 1))

    return draw


ENGINES: dict[str, Callable[[], Draw]] = {
    "always 1": lambda: fixed(1),
    "always 2": lambda: fixed(2),
    "always 3": lambda: fixed(3),
    "always 5": lambda: fixed(5),
    "always 8": lambda: fixed(8),
    "by batch size": by_batch_size,
    "adaptive": adaptive,
    "5, one in ten": one_in_ten,
}


def steps_of(text: LoggedText, drafter: str, draw: Draw) -> list[list[int]]:
    """The steps of an engine, which begin after the first token."""
    accepted_R = text.of(drafter).sum(1).astype(int).tolist()
    steps: list[list[int]] = []
    position = 1
    accepted = 0
    while position < text.roots:
        length = draw(accepted)
        accepted = min(accepted_R[position], length)
        steps.append([position, length, accepted])
        position += accepted + 1
    return steps


def write(path: Path, texts: list[LoggedText], drafter: str, engine: str) -> None:
    with path.open("w") as log:
        for text in texts:
            entry: dict[str, object] = {"accepted": text.of(drafter).sum(1).astype(int).tolist()}
            if engine != WHOLE:
                entry = {"steps": steps_of(text, drafter, ENGINES[engine]())}
            line = {
                "id": text.origin,
                "source": text.source,
                "kind": text.kind,
                "prompt_token_ids": text.tokens[: text.start],
                "generated_token_ids": text.tokens[text.start : text.start + text.roots],
                "drafters": {drafter: entry},
            }
            log.write(json.dumps(line) + "\n")


def truth(config: Config, texts: list[LoggedText], drafter: str) -> Table:
    """The figures of a run's selector on its held-out texts by labels of all positions."""
    result, profile, data = load_result(config), load_profile(config), load_traces(config)
    module = load_module(config, result)
    test = data["test"]
    survivals_of = {text.origin: text.of(drafter) for text in texts}
    survivals_RD = torch.zeros(len(test.length_R), test.space.depth)
    begin = 0
    for name, size in zip(test.prompt_X, test.size_X.tolist(), strict=True):
        known_RD = torch.from_numpy(survivals_of[name][:size, : test.space.depth])
        survivals_RD[begin : begin + size, : known_RD.shape[1]] = known_RD
        begin += size
    test = replace(test, survivals={VERIFIER: survivals_RD.half()})
    predicted = {level: module.scores(test, level) for level in LEVELS}
    figures: list[Figure] = []
    for batch in sorted({case.setting.batch for case in result.best.cases}):
        cases = {
            case.setting.level: case for case in result.best.cases if case.setting.batch == batch
        }
        case = timed(test, samplings_of(config)[0], VERIFIER, profile, batch)
        figures += measured(cases, case, predicted, profile)
    return Table(figures)


def rows(engine: str, claimed: Table, true: Table, whole: Table) -> Iterator[str]:
    for figure in claimed.select(rival=COPYING, kind=ALL):
        columns = {name: getattr(figure, name) for name in ("setting", "batch", "is_mixed")}
        cells = {**columns, "method": figure.method}
        is_tuned = figure.batch == 1 or figure.is_mixed
        if not is_tuned or figure.method not in map(selector_at, LEVELS):
            continue
        for kind in claimed.kinds(**columns):
            says = claimed.of(**cells, kind=kind, rival=COPYING)
            over_rule = true.of(**cells, kind=kind, rival=COPYING)
            speed = true.of(**cells, kind=kind, rival=PLAIN).value
            best = whole.of(**cells, kind=kind, rival=PLAIN).value
            rule = whole.of(**{**cells, "method": COPYING}, kind=kind, rival=PLAIN).value
            share = (speed - rule) / (best - rule) if best != rule else float("nan")
            is_held = abs(over_rule.value - says.value) <= 2 * says.ratio.error
            yield (
                f"{engine} | {figure.batch} | {figure.method} | {kind} | {says.text(3)} | "
                f"{over_rule.value:.3f} | {speed:.3f} | {share:.2f} | {is_held}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="LOG... [SECTION.KEY=VALUE]...")
    parser.add_argument("--timings", required=True)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    asked = parser.parse_args()
    logs = [Path(word) for word in asked.words if "=" not in word]
    settings = [word for word in asked.words if "=" in word]
    texts = read_all(logs, [], Sampling(0.0)).texts
    drafter = drafter_of(texts, None)
    folder = Path("runs/sparse")
    folder.mkdir(parents=True, exist_ok=True)
    print("engine | requests | selector | texts | claimed | true | over plain | share | held")
    tables: dict[str, Table] = {}
    for engine in [WHOLE, *asked.engines]:
        random.seed(0)
        name = "sparse-" + engine.replace(" ", "-").replace(",", "")
        path = folder / f"{name}.jsonl"
        write(path, texts, drafter, engine)
        words = [f"logs.files=['{path}']", f"latency.timings={asked.timings}", f"name={name}"]
        command = [sys.executable, "-m", "pipelines", "logs", *words, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        config = load_config(None, [*words, *settings], logs=True)
        tables[engine] = truth(config, texts, drafter)
        claimed = Evaluation.read(config).table
        print(*rows(engine, claimed, tables[engine], tables[WHOLE]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
