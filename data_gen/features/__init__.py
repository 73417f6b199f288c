"""Features: what the text, and the models' rows along it, say at a root.

Many features describe the *source* of a lookup, the place that it copies from: the longest earlier match of the text's
end. The text itself often shows how reliable the source is. In `a b c . a b d . a b`, `d` followed the end `a b` the
last time and `c` the time before, so half of the precedents support the proposal. Other features are how often lookups
were right near the source, and whether the source's own source continues alike. Token ids alone give all of these.

The models' rows add more. The target's entropies are known wherever the text was generated, and a lookup that reaches a
place of high entropy is likely to fail there. A drafter that has passed the committed text shows where its first token
was right.
"""

from data_gen.features.hits import HitHistory
from data_gen.features.rows import DraftHistory, TargetHistory
from data_gen.features.text import TextHistory

__all__ = ["DraftHistory", "HitHistory", "TargetHistory", "TextHistory"]
