"""Real speculative decoding, and what it records."""
