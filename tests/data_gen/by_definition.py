"""Features by their meanings in the schema: searched for in the whole text at every root, not
counted along it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from data_gen.drafting.lookup import LookupIndex
from selector.schema import (
    AFTER_MATCH_LENGTHS,
    DECAYS,
    LONGEST_LOOKUP,
    LONGEST_MATCH,
    MOST_SEEN,
    PRECEDENT_LENGTHS,
)


def longest_match(tokens: list[int]) -> int:
    """Length of the longest end of the tokens that stands in them before, by trying one after the
    other."""
    return next(length for length in range(len(tokens) + 1) if not earlier_ends(tokens, length + 1))


def earlier_ends(tokens: list[int], length: int) -> list[int]:
    """Positions after the earlier places where the last `length` tokens stand."""
    end = tokens[len(tokens) - length :]
    return [i + length for i in range(len(tokens) - length) if tokens[i : i + length] == end]


def in_common(one: Sequence[float], other: Sequence[float]) -> int:
    """How many first elements two lists have in common."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def in_a_row(values: Sequence[float]) -> int:
    return in_common(values, [1.0] * len(values))


def continued(tokens: list[int], match_end: int) -> list[int]:
    """What a lookup copies from a place; it may run on into its own copy."""
    whole = list(tokens)
    for n in range(LONGEST_LOOKUP if match_end >= 0 else 0):
        whole.append(whole[match_end + 1 + n])
    return whole[len(tokens) :]


def weighted(values: Sequence[float], decay: float) -> tuple[float, float]:
    """Their sum and the sum of their weights, each of which is `decay` of the next one's."""
    weights = [decay**age for age in range(len(values))][::-1]
    return sum(w * v for w, v in zip(weights, values, strict=True)), sum(weights)


def running(name: str, values: Sequence[float]) -> dict[str, float]:
    sums = {decay: weighted(values, decay) for decay in DECAYS}
    return {
        f"{name}_mean_{decay:g}": total / weight if weight else 0.0
        for decay, (total, weight) in sums.items()
    }


def of_text(tokens: list[int], prompt: int) -> dict[str, float]:
    """What token ids alone say at the last token of a text whose first `prompt` tokens are its
    prompt."""
    index, predicted = LookupIndex(), []
    for token in tokens:
        predicted.append(float(index.proposal(1) == [token]))
        index.extend([token])
    match_ends, matches = (
        index.match_ends,
        [longest_match(tokens[: n + 1]) for n in range(len(tokens))],
    )
    match_end, proposal = match_ends[-1], continued(tokens, match_ends[-1])
    there = predicted[match_end + 1 :] if match_end >= 0 else []
    second = match_ends[match_end] if match_end >= 0 else -1
    third = match_ends[second] if second >= 0 else -1
    agrees = [in_common(proposal, continued(tokens, match_end)) for match_end in (second, third)]
    moved = [float(now == before + 1 and before >= 0) for before, now in pairwise(match_ends)]
    result = {
        "context_length": len(tokens),
        "match": min(matches[-1], LONGEST_MATCH),
        "copied": min(in_a_row(predicted[::-1]), LONGEST_MATCH),
        "match_steady": min(in_a_row(moved[::-1]), LONGEST_MATCH),
        "match_in_prompt": float(0 <= match_end < prompt - 1),
        "after_match_predicted": min(in_a_row(there), LONGEST_LOOKUP),
        "second_match": min(in_common(tokens[::-1], tokens[: second + 1][::-1]), LONGEST_MATCH),
        "second_agrees": agrees[0],
        "third_agrees": min(agrees),
        **running("copied", predicted),
    }
    for count in AFTER_MATCH_LENGTHS:
        result[f"after_match_copied_{count}"] = (
            sum(there[:count]) / len(there[:count]) if there else 0.0
        )
    return result


def of_hits(tokens: list[int], prompt: int, hits: list[float]) -> dict[str, float]:
    """What a drafter's hits on the tokens after the prompt say."""
    result = running("hit", hits)
    usual = result["hit_mean_0.99"]
    result["hits"] = min(in_a_row(hits[::-1]), LONGEST_MATCH)
    for count in PRECEDENT_LENGTHS:
        ends = earlier_ends(tokens, count) if count <= len(tokens) else []
        after = [hits[end - prompt] for end in ends if end >= prompt]
        result[f"hit_after_{count}"] = (sum(after) + 2 * usual) / (len(after) + 2)
        if count == 1:
            result["seen_after"] = min(len(after), MOST_SEEN)
    return result


def of_draft(p: list[float], q: list[float], entropies: list[float]) -> dict[str, float]:
    """What the models' probabilities of the tokens after the prompt and the draft's entropies
    around them say."""
    accepted = [min(1.0, of_target / of_draft) for of_draft, of_target in zip(p, q, strict=True)]
    return {
        "draft_entropy_prev": entropies[-2],
        "draft_entropy_root": entropies[-1],
        **running("accepted", accepted),
        **running("draft_entropy", entropies[:-1]),
        "agreed": min(in_a_row(accepted[::-1]), LONGEST_MATCH),
    }
