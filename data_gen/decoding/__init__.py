"""Decoders: a step at a time, eager, or as one queue of device work on preallocated memory."""

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import Chooser, Loop
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import Verifier

KINDS = EAGER, GRAPH, COMPILED = "eager", "graph", "compiled graph"


def decoder_for(
    pair: ModelPair,
    sampling: Sampling,
    verifier: Verifier,
    chooser: Chooser,
    length: int,
    kind: str | None = None,
    draft_sampling: Sampling | None = None,
    timed: bool = False,
) -> Loop:
    """A decoder of i.i.d. drafts: of the kind, or eager where `GraphDecoder` refuses. Its passes are compiled here.

    Args:
        length: of the longest text, prompt and new tokens.
        kind: of `KINDS`; that of the pair if None.
        timed: as in `Loop`.

    Raises:
        ValueError: the verifier is for drafts of another style.
    """
    kind = kind or pair.decoder
    if kind != EAGER:
        compiled = kind == COMPILED
        try:
            decoder = GraphDecoder(
                pair, sampling, verifier, chooser, length, draft_sampling, compiled=compiled, timed=timed
            )
        except ValueError:
            return Decoder(pair, sampling, verifier, chooser, draft_sampling, timed=timed)
        if compiled:
            decoder.compile_passes()
        return decoder
    return Decoder(pair, sampling, verifier, chooser, draft_sampling, timed=timed)
