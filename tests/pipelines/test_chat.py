"""A chat-templated run from the data sets' files to the report (`python -m tests.pipelines.chat` runs all families)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from pipelines.evaluate import losslessness
from tests.pipelines.chat import FAMILIES, run


def sets(folder: Path) -> dict[str, Path]:
    """Small files of two schemas; half of the questions are too long."""
    lines = [line for line in Path(argparse.__file__).read_text().splitlines() if len(line) > 50][:400]
    math = [{"problem": line, "answer": "1", "unique_id": str(number)} for number, line in enumerate(lines[:60])]
    spec = [
        {"question_id": number, "category": kind, "turns": [line * (8 if number % 2 else 1), "Why?"]}
        for number, (line, kind) in enumerate(zip(lines[60:180], ["qa", "rag", "summarization"] * 40, strict=False))
    ]
    files = {"math500": folder / "math.jsonl", "spec_bench": folder / "spec.jsonl"}
    for path, records in zip(files.values(), (math, spec), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return files


FAMILY = "Gemma 3"  # of the three the one with most of its own: a sliding window, and a mark before the first turn


def test_from_data_sets_to_the_report(tmp_path: Path) -> None:
    few = ("verifiers=[traversal]", "train.verifier=traversal", "train.objectives=[regressor]", "data.texts=24")
    said = run(FAMILY, tmp_path, sets(tmp_path), "prompts.tokens=80", *few)
    assert "math500: 60 records" in said and "spec_bench: 120 records" in said and "are left out" in said
    prompts = [json.loads(line) for line in (tmp_path / "runs/chat/pair/prompts.jsonl").read_text().splitlines()]
    assert {prompt["kind"] for prompt in prompts} == {"math500", "qa", "rag", "summarization"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    turns = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": prompts[0]["text"]}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert whole.startswith(FAMILIES[FAMILY][2][0] + FAMILIES[FAMILY][2][1] + "system")
    assert max(len(tokenizer.encode(prompt["text"])) for prompt in prompts) < 80
    evaluation = json.loads((tmp_path / "runs/chat/evaluation.json").read_text())
    assert ", 0 differ" in losslessness.summary(evaluation["greedy"])
    assert {(row["temperature"], row["top_p"]) for row in evaluation["summary"]["by_setting"]} == {(0, 1), (0.7, 0.8)}
    assert (tmp_path / "runs/chat/report.html").stat().st_size > 10_000
