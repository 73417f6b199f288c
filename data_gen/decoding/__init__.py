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
    """A decoder of i.i.d. drafts; the eager one where the graph decoder cannot serve (`GraphDecoder` says when).

    Args:
        length: of the longest text, prompt and new tokens.
        kind: of `KINDS`; that of the pair if None.
        timed: as in `Loop`.

    Raises:
        ValueError: the verifier is for drafts of another style.
    """
    kind = kind or pair.decoder
    if kind != EAGER:
        try:
            return GraphDecoder(
                pair, sampling, verifier, chooser, length, draft_sampling, compiled=kind == COMPILED, timed=timed
            )
        except ValueError:
            pass
    return Decoder(pair, sampling, verifier, chooser, draft_sampling, timed=timed)
