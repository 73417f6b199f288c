"""The contract and the learner. This package knows nothing of language models."""
