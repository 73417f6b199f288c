"""Stage `evaluate`: every method on held-out prompts, decoded and replayed."""
