"""The contract and the learner. Knows nothing of language models.

`selector.runtime.selector` needs torch, NumPy and Numba, `selector.plain` NumPy alone.
"""
