"""Real speculative decoding, and what it records.

The names below are imported when they are first used, because an engine that has no transformers
needs `data_gen.engines` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_gen.decoding.decoder import Decoder
    from data_gen.decoding.loop import FixedTree
    from data_gen.drafting.lookup import LookupIndex
    from data_gen.drafting.sampled import draft_tree
    from data_gen.features.root import DrafterKnowledge, RootKnowledge, features_of
    from data_gen.generate import SpeculativeOutput, speculative_generate
    from data_gen.models.pair import CachedModel, ModelPair
    from data_gen.models.sampling import probabilities
    from data_gen.text_labels import label_text
    from data_gen.trees import DraftTree
    from data_gen.verification import VERIFIERS, Verifier, get_verifier, optimal_acceptance
    from data_gen.verification.checking import check_verifier

__all__ = [
    "VERIFIERS",
    "CachedModel",
    "Decoder",
    "DraftTree",
    "DrafterKnowledge",
    "FixedTree",
    "LookupIndex",
    "ModelPair",
    "RootKnowledge",
    "SpeculativeOutput",
    "Verifier",
    "check_verifier",
    "draft_tree",
    "features_of",
    "get_verifier",
    "label_text",
    "optimal_acceptance",
    "probabilities",
    "speculative_generate",
]
_MODULES = {
    "decoding.decoder": ("Decoder",),
    "decoding.loop": ("FixedTree",),
    "drafting.lookup": ("LookupIndex",),
    "drafting.sampled": ("draft_tree",),
    "features.root": ("DrafterKnowledge", "RootKnowledge", "features_of"),
    "generate": ("SpeculativeOutput", "speculative_generate"),
    "models.pair": ("CachedModel", "ModelPair"),
    "models.sampling": ("probabilities",),
    "text_labels": ("label_text",),
    "trees": ("DraftTree",),
    "verification": ("VERIFIERS", "Verifier", "get_verifier", "optimal_acceptance"),
    "verification.checking": ("check_verifier",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"data_gen.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
