"""Replay an engine's log, and read what a selector would gain. No model is needed.

    .venv/bin/python docs/examples/replay_a_log.py

Here the log is made up: texts in which the same phrases recur, and a drafter that is right more
often at the beginning of a phrase. `accepted` says, for each position of a text, how many drafted
tokens a step there would have had accepted. The step times are those of a made-up machine, too.
"""

import json
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

random.seed(0)
PHRASES = [random.choices(range(1000), k=6) for _ in range(20)]
runs = Path("runs")
runs.mkdir(exist_ok=True)

with (runs / "example.jsonl").open("w") as log:
    for number in range(200):
        prompt = random.choices(range(1000), k=8)
        generated: list[int] = []
        accepted: list[int] = []
        for _ in range(12):
            generated += random.choice(PHRASES)
            accepted += [random.randint(0, left) for left in (6, 5, 4, 3, 2, 1)]
        line = {
            "source": f"user {number}",  # the texts of one user are all held out, or none is
            "prompt_token_ids": prompt,
            "generated_token_ids": generated,
            "drafters": {"head": {"accepted": accepted}},
        }
        log.write(json.dumps(line) + "\n")

with (runs / "example.csv").open("w") as times:
    times.write("batch,context,verified,passes,seconds\n")
    for batch, context, verified, passes in product((1, 8), (16, 512), (1, 21), (0, 4)):
        seconds = 0.07 + 2e-4 * batch * verified + 4e-7 * batch * context + 4e-3 * passes
        times.write(f"{batch},{context},{verified},{passes},{seconds}\n")

command = "logs runs/example.jsonl --timings runs/example.csv --name example train.epochs=10"
subprocess.run([sys.executable, "-m", "pipelines", *command.split()], check=True)

print("\nreplayed speeds on the held-out texts, over plain decoding:")
evaluation = json.loads(Path("runs/example/evaluation.json").read_text())
for entry in evaluation["logs"]["by_batch"]:
    if entry["level"] == "text":  # the selector sees token ids alone
        requests = f"{entry['batch']} {'different' if entry['mixed'] else 'equal'} request(s)"
        lengths = f"one length for all {entry['fixed']:.2f}, lookup rule {entry['rule']:.2f}"
        print(f"{requests}: {lengths}, selector {entry['selector']:.2f}")

# Where no network is surely ahead of the rule, its decisions charged, the selector is the rule.
# With one request it has 2.59 where a decision takes 0.15 ms.
#
# It prints:
#
#     ...
#     replayed speeds on the held-out texts, over plain decoding:
#     1 equal request(s): one length for all 2.23, lookup rule 2.48, selector 2...
#     8 equal request(s): one length for all 2.09, lookup rule 2.30, selector 2...
#     8 different request(s): one length for all 2.09, lookup rule 2.22, selector 2...
