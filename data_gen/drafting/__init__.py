"""Drafts: trees drawn from the draft model, and tokens copied from the text."""
