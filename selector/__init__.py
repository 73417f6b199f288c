"""The contract and the learner. Knows nothing of language models.

`selector.runtime` needs torch, NumPy and Numba, `selector.plain` NumPy alone.
"""
