"""Decode inside transformers' `generate()`: plainly, with a fixed draft, and with a selector.

    make demo        # trains the selector; without it the other ways are compared
    .venv/bin/python docs/examples/generate.py

The first answer repeats what is in the request, and the second one does not. A copy drafts what
followed the longest earlier match of the text's end, and a chain is drafted by the draft model.
"""

import time
from pathlib import Path
from typing import Any

from data_gen import ModelPair, speculative_generate

SELECTOR = Path("runs/demo/selector")
REQUESTS = (
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "Write a short story about a lighthouse.",
)
pair = ModelPair.load("smollm2", "pipelines/pair/shipped/draft", device="cpu")
target: Any = pair.target
speculative = {"custom_generate": speculative_generate, "draft_model": pair.draft}
ways: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain of 2": {**speculative, "selector": (1, 2, 0)},
    "copy of 8": {**speculative, "selector": (1, 8, 0, "copy")},
}
if SELECTOR.exists():
    ways["selector"] = {**speculative, "selector": SELECTOR}

for request in REQUESTS:
    turn = {"role": "user", "content": request}
    inputs: Any = pair.tokenizer.apply_chat_template(
        [turn], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    prompt_length = inputs["input_ids"].shape[1]
    print(request)
    for name, way in ways.items():
        settings = {**inputs, **way, "do_sample": False, "return_dict_in_generate": True}
        target.generate(**settings, max_new_tokens=4)  # to warm up
        start = time.perf_counter()
        output = target.generate(**settings, max_new_tokens=30)
        seconds = time.perf_counter() - start
        new_tokens = output.sequences[0, prompt_length:]
        steps = len(output.get("accepted", new_tokens))  # passes of the target
        speed = f"{len(new_tokens) / seconds:5.1f} tokens/s"
        print(f"  {name:10}: {len(new_tokens)} tokens in {steps} steps, {speed}")
    print(pair.tokenizer.decode(new_tokens, skip_special_tokens=True), "\n")

# It prints:
#
#     Repeat this line three times: the quick brown fox jumps over the lazy dog.
#       plain     : 10 tokens in 10 steps, ... tokens/s
#       chain of 2: 10 tokens in 9 steps, ... tokens/s
#       copy of 8 : 10 tokens in 4 steps, ... tokens/s
#     The quick brown fox jumps over lazy dog.
#
#     Write a short story about a lighthouse.
#       plain     : 30 tokens in 30 steps, ... tokens/s
#       chain of 2: 30 tokens in 21 steps, ... tokens/s
#       copy of 8 : 30 tokens in 29 steps, ... tokens/s
#     The sun had set on a stormy night, and the lighthouses of the world stood as a testament to
#     the resilience of the human spirit. In
