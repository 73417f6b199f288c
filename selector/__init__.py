"""The contract and the learner. Knows nothing of language models.

`selector.runtime` needs torch alone, `selector.plain` NumPy alone.
"""
