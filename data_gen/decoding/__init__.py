"""Decoders of speculative decoding: eager, or without host synchronisation inside a step."""

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import Chooser, Loop
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import Verifier

EAGER, GRAPH = "eager", "graph"  # values of `ModelPair.decoder`


def decoder_for(
    pair: ModelPair,
    sampling: Sampling,
    verifier: Verifier,
    chooser: Chooser,
    length: int,
    timed: bool = False,
) -> Loop:
    """A decoder of the pair's kind for texts of up to `length` tokens; the eager one where `GraphDecoder` refuses."""
    eager = Decoder(pair, sampling, verifier, chooser, timed=timed)
    if pair.decoder == EAGER:
        return eager
    try:
        return GraphDecoder(pair, sampling, verifier, chooser, length, timed=timed)
    except ValueError:
        return eager
