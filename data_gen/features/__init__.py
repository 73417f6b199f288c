"""What the text and the models' rows along it say at a root; a decoder keeps it up to date step by step.

The text says most of the *source*, the place that a lookup copies from: what followed the longest earlier match of the
text's end. Whether the text will go on so again is often written in the text itself. In `a b c . a b d . a b` the end
`a b` was followed by `d` the last time, but by `c` the time before: half of its precedents speak for the proposal. Were
lookups right there when the text was read? Would the source's own source have gone on alike? All of this follows from
token ids alone.

A model's rows add more. The target's entropies are known wherever the text was generated, so a proposal that runs into
a place of high entropy is likely to end there. A drafter that has run over the committed text shows where its first
token was right.
"""

from data_gen.features.hits import HitHistory
from data_gen.features.rows import DraftHistory, TargetHistory
from data_gen.features.text import TextHistory

__all__ = ["DraftHistory", "HitHistory", "TargetHistory", "TextHistory"]
