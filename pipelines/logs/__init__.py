"""Stage `logs`: from an engine's logs to a selector, without a model."""
