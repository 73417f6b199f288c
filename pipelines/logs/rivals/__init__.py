"""The rules of other projects on an engine's logs: when they copy, and how many tokens the drafter drafts.

Each rule is tuned on training texts and replayed on held-out ones, exactly and with the selector's step times
(`selector.train.replay`). Constants that a project publishes stay; all others are tuned for each latency profile. The
time of a rule's decisions is not counted. Every rule copies from the longest earlier match, whichever one the project
itself would take.

Rules that learn from their own steps are walked through each text by itself: at each root they know what their earlier
steps in that text had accepted, and nothing else. They need labels of 0 and 1, with which the end of a step is certain.

Where constants were read:

    SAM-Decoding    scripts/run_ablation_0.sh of hyx1999/SAM-Decoding at 5d42249, and samd/draft.py at 0be73fd
    TensorRT-LLM    `SAEnhancerConfig` in its API reference, 1.3.0rc27; sa_enhancer.py at 1a487b3
    ArcticInference docs/suffix-decoding.rst at 4eb0d8e, csrc/suffix_decoding/suffix_tree.cc at 0a11e6a, the comparison
                    with the drafter's length in arctic_inference/vllm/model_runner.py at 008df6b
    SGLang          python/sglang/srt/speculative/adaptive_spec_params.py at 015c872
    BanditSpec      generate_utils.py of sail-sg/BanditSpec at a30f56d
"""

from __future__ import annotations

from pipelines.logs.rivals.adaptive import bandit, sglang_adaptive, vllm_estimator
from pipelines.logs.rivals.copying import (
    arctic_inference,
    best_rule,
    hybrid_verified_decoding,
    n_gram_first,
    sam_decoding,
    tensorrt_llm,
)
from pipelines.logs.rivals.rules import Rival, RivalTexts, Sequential
from selector.train.data import Timed
from selector.train.replay import Replayed

__all__ = ["rivals", "tuned_rivals"]


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
    sam, tensorrt = sam_decoding(train), tensorrt_llm(train)
    n_gram = n_gram_first(train, [sam, tensorrt])
    found: dict[str, Rival] = {
        "n-gram first": n_gram,
        "SAM-Decoding": sam,
        "TensorRT-LLM suffix automaton": tensorrt,
        "the rule at its best": best_rule(train, n_gram),
        "ArcticInference": arctic_inference(train),
        "HVD": hybrid_verified_decoding(train),
    }
    if train.certain:
        found["SGLang adaptive"] = sglang_adaptive(train)
        found["vLLM acceptance estimator"] = vllm_estimator(train)
        found["bandit"] = bandit(train)
    return found
