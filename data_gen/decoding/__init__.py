"""Decoders of speculative decoding: eager, or without host synchronisation inside a step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing

import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import Chooser, Rehearsal
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import Verifier
from selector.actions import EMPTY, Action

AnyDecoder = Decoder | GraphDecoder
EAGER, GRAPH = "eager", "graph"  # values of `ModelPair.decoder`
TRIES = 16


def decoder_for(
    pair: ModelPair, sampling: Sampling, verifier: Verifier, chooser: Chooser, length: int, timed: bool = False
) -> AnyDecoder:
    """A decoder of the pair's kind for texts of up to `length` tokens; the eager one where `GraphDecoder` refuses."""
    eager = Decoder(pair, sampling, verifier, chooser, timed=timed)
    if pair.decoder == EAGER:
        return eager
    try:
        return GraphDecoder(pair, sampling, verifier, chooser, length, timed=timed)
    except ValueError:
        return eager


def rehearse(
    pair: ModelPair,
    sampling: Sampling,
    verifier: Verifier,
    chooser: Chooser,
    actions: Iterable[Action],
    prompt: Sequence[int],
    length: int,
) -> None:
    """Decode with each of some actions until a GPU's graphs of it are recorded, which takes as long as many steps; the
    eager decoder has nothing to record. Lookups that find no match in `TRIES` steps an action stay unrecorded."""
    missing = Counter[Action]()
    first = Rehearsal(chooser, iter(lambda: next(iter(missing), EMPTY), None))
    decoder = decoder_for(pair, sampling, verifier, first, length)
    if not isinstance(decoder, GraphDecoder):
        return
    missing.update(dict.fromkeys(actions, decoder.slow_steps))
    generator, left = torch.Generator(device=pair.device).manual_seed(0), TRIES * len(missing)
    while missing and left > 0:
        with torch.inference_mode(), closing(decoder.steps(prompt, generator)) as steps:
            for step, tokens in steps:
                left -= 1
                missing[step.action] -= step.nodes > 1 or not step.action.copies
                missing = +missing  # keeps the positive counts
                if not missing or left == 0 or step.length + len(tokens) > length:
                    break
