"""Decoders of speculative decoding: eager, or without host synchronisation inside a step."""

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import Chooser, Loop
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import Verifier

EAGER, GRAPH, COMPILED = "eager", "graph", "compiled graph"  # values of `ModelPair.decoder`


def decoder_for(
    pair: ModelPair,
    sampling: Sampling,
    verifier: Verifier,
    chooser: Chooser,
    length: int,
    draft_sampling: Sampling | None = None,
    timed: bool = False,
) -> Loop:
    """A decoder of i.i.d. drafts, of the pair's kind; the eager one where `GraphDecoder` refuses.

    Args:
        length: of the longest text, prompt and new tokens.
        timed: as in `Loop`.

    Raises:
        ValueError: the verifier is for drafts of another style.
    """
    eager = Decoder(pair, sampling, verifier, chooser, draft_sampling, timed=timed)
    if pair.decoder == EAGER:
        return eager
    compiled = pair.decoder == COMPILED
    try:
        graph = GraphDecoder(pair, sampling, verifier, chooser, length, draft_sampling, compiled=compiled, timed=timed)
    except ValueError:
        return eager
    if compiled:
        graph.compile_passes()
    return graph
