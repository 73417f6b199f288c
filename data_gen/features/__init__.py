"""Features: what the text, and both models' distributions along it, tell at a root.

Many features describe the tokens that a lookup copies: those after the longest earlier match of
the text's end. In `a b c . a b d . a b`, the last `a b` was followed by `d` and the one
before by `c`, so half of the precedents support the lookup's proposal `d`.
"""
