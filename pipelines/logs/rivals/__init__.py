"""The rules of other projects on an engine's logs: when they copy, and how many tokens the drafter drafts.

Each rule is tuned on training texts and replayed on held-out ones, exactly and with the selector's step times; the time
of its decisions is not counted. Constants that a project publishes stay; all others are tuned for each latency profile.
Every rule copies from the longest earlier match, whichever one the project itself would take.
"""

from __future__ import annotations

from pipelines.logs.rivals import adaptive, copying
from pipelines.logs.rivals.rules import Rival, RivalTexts, Sequential
from selector.train.data import Timed
from selector.train.replay import Replayed


def rivals(train: Timed, test: Timed) -> dict[str, Replayed]:
    """Every rule, tuned on training texts and replayed on held-out ones, by its project.

    Rules that learn from their own steps are left out unless all labels of both are 0 or 1.
    """
    held_out = RivalTexts(test)
    return {
        name: held_out.replayed(rule)
        for name, rule in tuned_rivals(RivalTexts(train)).items()
        if held_out.certain or not isinstance(rule, Sequential)
    }


def tuned_rivals(train: RivalTexts) -> dict[str, Rival]:
    """Every rule with the parameters that are the fastest on some texts."""
    sam, tensorrt = copying.sam_decoding(train), copying.tensorrt_llm(train)
    n_gram = copying.n_gram_first(train, [sam, tensorrt])
    found: dict[str, Rival] = {
        "n-gram first": n_gram,
        "SAM-Decoding": sam,
        "TensorRT-LLM suffix automaton": tensorrt,
        "the lookup rule with all options": copying.best_rule(train, n_gram),
        "ArcticInference": copying.arctic_inference(train),
        "HVD": copying.hybrid_verified_decoding(train),
    }
    if train.certain:
        found["SGLang adaptive"] = adaptive.sglang_adaptive(train)
        found["vLLM acceptance estimator"] = adaptive.vllm_estimator(train)
        found["bandit"] = adaptive.bandit(train)
    return found
