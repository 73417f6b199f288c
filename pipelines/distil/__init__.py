"""Trains a draft for a target that has none."""
