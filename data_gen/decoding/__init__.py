"""Decoders: a step at a time, eager, or compiled on preallocated memory."""
