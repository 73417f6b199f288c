"""Small logs of an engine: texts that repeat themselves, and a drafter that does better after some
tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

EASY = 7  # after tokens below this one the drafter is right more often
STEP_TIMES = "batch,context,verified,passes,seconds\n" + "".join(
    f"{batch},{context},{verified},{passes},"
    f"{0.007 + 2e-5 * batch * verified + 4e-8 * batch * context + 4e-4 * passes}\n"
    for batch in (1, 8, 32)
    for context in (16, 512)
    for verified in (1, 21)
    for passes in (0, 4)
)


def record(number: int, tokens: int = 60, kind: str = "prose") -> dict[str, Any]:
    """One text: phrases of a few, and what the drafter would have had accepted at each position."""
    random_ = random.Random(f"{number} {kind}")
    phrases = [[random_.randrange(40) for _ in range(random_.randrange(3, 9))] for _ in range(5)]
    text: list[int] = []
    while len(text) < tokens + 12:
        text += random_.choice(phrases)
    prompt, generated = text[:12], text[12 : 12 + tokens]
    accepted = []
    for at in range(tokens):
        likely = 0.85 if (prompt + generated)[11 + at] < EASY else 0.5
        run = 0
        while run < 8 and random_.random() < likely:
            run += 1
        accepted.append(run)
    return {
        "id": f"{kind} {number}",
        "kind": kind,
        "prompt_token_ids": prompt,
        "generated_token_ids": generated,
        "drafters": {"head": {"accepted": accepted}},
    }


def as_steps(entry: dict[str, Any], drafted: int = 3) -> dict[str, Any]:
    """The same text as an engine logs it that drafted so many tokens at every step."""
    accepted, steps, at = entry["drafters"]["head"]["accepted"], [], 0
    while at < len(accepted):
        steps.append([at, drafted, min(accepted[at], drafted)])
        at += steps[-1][2] + 1
    return {**entry, "drafters": {"head": {"steps": steps}}}


def write(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def recorded(steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """What a plug-in records of a server with up to nine requests, on a noisy machine: a tenth of
    the steps hang."""
    chance = random.Random(seed)
    lines = []
    for _ in range(steps):
        batch, passes = chance.randint(1, 9), 0
        verified = 1.0
        if chance.random() < 0.7:
            length = chance.randint(1, 8)
            drafting = chance.randint(1, batch)
            verified += length * drafting / batch
            passes = chance.choice([0, length])
        context = chance.randint(100, 900)
        seconds = seconds_of(batch, context, verified, passes) * chance.gauss(1.0, 0.05)
        if chance.random() < 0.1:
            seconds *= chance.uniform(1.5, 5.0)
        step = {"batch": batch, "context": context, "verified": verified, "passes": passes}
        lines.append({**step, "tokens": batch, "seconds": seconds})
    return lines


def seconds_of(batch: int, context: float, verified: float, passes: int) -> float:
    drafting = (passes > 0) * 1e-3 + passes * (1e-3 + 1e-4 * batch)
    return 0.020 + 2e-6 * batch * context + 1e-3 * batch * verified + drafting


def small(folder: Path, count: int = 40) -> tuple[Path, Path]:
    """A log of two kinds of work, and step times."""
    entries = [
        {**record(n, kind="prose" if n % 2 else "code"), "arrived": 0.1 * n} for n in range(count)
    ]
    log = write(folder / "small.jsonl", entries)
    timings = folder / "clock.csv"
    timings.write_text(STEP_TIMES)
    return log, timings
