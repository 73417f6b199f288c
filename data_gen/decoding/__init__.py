"""Speculative decoding, step by step."""
