"""The learner: traces as tensors, networks, replay, and what is tuned by it."""
